"""The algorithms, one file each, with their costs; ``table`` lists them."""
