"""A training step: passes through the units, the reduction of gradients, the update."""
