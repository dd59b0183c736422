"""Parts of ``checkpoint_planning.py``."""
