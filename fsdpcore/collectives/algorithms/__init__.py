"""The algorithms that send messages, one file each; ``selection/table`` has their costs."""
