"""Units: what a user declares, and the parameters and gradients that a rank holds of it."""
