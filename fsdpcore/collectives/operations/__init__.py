"""The collective operations: arguments in, a checked call out."""
