"""Which algorithm ``auto`` takes: overrides, measured tables, cost formulas."""
