"""Arrays of other libraries, taken over as NumPy's: without a copy wherever both can share memory.

No library is imported here; what is asked for are the protocols that arrays have in common
(``__array__``, DLPack), and a few methods by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from fsdpcore.core.buffers import BFLOAT16, Array
from fsdpcore.core.errors import ArgumentError

REFUSED = (TypeError, ValueError, RuntimeError, BufferError, AttributeError)
"""What libraries raise where they do not share an array."""


def is_foreign(value: object) -> bool:
    """Whether it is an array of another library than NumPy."""
    if isinstance(value, (np.ndarray, np.generic)):
        return False
    return hasattr(value, "__dlpack__") or hasattr(value, "__array__")


def detached(value: Any) -> Any:
    """Return an array without what PyTorch keeps apart from its memory.

    That is the history, for which it refuses to share it, and whether all of it is conjugated or
    negated, which DLPack does not tell.
    """
    for name in ("detach", "resolve_conj", "resolve_neg"):
        method = getattr(value, name, None)
        if callable(method):
            value = method()
    return value


def refuse_traced(*values: object) -> None:
    """Raise ArgumentError if JAX is tracing, where arrays have no numbers yet."""
    tracer = getattr(sys.modules.get("jax.core"), "Tracer", ())
    if any(isinstance(value, tracer) for value in values):
        raise ArgumentError(
            "this array is traced by JAX and has no numbers yet: collectives and train_step do not "
            "go inside of jax.jit, jax.grad or jax.vmap; return the value as aux, and call them "
            "outside"
        )


def as_numpy(value: Any, what: str) -> Array:
    """Return an array of any library, or what NumPy makes an array of, as a NumPy array.

    It shares the memory of an array of the host; that of PyTorch is taken without its history.

    Args:
        value: an array in the memory of the host, a number, or nested sequences of numbers.
        what: the words that messages use for it.

    Raises:
        ArgumentError: it is no array, it has a mask, JAX traces it, or it cannot be taken over:
            it is on a GPU, for instance.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"{what} is a masked array, whose mask would be lost; fill it before")
    if value is None:
        raise ArgumentError(f"{what} is None, and must be an array")
    if not is_foreign(value):
        try:
            return np.asarray(value)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{what} is no array: {error}") from error
    refuse_traced(value)
    value = detached(value)
    ways: list[Callable[[Any], Array]] = []
    if _is_bfloat16(value):
        ways.append(_by_bits)
    if hasattr(value, "__array__"):
        ways.append(np.asarray)
    if hasattr(value, "__dlpack__"):
        ways.append(np.from_dlpack)
    reasons = []
    for way in ways:
        try:
            return way(value)
        except REFUSED as error:
            reasons.append(str(error))
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise ArgumentError(f"{what}, of type {kind}, cannot become a NumPy array: {reasons[0]}")


def _is_bfloat16(value: Any) -> bool:
    return str(getattr(value, "dtype", "")).endswith("bfloat16")


def _by_bits(value: Any) -> Array:
    """Take over an array of bfloat16, which NumPy has no name for, as 16 bits each."""
    if isinstance(getattr(value, "dtype", None), np.dtype):
        return np.asarray(value)  # with the dtype that NumPy is taught by ml_dtypes
    library: Any = sys.modules[type(value).__module__.partition(".")[0]]
    return np.asarray(value.view(library.uint16)).view(BFLOAT16)


def library_of(value: Any) -> str:
    """Return of which library an array is: "numpy", "jax", "torch", or the name of its module."""
    if isinstance(value, np.ndarray):
        return "numpy"
    return {"jaxlib": "jax"}.get(name := type(value).__module__.partition(".")[0], name)


def is_random_key(value: Any) -> bool:
    """Whether it is a typed key of JAX, or an array of them: these are no numbers."""
    if library_of(value) != "jax" or not hasattr(value, "dtype"):
        return False
    jax: Any = sys.modules["jax"]
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def given_to(library: str, array: Array) -> Any:
    """Return a NumPy array as one of "jax" or "torch", on the host; itself for any other library.

    Itself, too, where the library is not imported. It may share the memory.
    """
    module: Any = sys.modules.get(library)
    if module is None:
        return array[()] if library == "scalar" else array
    if library == "jax":
        made = module.numpy.asarray(array)
        return made if made.dtype == array.dtype else array  # without x64 it would be rounded
    if library == "torch":
        if array.dtype == BFLOAT16:
            return module.from_numpy(array.view(np.int16)).view(module.bfloat16)
        return module.from_numpy(array)
    return array
