"""Indexing: slices are views, arrays of indices gather and scatter."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.fake_cuda.arrays import ndarray
from support.fake_cuda.launch import arrays_in, host_of, launch, replaced, run


def _parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _is_basic(key: Any) -> bool:
    return all(
        part is None
        or part is Ellipsis
        or (isinstance(part, (int, np.integer, slice)) and not isinstance(part, bool))
        for part in _parts(key)
    )


def _whole(key: Any) -> tuple[Any, ...]:
    """A basic key that always gives an array, and never a scalar."""
    parts = _parts(key)
    return parts if any(part is Ellipsis for part in parts) else (*parts, Ellipsis)


def _is_mask(part: Any) -> bool:
    return isinstance(part, (ndarray, np.ndarray)) and part.dtype == np.bool_


def taken(array: ndarray, key: Any) -> ndarray:
    """``array[key]``."""
    if _is_basic(key):
        return array._of(array._host[_whole(key)])
    if any(_is_mask(part) for part in _parts(key)):
        # How many there are is not known before: the host waits for the mask.
        key = tuple(part.get() if isinstance(part, ndarray) else part for part in _parts(key))
        key = key[0] if len(key) == 1 else key
    indices = [part for part in _parts(key) if isinstance(part, ndarray)]
    if not indices:
        return run("take", lambda a: a[key], [array])
    zeros = _zeros(key)
    shape = np.broadcast_to(np.ones((), array.dtype), array.shape)[zeros].shape
    from support.fake_cuda.arrays import new

    made = new(shape, array.dtype)
    source, target, real = array._host, made._host, replaced(key, host_of)
    launch("take", lambda: np.copyto(target, source[real]), [array, *indices], [made])
    return made


def _zeros(key: Any) -> Any:
    """A key of the same kind that is in bounds, whatever the values of indices are."""
    return replaced(key, lambda part: np.zeros(part.shape, part.dtype))


def put(array: ndarray, key: Any, value: Any) -> None:
    """``array[key] = value``."""
    if isinstance(value, np.ndarray) and value.ndim:
        raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
    if isinstance(value, (list, tuple)):
        raise TypeError(f"Unsupported type {type(value)}")
    target = array._host
    if _is_basic(key):
        target = target[_whole(key)]
        real: Any = Ellipsis
        written = array._of(target)
    else:
        target[_zeros(key)]  # raises what is wrong with it
        real = replaced(key, host_of)
        written = array
    if isinstance(value, ndarray):
        room = target.shape if _is_basic(key) else target[_zeros(key)].shape
        if np.broadcast_shapes(value.shape, room) != room:
            raise ValueError(f"shape mismatch: {value.shape} into {room}")
        source = value._host
        reads = [value, *arrays_in(list(_device_parts(key)))]
    else:
        source = np.asarray(value)
        reads = arrays_in(list(_device_parts(key)))

    def work() -> None:
        with np.errstate(all="ignore"):
            target[real] = source.astype(target.dtype) if source.dtype.kind == "c" else source

    launch("put", work, reads, [written])


def _device_parts(key: Any) -> list[ndarray]:
    return [part for part in _parts(key) if isinstance(part, ndarray)]
