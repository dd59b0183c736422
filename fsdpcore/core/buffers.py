"""Arrays as bytes: the dtypes that travel, and contiguous views of arrays to send or fill.

A dtype is named on the wire by its position in ``DTYPES``; the table only ever grows at its end.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fsdpcore.core.errors import ArgumentError, ProtocolError

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Allocate = Callable[[int, "np.dtype[Any]"], Array]
"""Makes a flat array of so many elements, with any content."""

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

DTYPES: tuple[np.dtype[Any], ...] = (
    np.dtype(np.bool_),
    np.dtype(np.int8),
    np.dtype(np.uint8),
    np.dtype(np.int16),
    np.dtype(np.uint16),
    np.dtype(np.int32),
    np.dtype(np.uint32),
    np.dtype(np.int64),
    np.dtype(np.uint64),
    np.dtype(np.float16),
    BFLOAT16,
    np.dtype(np.float32),
    np.dtype(np.float64),
    np.dtype(np.complex64),
    np.dtype(np.complex128),
)
CACHE_LINE = 64
_LARGE = 1 << 22  # bytes
"""Bytes."""

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def dtype_code(given: DTypeLike) -> int:
    """Return the number that stands for a dtype on the wire.

    Raises:
        ArgumentError: the dtype is not one of ``DTYPES`` (native byte order).
    """
    try:
        dtype = np.dtype(given)
    except TypeError:
        hint = "; a shape of several axes is one argument, (3, 4)"
        raise ArgumentError(
            f"{given!r:.80} is no dtype that NumPy knows{hint if isinstance(given, int) else ''}"
        ) from None
    try:
        return _CODES[dtype]
    except KeyError:
        known = ", ".join(d.name for d in DTYPES)
        raise ArgumentError(
            f"arrays of dtype {dtype} (byte order {dtype.byteorder!r}) cannot be communicated; "
            f"convert with astype() to one of: {known}"
        ) from None


def input_array(value: ArrayLike, what: str = "the array") -> Array:
    """Return ``value`` as a C-contiguous array of a dtype that travels, copied only if needed.

    Raises:
        ArgumentError: it is not an array of a supported dtype.
    """
    if type(value) is np.ndarray and value.dtype in _CODES and value.flags.c_contiguous:
        return value
    if hasattr(value, "__cuda_array_interface__"):
        raise ArgumentError(
            f"{what} is on a GPU, but not on one that this rank communicates with: copy it to the "
            "host (CuPy: array.get()), or use a transport for GPUs, with CuPy's arrays on the "
            "rank's own GPU (backend.device)"
        )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"NumPy cannot make an array of what was passed: {error}") from error
    if array.dtype == object and not isinstance(value, np.ndarray):
        kind = "None" if value is None else f"an object of type {type(value).__name__}"
        raise ArgumentError(f"{what} must be an array of numbers, got {kind}")
    dtype_code(array.dtype)
    # Not ascontiguousarray alone: it turns a 0-d array into one of shape (1,).
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def check_out(out: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return ``out`` after checking that a result of ``shape`` and ``dtype`` fits into it.

    Raises:
        ArgumentError: it is not a writable array of exactly that shape and dtype.
    """
    if type(out) is np.ndarray and out.shape == shape and out.dtype is dtype:  # noqa: SIM102
        if out.flags.writeable:  # a shortcut past what follows
            return out
    if not isinstance(out, np.ndarray):
        kind = f"{type(out).__module__}.{type(out).__qualname__}"
        raise ArgumentError(f"out must be a NumPy array to write into, as the input is; got {kind}")
    if isinstance(out, (np.matrix, np.ma.MaskedArray)):  # they reshape in ways of their own
        raise ArgumentError(f"out must be a plain array, got {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype:
        raise ArgumentError(
            f"out must have shape {shape} and dtype {dtype}, got {out.shape} and {out.dtype}"
        )
    if not out.flags.writeable:
        raise ArgumentError("out is read-only; pass a writable array")
    return out


def byte_view(array: Array) -> Bytes:
    """Return the bytes of a contiguous array as a flat uint8 view (works for bfloat16 too)."""
    return array.reshape(-1).view(np.uint8)


MAX_SIGNATURE = 2 + 8 * 64  # bytes; NumPy arrays have at most 64 dimensions


def pack_signature(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Encode dtype and shape, as they travel with a point-to-point message."""
    return struct.pack(f"<BB{len(shape)}Q", dtype_code(dtype), len(shape), *shape)


# Beside the number of a dtype: room for arrays of any shape.
_ROOM = 0x80


def pack_room(dtype: np.dtype[Any], count: int) -> bytes:
    """Encode what fits into a flat array of ``count`` elements: arrays with no more of them."""
    return struct.pack("<BBQ", dtype_code(dtype) | _ROOM, 1, count)


def fits_room(signature: bytes, nbytes: int, room: bytes, room_bytes: int) -> bool:
    """Whether an array of ``nbytes`` fits into what ``pack_room`` encoded, of ``room_bytes``.

    False if ``room`` is a signature, or ``signature`` is none of an array of that size.
    """
    if not room or not room[0] & _ROOM or nbytes > room_bytes:
        return False
    try:
        dtype, shape = unpack_signature(signature)
    except ProtocolError:
        return False
    return dtype is DTYPES[room[0] & ~_ROOM] and math.prod(shape) * dtype.itemsize == nbytes


def unpack_signature(signature: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Decode what ``pack_signature`` encoded; bytes behind it are ignored.

    Raises:
        ProtocolError: it is no signature.
    """
    try:
        code, ndim = struct.unpack_from("<BB", signature)
        return DTYPES[code], struct.unpack_from(f"<{ndim}Q", signature, 2)
    except (struct.error, IndexError):
        raise ProtocolError(f"{signature[:32]!r} does not describe an array") from None


def describe_signature(signature: bytes) -> str:
    """Say in words what ``pack_signature`` encoded; never raises, for use in error messages.

    That of ``pack_room`` as well.
    """
    try:
        if signature and signature[0] & _ROOM:
            dtype, shape = unpack_signature(bytes((signature[0] & ~_ROOM,)) + signature[1:])
            return f"up to {math.prod(shape)} elements of {dtype.name}"
        dtype, shape = unpack_signature(signature)
    except ProtocolError:
        return "not an array"
    return f"{dtype.name} of shape {shape}"


def split_sizes(total: int, parts: int) -> list[int]:
    """Sizes of ``total`` items in ``parts``: the first ``total % parts`` get one more.

    The rule of ``numpy.array_split``.
    """
    size, extra = divmod(total, parts)
    return [size + (index < extra) for index in range(parts)]


def bounds_of(sizes: Sequence[int], scale: int = 1) -> list[int]:
    """Positions at which consecutive pieces of ``sizes`` begin, and the end: ``len(sizes) + 1``."""
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size * scale)
    return bounds


@lru_cache(maxsize=64)
def kept_bounds(sizes: tuple[int, ...], scale: int) -> tuple[int, ...]:
    """The same as a tuple that is kept: one for all ranks that are threads of this process."""
    return tuple(bounds_of(sizes, scale))


def row_size(shape: tuple[int, ...]) -> int:
    """Elements in one row, that is one index of axis 0, of an array of ``shape``."""
    return math.prod(shape[1:])


def lined_up(shape: tuple[int, ...], dtype: DTypeLike, *, zeros: bool = False) -> Array:
    """Return a new array of the host that begins at a cache line; NumPy's begin anywhere.

    Vector instructions are faster there, and JAX takes no other memory without copying it. Its
    contents are undefined, unless they are ``zeros``.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = (np.zeros if zeros else np.empty)(nbytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def lined_up_zeros(size: int, dtype: np.dtype[Any]) -> Array:
    """Return a flat array of zeros as ``lined_up`` does.

    If it is large, the system is asked for all its pages at once, which are zeros. That takes a
    fraction of what it takes to come across them one by one, and to write zeros to them.
    """
    nbytes = size * dtype.itemsize
    populate = getattr(mmap, "MAP_POPULATE", 0)
    if nbytes < _LARGE or not populate:
        return lined_up((size,), dtype, zeros=True)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype, size)
