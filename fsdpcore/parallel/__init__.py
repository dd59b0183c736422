"""Tensor-parallel layers: a matrix is cut over the ranks of a group, and so is the work."""
