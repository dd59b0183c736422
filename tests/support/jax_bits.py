"""JAX with 64 bits, which it does without unless it is told."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any

import jax


def with_64_bits() -> AbstractContextManager[Any]:
    """Have JAX compute with 64 bits on this thread; where that is depends on its version."""
    module = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    return module.enable_x64(True)
