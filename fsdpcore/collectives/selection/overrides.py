"""The grammar in which a user, or a table of measurements, says which algorithm to take.

::

    ranges = item { ";" item }
    item   = name [ ":" low "-" high ]
    low    = a number of bytes: 8192, or with a unit, 8KiB (KiB, MiB, GiB)
    high   = the same, or "max"

as in ``doubling:0-8192;direct:8193-max``. Both ends of a range belong to it; a bare name stands for
all sizes. Sizes that no item covers, and the name ``auto``, are left to the usual choice. The
bytes are the n of the cost formulas: the array of one rank for all_reduce, reduce and broadcast,
all of it together for the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise

from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.collectives.shared.algorithm import NAME as SHARED
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.policy import AlgorithmRange, AlgorithmRanges
from fsdpcore.core.text import nearest

_ITEM = re.compile(r"([A-Za-z_]\w*)\s*(?::\s*(\w+)\s*-\s*(\w+))?")
_SIZE = re.compile(r"(\d+)(KiB|MiB|GiB|)")
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse(
    collective: str,
    text: object,
    source: str,
    *,
    canonical: bool = False,
    any_name: bool = False,
) -> AlgorithmRanges:
    """Read the ranges of one collective.

    Args:
        collective: a key of ``ALGORITHMS``.
        text: in the grammar above.
        source: where the text comes from, for errors.
        canonical: refuse algorithms that never reduce in the canonical order.
        any_name: take names of algorithms that no installed transport has.

    Raises:
        ConfigError: the text is wrong; the message says what and where.
    """
    what = f"{source}: {collective}={text!r}"
    if not isinstance(text, str):
        raise ConfigError(f"{what}: expected text such as 'doubling:0-8KiB;direct:8193-max'")
    ranges = sorted((_item(piece.strip(), what) for piece in text.split(";")), key=_start)
    for item in ranges:
        if not any_name:
            _check_name(item.algorithm, collective, what)
        if canonical and not may_be_canonical(collective, item.algorithm):
            raise ConfigError(
                f"{what}: {item.algorithm!r} does not reduce in the canonical order, which "
                "'deterministic' asks for; take another one, or switch that off"
            )
    for left, right in pairwise(ranges):
        if left.high is None or left.high >= right.low:
            raise ConfigError(f"{what}: '{left}' and '{right}' overlap; both ends are included")
    return AlgorithmRanges(ranges)


def check_collective(name: object, source: str, known: Collection[str] = tuple(ALGORITHMS)) -> None:
    """Raise ``ConfigError`` if there is no collective of that name."""
    if name not in known:
        raise ConfigError(
            f"{source}: unknown collective {name!r}{nearest(str(name), known)}; known are "
            f"{', '.join(known)}"
        )


def may_be_canonical(collective: str, algorithm: str) -> bool:
    """Whether an algorithm reduces in the canonical order, as far as the name says.

    A transport's own may or may not; ``select`` looks again.
    """
    known = ALGORITHMS[collective].get(algorithm)
    return known is None or known.canonical


def _start(item: AlgorithmRange) -> int:
    return item.low


def _check_name(algorithm: str, collective: str, what: str) -> None:
    # Not every transport has its own, or memory to share: where a group has not what is named, the
    # usual choice is made, so that one file of settings serves all transports.
    known = ["auto", *ALGORITHMS[collective], SHARED]
    if algorithm in known:
        return
    from fsdpcore.comm.registry import own_algorithms  # slow to import, and seldom needed

    known += own_algorithms()
    if algorithm not in known:
        raise ConfigError(
            f"{what}: {collective} has no algorithm {algorithm!r}{nearest(algorithm, known)}; "
            f"known are {', '.join(known)}"
        )


def _item(text: str, what: str) -> AlgorithmRange:
    match = _ITEM.fullmatch(text)
    if match is None:
        raise ConfigError(f"{what}: {text!r} is not NAME or NAME:LOW-HIGH, as in 'ring:64KiB-max'")
    name, low, high = match.groups()
    if low is None:
        return AlgorithmRange(name)
    item = AlgorithmRange(name, _size(low, what), None if high == "max" else _size(high, what))
    if item.high is not None and item.high < item.low:
        raise ConfigError(f"{what}: {text!r} ends before it begins")
    return item


def _size(text: str, what: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{what}: {text!r} is no number of bytes; write 8192 or 8KiB (KiB, MiB, GiB), and "
            "'max' at the end of the last range"
        )
    return int(match[1]) * UNITS[match[2]]
