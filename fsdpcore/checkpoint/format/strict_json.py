"""JSON that comes back as it went in, or not at all.

Written is only what JSON can hold and Python reads back equal: no NaN, no tuples, no keys that are
no strings, no lone surrogates. Read is only strict JSON: no NaN, no key twice. Nothing is nested
deeper than ``MAX_DEPTH``, and nothing here recurses without a bound, whatever it is given.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, NoReturn

from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError, FsdpcoreError

MAX_DEPTH = 64
"""Lists and dicts in one another."""

MAX_INT_BITS = 2048
"""Of an integer; fewer than what Python reads at most, whatever its limit is set to."""

# What is read of an integer if Python itself has no limit: reading takes quadratic time.
_MAX_DIGITS = 4300
# More recursion than this, if a program allows it, could be more than the C stack holds.
_SAFE_RECURSION = 2000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NESTING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_SHORT = 80
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def check_text(text: object, what: str, error: type[FsdpcoreError] = ArgumentError) -> None:
    """Raise ``error`` if ``text`` is no string, or has half a surrogate pair, which is no UTF-8."""
    if type(text) is not str:
        raise error(f"{what} must be a string, got {short(text)}")
    complaint = _text_complaint(text)
    if complaint is not None:
        raise error(f"{what} {complaint}")


def check_json(value: object, what: str, error: type[FsdpcoreError] = ArgumentError) -> None:
    """Raise ``error`` unless JSON can hold a value so that it comes back equal, type for type.

    It can for None, bool, int of at most ``MAX_INT_BITS`` bits, finite float, str, list, and dict
    with keys of str, nested at most ``MAX_DEPTH`` deep. Nothing is converted, so all else is
    refused: tuples, scalars of NumPy, subclasses.
    """
    path: list[Any] = []
    # (value, key of it, depth), the last one first, so that a cycle ends at the greatest depth.
    todo: list[tuple[Any, Any, int]] = [(value, None, 0)]
    while todo:
        each, key, depth = todo.pop()
        if depth:
            del path[depth - 1 :]
            path.append(key)
        kind = type(each)
        complaint = _complaint(each)
        if complaint is not None or ((kind is dict or kind is list) and depth >= MAX_DEPTH):
            where = what + "".join(f"[{short(step)}]" for step in path[:8])
            raise error(f"{where} {complaint or f'is nested more than {MAX_DEPTH} deep'}")
        if kind is dict:
            todo.extend((inner, key, depth + 1) for key, inner in each.items())
        elif kind is list:
            todo.extend((inner, index, depth + 1) for index, inner in enumerate(each))


def _complaint(value: Any) -> str | None:
    """Say why JSON cannot hold a value, leaving out what is in a list or dict; None if it can."""
    kind = type(value)
    if value is None or kind is bool or kind is list:
        return None
    if kind is str:
        return _text_complaint(value)
    if kind is int:
        few = value.bit_length() <= MAX_INT_BITS
        return None if few else f"is an integer of more than {MAX_INT_BITS} bits"
    if kind is float:
        return None if math.isfinite(value) else f"is {value}, which JSON cannot hold"
    if kind is dict:
        for key in value:
            if type(key) is not str:
                return f"has the key {short(key)}, which is no string"
            if (complaint := _text_complaint(key)) is not None:
                return f"has a key that {complaint}"
        return None
    return (
        f"is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold as it is; convert it "
        "to None, bool, int, float, str, list or dict"
    )


def _text_complaint(text: str) -> str | None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return (
                f"is {short(text)}, whose character {error.start} is half of a surrogate pair, "
                "which UTF-8 cannot hold"
            )
    return None


def short(value: object) -> str:
    """Return a value for a message: in a line, of bounded length, however large or deep it is."""
    if type(value) is str:
        text = ascii(value[:_SHORT])
    elif type(value) in (list, tuple):
        few = [_scalar(each) for each in value[:8]]  # type: ignore[index]
        text = "[" + ", ".join(few) + (", ..." if len(value) > 8 else "") + "]"  # type: ignore[arg-type]
    else:
        text = _scalar(value)
    return text if len(text) <= _SHORT else text[: _SHORT - 3] + "..."


def _scalar(value: object) -> str:
    if type(value) is int:
        return str(value) if value.bit_length() <= MAX_INT_BITS else "a huge integer"
    if value is None or type(value) in (bool, float):
        return repr(value)
    return ascii(value[:_SHORT]) if type(value) is str else f"a {type(value).__qualname__}"


def encode(value: object) -> str:
    """Return a value that ``check_json`` has let pass as JSON on one line."""
    return _encoder.encode(value)


def decode(data: bytes, what: str) -> Any:
    """Return what JSON in UTF-8 says; its nesting is left to ``check_json``.

    Raises:
        CorruptCheckpointError: it is no strict JSON; ``what`` begins the message.
    """
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(
            f"{what} is not UTF-8: {error.reason} at byte {error.start}"
        ) from None
    _check_nesting(data, what)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=None if _digits_are_limited() else _int,
        )
    except RecursionError:
        raise CorruptCheckpointError(f"{what} is nested too deep") from None
    except json.JSONDecodeError as error:
        raise CorruptCheckpointError(
            f"{what} is no JSON: {error.msg} at character {error.pos}"
        ) from None
    except ValueError as error:
        raise CorruptCheckpointError(f"{what} is no strict JSON: {error}") from None
    if _SURROGATE.search(data):
        _check_surrogates(value, what)
    return value


def _check_nesting(data: bytes, what: str) -> None:
    """Refuse deep nesting without recursion, where Python would recurse too deep for its stack."""
    if sys.getrecursionlimit() <= _SAFE_RECURSION:
        return
    depth = 0
    for token in _NESTING.finditer(data):
        first = token[0][0]
        depth += (first in b"[{") - (first in b"]}")
        if depth > _SAFE_RECURSION:
            raise CorruptCheckpointError(f"{what} is nested too deep at byte {token.start()}")


def _digits_are_limited() -> bool:
    limit = getattr(sys, "get_int_max_str_digits", None)
    return limit is not None and 0 < limit() <= _MAX_DIGITS


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {short(key)} is there twice")
            seen.add(key)
    return made


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{short(text)} is more than a float can hold")
    return value


def _int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _check_surrogates(value: object, what: str) -> None:
    todo = [value]
    while todo:
        each = todo.pop()
        if type(each) is str:
            check_text(each, f"text in {what}", CorruptCheckpointError)
        elif type(each) is list:
            todo.extend(each)
        elif type(each) is dict:
            todo.extend(each)
            todo.extend(each.values())
