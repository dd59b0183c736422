"""Numbers, names and ranks in words, columns of them, and hints at a word that was meant."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SHOWN = 8  # names in a message


def size(nbytes: float) -> str:
    """Return a number of bytes in words, in powers of 1000."""
    return _scaled(nbytes, _SIZES) or f"{nbytes:g} B"


def count(number: float) -> str:
    """Return a large number in words."""
    return (_scaled(number, _COUNTS) or f"{number:g}").replace(" ", "")


def _scaled(number: float, units: Sequence[tuple[float, str]]) -> str:
    for factor, name in units:
        if abs(number) >= factor:
            digits = 4 if abs(number) >= 999.5 * factor else 3
            return f"{number / factor:#.{digits}g}".rstrip(".") + f" {name}"
    return ""


def duration(seconds: float | None) -> str:
    """Return seconds in words; nothing for None."""
    if seconds is None:
        return ""
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def listed(names: Sequence[str]) -> str:
    """Return the first of some names in words."""
    more = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def rank_list(ranks: Sequence[int]) -> str:
    """Return a list of ranks, a long one in short: ``[0, 2]``, ``[0..7]``, ``[0, 2, ... 99]``."""
    listed = list(ranks)
    if len(listed) > 3 and listed == list(range(listed[0], listed[0] + len(listed))):
        return f"[{listed[0]}..{listed[-1]}]"
    if len(listed) > 2 * _SHOWN:
        return f"[{', '.join(map(str, listed[:_SHOWN]))}, ... {listed[-1]}]"
    return str(listed)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return some ranks as the subject of a sentence: ``rank 2``, ``ranks 0, 1, 3``.

    Many are written as runs: ``ranks 0..15, 17, 20..30``; of many runs only the first ones, and how
    many ranks there are besides: ``ranks 0, 2, 4 and 4093 others``.
    """
    parts = list(map(str, ranks))
    if len(parts) > 2 * _SHOWN:
        # In a run, numbers and their places grow alike.
        runs = itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0])
        ends = [(run[0][1], run[-1][1]) for run in (list(found) for _, found in runs)]
        parts = [f"{low}..{high}" if low < high else f"{low}" for low, high in ends]
        if len(parts) > 2 * _SHOWN:
            others = len(ranks) - sum(high - low + 1 for low, high in ends[:_SHOWN])
            return f"ranks {', '.join(parts[:_SHOWN])} and {others} others"
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(parts)}"


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a table; the first ``left`` columns are aligned to the left, others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    used = [n for n in range(len(header)) if any(line[n] for line in lines[1:])]
    widths = {n: max(len(line[n]) for line in lines) for n in used}
    return "\n".join(
        "  ".join(
            line[n].ljust(widths[n]) if n < left else line[n].rjust(widths[n]) for n in used
        ).rstrip()
        for line in lines
    )


def printable(name: str) -> str:
    """Return a name as it is if it can do nothing to a terminal, else with escapes."""
    return name if name.isprintable() else repr(name)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is closest to a wrong one, or nothing if none is close."""
    spelled = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), list(spelled), n=1, cutoff=0.5)
    return f" (did you mean {spelled[matches[0]]!r}?)" if matches else ""
