"""Units: what a user declares, what a rank holds of it, and all units and options of an engine."""
