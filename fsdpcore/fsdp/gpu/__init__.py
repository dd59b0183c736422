"""The engine's own kernels on a GPU."""
