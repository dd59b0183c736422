"""Short hashes by which ranks compare what they hold: equal where the bytes are."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any

DIGEST_BYTES = 16
"""How long a digest is, unless a caller wants it shorter."""


def digest(data: bytes | bytearray | memoryview, size: int = DIGEST_BYTES) -> bytes:
    """Hash bytes; the same on every machine."""
    return hashlib.blake2b(data, digest_size=size).digest()


def hex_digest(data: bytes | bytearray | memoryview, size: int = DIGEST_BYTES) -> str:
    """Return ``digest`` in hexadecimal digits, two for a byte."""
    return digest(data, size).hex()


def function_digest(function: Callable[..., Any]) -> str:
    """Hash what a function computes; the same in every process with this version of Python.

    That is the code of a Python function, and of what can be called that it has got from functions
    around it, by defaults or ``functools.partial``; of an object that can be called, that of the
    functions it holds as well; the name of any other. Values, and what global names stand for, are
    not looked at.
    """
    text = "\n".join(_told(function, set()))
    return hex_digest(text.encode(errors="backslashreplace"), 4)


def _told(function: Any, seen: set[int]) -> Iterator[str]:
    if id(function) in seen:  # it refers to itself
        return
    seen.add(id(function))
    held: list[Any] = []
    if isinstance(function, functools.partial):
        held = [*function.args, *function.keywords.values()]
        function = function.func
    if isinstance(type(function).__call__, types.FunctionType):  # an object of a user's class
        function = function.__call__
    if isinstance(function, types.MethodType):
        # No other objects: what numpy.vectorize holds once it was called, it did not before.
        values = getattr(function.__self__, "__dict__", {}).values()
        held += (value for value in values if isinstance(value, types.FunctionType))
        function = function.__func__
    if isinstance(function, types.FunctionType):
        yield _words(function.__code__)
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        held += map(_content, function.__closure__ or ())
    else:
        home = getattr(function, "__module__", None) or type(function).__module__
        yield f"{home}.{getattr(function, '__name__', type(function).__qualname__)}"
    for value in filter(callable, held):
        yield from _told(value, seen)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _words(constant: object) -> str:
    """Say what stands in code, without what differs from process to process."""
    if isinstance(constant, types.CodeType):
        parts = [_words(each) for each in constant.co_consts]
        return f"{constant.co_code.hex()} {constant.co_names} {parts}"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_words, constant))})"
    if isinstance(constant, frozenset):
        return f"{{{', '.join(sorted(map(_words, constant)))}}}"
    return repr(constant)
