"""Objects as bytes: values that Python, JSON and NumPy have in common, nested in any way.

``pack`` refuses what it does not know, by its place in the object, and ``unpack`` makes nothing
else, whatever bytes it is given: it calls no code that the sender names, and allocates no more than
has come. Pickle is another way, which both sides have to ask for.

A frame is ``<3sBQ``: "FCO", how the rest is written (0: as below, 1: pickle), and its size. A value
is a byte that says of which kind it is, and what follows from that, in little endian: numbers of 8
bytes, text and bytes behind their size, the values of a list behind their count. The bytes of an
array are its elements in C order, behind its dtype and shape.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from fsdpcore.core.buffers import Array, Bytes, byte_view
from fsdpcore.core.errors import ArgumentError, ProtocolError, in_words

MAX_DEPTH = 64
"""Lists, tuples and dicts in one another."""

HEADER_BYTES = 12

_HEADER = struct.Struct("<3sBQ")
_MAGIC = b"FCO"
_SIZE, _INT, _FLOAT = struct.Struct("<Q"), struct.Struct("<q"), struct.Struct("<d")
_MAX_AXES = 32  # of any NumPy

# Types of ml_dtypes whose every byte is a value: those of less than a byte are not.
_ML_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in dir(ml_dtypes)
    if name.startswith(("bfloat16", "float8_"))
}
_NUMPY_DTYPE = re.compile(
    r"\|b1|[<>|]i1|[<>|]u1|[<>][iu][248]|[<>]f[248]|[<>]c(?:8|16)"
    r"|\|S[1-9][0-9]{0,9}|[<>]U[1-9][0-9]{0,8}"
    r"|[<>][mM]8(?:\[[0-9]{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)


def new_bytes(size: int) -> Bytes:
    """Return an array of so many bytes."""
    return np.empty(size, np.uint8)


def pack(
    value: object, what: str, *, pickled: bool = False, empty: Callable[[int], Bytes] = new_bytes
) -> Bytes:
    """Return an object as a frame.

    Args:
        value: None, bool, int, float, str, bytes, NumPy arrays and scalars, and lists, tuples and
            dicts (with keys of str and int) of these; of these very types. Or anything that
            can be pickled.
        what: begins the message of an error.
        pickled: whether to pickle it.
        empty: makes an array of so many bytes for the frame.

    Raises:
        ArgumentError: there is something else in it, or it cannot be pickled.
    """
    if pickled:
        try:
            parts = [b"", pickle.dumps(value, protocol=5)]
        except Exception as error:
            raise ArgumentError(f"{what}: pickle refuses it: {in_words(error)}") from error
    else:
        parts = _Writer(what).write(value)
    size = sum(len(part) for part in parts)
    parts[0] = _HEADER.pack(_MAGIC, pickled, size)
    frame = empty(HEADER_BYTES + size)
    memory, at = frame.data, 0
    for part in parts:
        memory[at : at + len(part)] = part
        at += len(part)
    return frame


def read_header(data: Bytes) -> tuple[bool, int]:
    """Return whether the object of a frame is pickled, and the size of the whole frame.

    Raises:
        ProtocolError: ``data`` is not the beginning of a frame.
    """
    magic, pickled, size = b"", 2, 0
    if data.size >= HEADER_BYTES:
        magic, pickled, size = _HEADER.unpack(data[:HEADER_BYTES].tobytes())
    if magic != _MAGIC or pickled > 1 or size > sys.maxsize - HEADER_BYTES:
        raise ProtocolError("these bytes are no object")
    return bool(pickled), HEADER_BYTES + size


def unpack(data: Bytes, *, pickled: bool = False) -> Any:
    """Return the object of a frame, which has no memory in common with it.

    Args:
        data: the frame, contiguous.
        pickled: whether the caller trusts whoever has made it: then it is unpickled, which may
            run any code.

    Raises:
        ProtocolError: ``pack`` has not made it so.
        Exception: of ``pickled`` ones, what unpickling raises.
    """
    is_pickled, size = read_header(data)
    if is_pickled is not pickled or size != data.size:
        raise ProtocolError("these bytes are not the object that was announced")
    if pickled:
        return pickle.loads(data[HEADER_BYTES:].data)  # noqa: S301 (the caller asks for it)
    return _Reader(data[HEADER_BYTES:]).read()


class _Writer:
    """Writes one object, as a list of its parts; arrays are not copied."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._path: list[object] = []
        self._parts: list[Any] = [b""]  # room for a header

    def write(self, value: object) -> list[Any]:
        self._put(value)
        return self._parts

    def _put(self, value: Any) -> None:
        kind = type(value)
        write = _WRITERS.get(kind)
        if write is not None:
            write(self, value)
        elif isinstance(value, np.generic):
            self._array(b"G", np.asarray(value), value)
        else:
            raise self._refused(kind)

    def _none(self, value: None) -> None:
        self._parts.append(b"N")

    def _bool(self, value: bool) -> None:
        self._parts.append(b"T" if value else b"F")

    def _int(self, value: int) -> None:
        if -(2**63) <= value < 2**63:
            self._parts.append(b"i" + _INT.pack(value))
        else:
            self._sized(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def _float(self, value: float) -> None:
        self._parts.append(b"D" + _FLOAT.pack(value))

    def _str(self, value: str) -> None:
        try:
            self._sized(b"S", value.encode())
        except UnicodeEncodeError as error:
            raise self._error(
                f"character {error.start} of {value!r:.80} is half of a surrogate pair, which "
                "cannot be sent"
            ) from None

    def _bytes(self, value: bytes) -> None:
        self._sized(b"B", value)

    def _sized(self, kind: bytes, content: bytes) -> None:
        self._parts += (kind + _SIZE.pack(len(content)), content)

    def _list(self, value: list[Any] | tuple[Any, ...]) -> None:
        self._parts.append((b"L" if type(value) is list else b"U") + _SIZE.pack(len(value)))
        for index, each in enumerate(value):
            self._inside(index, each)

    def _dict(self, value: dict[Any, Any]) -> None:
        self._parts.append(b"M" + _SIZE.pack(len(value)))
        for key, each in value.items():
            if type(key) is not str and type(key) is not int:
                raise self._error(
                    f"a dict with the key {key!r:.80} cannot be sent; keys are str or int"
                )
            self._put(key)
            self._inside(key, each)

    def _inside(self, step: object, value: object) -> None:
        self._path.append(step)
        if len(self._path) > MAX_DEPTH:
            raise self._error(f"nested more than {MAX_DEPTH} deep, or in itself")
        self._put(value)
        self._path.pop()

    def _array(self, kind: bytes, array: Array, scalar: Any = None) -> None:
        dtype = array.dtype
        name = dtype.name if dtype.name in _ML_DTYPES else dtype.str
        try:
            known = _dtype_named(name) == dtype
        except ProtocolError:
            known = False
        if not known or array.ndim > _MAX_AXES:
            raise self._error(
                f"an array of dtype {dtype} and {array.ndim} axes cannot be sent; "
                f"astype() makes one of numbers or text"
            )
        if dtype.kind in "SU" and scalar is not None and array[()] != scalar:
            raise self._error(f"{scalar!r:.80} ends with a null, which NumPy cuts off")
        self._sized(kind, name.encode())
        shape = array.shape
        self._parts.append(struct.pack(f"<{1 + len(shape)}Q", len(shape), *shape))
        if array.size:
            flat = array if array.flags.c_contiguous else np.ascontiguousarray(array)
            self._parts.append(byte_view(flat).data)

    def _numpy(self, value: Array) -> None:
        self._array(b"A", value)

    def _refused(self, kind: type) -> ArgumentError:
        name = kind.__qualname__
        if kind.__module__ != "builtins":
            name = f"{kind.__module__}.{name}"
        if hasattr(kind, "__cuda_array_interface__"):
            hint = "copy it to the host (CuPy: array.get(), PyTorch: tensor.numpy(force=True))"
        elif hasattr(kind, "__array__"):
            hint = "np.asarray() makes an array of it that can"
        else:
            hint = (
                "convert it to None, bool, int, float, str, bytes, list, tuple, dict or NumPy "
                "arrays, or pass pickle=True on all ranks"
            )
        return self._error(f"a {name} cannot be sent; {hint}")

    def _error(self, complaint: str) -> ArgumentError:
        path = "".join(f"[{step!r:.40}]" for step in self._path[:8])
        more = "[...]" if len(self._path) > 8 else ""
        return ArgumentError(f"{self._what}: {f'at {path}{more}: ' if path else ''}{complaint}")


_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _Writer._none,
    bool: _Writer._bool,
    int: _Writer._int,
    float: _Writer._float,
    str: _Writer._str,
    bytes: _Writer._bytes,
    list: _Writer._list,
    tuple: _Writer._list,
    dict: _Writer._dict,
    np.ndarray: _Writer._numpy,
}


