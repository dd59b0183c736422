"""A step as data before it runs: memory, traffic, time, and the report that compares."""
