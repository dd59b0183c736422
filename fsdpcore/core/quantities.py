"""Sizes, rates and times as people write them: ``64KiB``, ``100Mbit``, ``25GB/s``, ``20ms``.

The functions have the form of those in ``checks``: they return what is computed with, in bytes,
bytes per second and seconds. A number without a unit is in these already.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from numbers import Real

from fsdpcore.core.errors import ArgumentError, FsdpcoreError

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_PREFIXES | _BINARY).items()}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in _PREFIXES.items()}
_RATES = {f"{unit}{end}": factor for unit, factor in (_BYTES | _BITS).items() for end in ("", "/s")}
# Of sizes nobody means bits: they may be in small letters, and do without the B.
_SIZES = {
    unit.lower()[:end]: factor for unit, factor in _BYTES.items() for end in (len(unit) - 1, None)
}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
# Sums and quotients of what is in between are finite.
_LEAST, _MOST = 1e-30, 1e30
_TEXT = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([a-zA-Z/]*)")


def as_size(value: object, what: str, *, error: type[FsdpcoreError] = ArgumentError) -> int:
    """Return a number of bytes; text such as ``64KiB``, ``80 gb`` or ``1.5T`` is read."""
    return int(_read(value, _SIZES, f"{what} must be a size, as in '64KiB' or '80GB'", error))


def as_rate(value: object, what: str, *, error: type[FsdpcoreError] = ArgumentError) -> float:
    """Return bytes per second; text such as ``100Mbit``, ``25GB/s`` or ``inf`` is read."""
    words = f"{what} must be a rate, as in '100Mbit', '25GB/s' or 'inf'"
    rate = math.inf if value in ("inf", math.inf) else _read(value, _RATES, words, error)
    if rate == 0:
        raise error(f"{words}, got {value!r:.80}")
    return rate


def as_seconds(value: object, what: str, *, error: type[FsdpcoreError] = ArgumentError) -> float:
    """Return seconds; text such as ``20ms`` or ``5us`` is read."""
    return _read(value, _TIMES, f"{what} must be a time, as in '20ms' or '5us'", error)


def _read(
    value: object, units: Mapping[str, float], words: str, error: type[FsdpcoreError]
) -> float:
    number = math.nan
    if isinstance(value, str):
        match = _TEXT.fullmatch(value.strip())
        if match is not None:
            factor = units.get(match[2], units.get(match[2].lower(), math.nan))
            number = float(match[1]) * (factor if match[2] else 1.0)
    elif not isinstance(value, bool) and isinstance(value, Real):
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not 0 <= number <= _MOST or 0 < number < _LEAST:
        raise error(f"{words}, got {value!r:.80}")
    return number
