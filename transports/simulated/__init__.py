"""``sim``: the ranks are threads of this process."""

from .backend import SimBackend

__all__ = ["SimBackend"]
