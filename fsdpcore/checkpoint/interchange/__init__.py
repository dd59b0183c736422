"""Checkpoints without ranks: export, import, rewrite, compare, verify."""
