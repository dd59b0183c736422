"""Saving: describe, agree, plan, write, commit."""