class _Reader:
    """Reads one object, and trusts no byte of it."""

    def __init__(self, data: Bytes) -> None:
        self._data = data.data
        self._at = 0
        self._depth = 0

    def read(self) -> Any:
        value = self._value()
        if self._at != len(self._data):
            raise _broken(f"{len(self._data) - self._at} bytes too many")
        return value

    def _value(self) -> Any:
        kind = self._take(1)[0]
        read = _READERS.get(kind)
        if read is None:
            raise _broken(f"there is no kind {kind}")
        return read(self)

    def _take(self, size: int) -> memoryview:
        end = self._at + size
        if end > len(self._data):
            raise _broken(f"{end - len(self._data)} bytes are missing")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _number(self) -> int:
        found: int = _SIZE.unpack(self._take(8))[0]
        return found

    def _small_int(self) -> int:
        found: int = _INT.unpack(self._take(8))[0]
        return found

    def _int(self) -> int:
        return int.from_bytes(self._bytes(), "little", signed=True)

    def _float(self) -> float:
        found: float = _FLOAT.unpack(self._take(8))[0]
        return found

    def _str(self) -> str:
        try:
            return str(self._take(self._number()), "utf-8")
        except UnicodeDecodeError:
            raise _broken("text that is not UTF-8") from None

    def _bytes(self) -> bytes:
        return self._take(self._number()).tobytes()

    def _list(self) -> list[Any]:
        count = self._enter()
        found = [self._value() for _ in range(count)]  # which ends where the bytes do
        self._depth -= 1
        return found

    def _tuple(self) -> tuple[Any, ...]:
        return tuple(self._list())

    def _dict(self) -> dict[Any, Any]:
        found = {}
        count = self._enter()
        for _ in range(count):
            key = self._value()
            if (type(key) is not str and type(key) is not int) or key in found:
                raise _broken("a key that cannot be one")
            found[key] = self._value()
        self._depth -= 1
        return found

    def _enter(self) -> int:
        """Go one level down, to so many items; ``_depth`` leads up."""
        count = self._number()
        self._depth += 1
        if self._depth > MAX_DEPTH and count:
            raise _broken(f"nested more than {MAX_DEPTH} deep")
        return count

    def _array(self) -> Array:
        dtype = _dtype_named(self._bytes().decode("ascii", "replace"))
        axes = self._number()
        if axes > _MAX_AXES:
            raise _broken(f"an array of {axes} axes")
        shape = struct.unpack(f"<{axes}Q", self._take(8 * axes))
        # NumPy counts the bytes of an empty array as if its axes without elements were not there.
        if math.prod(filter(None, shape)) * dtype.itemsize > sys.maxsize:
            raise _broken(f"an array of shape {shape}")
        content = self._take(math.prod(shape) * dtype.itemsize)
        array: Array = np.empty(shape, dtype)
        byte_view(array)[...] = np.frombuffer(content, np.uint8)
        _check_elements(array)
        return array

    def _scalar(self) -> Any:
        array = self._array()
        if array.shape:
            raise _broken("a scalar with axes")
        return array[()]


