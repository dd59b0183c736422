"""Collectives among ranks that see the same memory."""
