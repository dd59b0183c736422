"""Which algorithm ``auto`` takes: all that there are, overrides, measured tables, costs."""