_READERS: dict[int, Callable[[_Reader], Any]] = {
    ord("N"): lambda reader: None,
    ord("T"): lambda reader: True,
    ord("F"): lambda reader: False,
    ord("i"): _Reader._small_int,
    ord("I"): _Reader._int,
    ord("D"): _Reader._float,
    ord("S"): _Reader._str,
    ord("B"): _Reader._bytes,
    ord("L"): _Reader._list,
    ord("U"): _Reader._tuple,
    ord("M"): _Reader._dict,
    ord("A"): _Reader._array,
    ord("G"): _Reader._scalar,
}


def _dtype_named(name: str) -> np.dtype[Any]:
    """Return a dtype that can be sent, by the name that it is sent under."""
    found = _ML_DTYPES.get(name)
    if found is not None:
        return found
    if _NUMPY_DTYPE.fullmatch(name):
        try:
            return np.dtype(name)
        except (TypeError, ValueError):
            pass
    raise _broken(f"the dtype {name!r:.40}")


def _check_elements(array: Array) -> None:
    """Refuse bytes that are no value of their dtype, for which NumPy makes no promise."""
    kind, most = array.dtype.kind, -1
    if kind == "b" and array.size:
        most = int(byte_view(array).max()) - 1
    elif kind == "U" and array.size:
        codes = byte_view(array).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        most = int(codes.max()) - sys.maxunicode
    if most > 0:
        raise _broken(f"an array of {array.dtype} with what is none of its values")


def _broken(what: str) -> ProtocolError:
    return ProtocolError(f"these bytes are no object that a rank of this job would send: {what}")
