"""JAX, imported where something needs it, and computing on the host."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from fsdpcore.core.errors import ArgumentError, MissingDependencyError


def import_jax() -> Any:
    """Return JAX; raise MissingDependencyError if it is not installed."""
    try:
        import jax
    except ImportError as error:
        install = "pip install -e '.[jax]'"
        raise MissingDependencyError(
            f"this needs JAX; in the checkout of fsdpcore: {install}", install
        ) from error
    return jax


def on_host(jax: Any) -> contextlib.AbstractContextManager[Any]:
    """Have JAX compute on the host in a ``with`` block, also where it has found a GPU."""
    if jax.default_backend() == "cpu":
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = jax.default_device(
        jax.local_devices(backend="cpu")[0]
    )
    return context


def check_width(jax: Any, dtype: Any) -> None:
    """Raise ArgumentError for float64, if JAX would round it to float32."""
    if dtype == np.float64 and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ArgumentError(
            "a parameter is float64, which JAX would round to float32; make it float32, or have "
            'JAX compute with 64 bits: jax.config.update("jax_enable_x64", True)'
        )
