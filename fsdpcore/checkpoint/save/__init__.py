"""Saving: all ranks agree who writes what, write it, and commit a folder that then counts."""
