"""Tables as text: nccl-tests' columns, and one line per size with all contestants side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdpcore.bench.cases import Case
from fsdpcore.bench.harness.measurements import OURS, compare
from fsdpcore.bench.harness.memory import MIB, highest_rss, pss_per_rank
from fsdpcore.bench.harness.table import bandwidth, microseconds
from fsdpcore.bench.rows import Row

_KEY = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
_PLACE = "  {:>9}  {:>7}  {:>7}  {:>6}"
_OWN = "  {:>10}  {:>8}"
_PEER = "  {:>10}  {:>8}  {:>7}  {:>7}  {:>7}"
_GAP = "  {:>9}  {:>8}  {:>8}"
_PLACE_NAMES = {"out": "out-of-place", "in": "in-place"}
_KEY_NAMES = ("size", "count", "type", "redop", "root")
_KEY_UNITS = ("(B)", "(elements)", "", "", "")


def plain_header(places: Sequence[str]) -> list[str]:
    """The header of a table of one contestant, in the layout of nccl-tests."""
    width = len(_PLACE.format("", "", "", ""))
    groups = "".join(_PLACE_NAMES[place].center(width) for place in places)
    names = _KEY.format(*_KEY_NAMES)
    units = _KEY.format(*_KEY_UNITS)
    for _ in places:
        names += _PLACE.format("time", "algbw", "busbw", "#wrong")
        units += _PLACE.format("(us)", "(GB/s)", "(GB/s)", "")
    return [
        f"#{line[1:].rstrip()}"
        for line in (" " * len(_KEY.format(*_KEY_NAMES)) + groups, names, units)
    ]


def plain_line(rows: Sequence[Row | None]) -> str:
    """A line of such a table: one row per place, of the same size; None where there is none."""
    first = next(row for row in rows if row is not None)
    line = _key(first.case)
    for row in rows:
        if row is None:
            line += _PLACE.format("N/A", "N/A", "N/A", "N/A")
        else:
            line += _PLACE.format(
                microseconds(row.seconds), bandwidth(row.algbw), bandwidth(row.busbw), _wrong(row)
            )
    return line


def versus_header(contestants: Sequence[str], place: str, shared: str = "") -> list[str]:
    """The header of a table that compares contestants, ours first.

    Args:
        contestants: names.
        place: "out" or "in".
        shared: the contestant that runs in our processes, of which the difference is shown too.
    """
    groups, names, units = " " * len(_KEY.format(*_KEY_NAMES)), _KEY.format(*_KEY_NAMES), ""
    units = _KEY.format(*_KEY_UNITS)
    for name in contestants:
        own = name == OURS
        width = len(_OWN.format("", "") if own else _PEER.format("", "", "", "", ""))
        names += (_OWN if own else _PEER).format("time", "busbw", "ratio", "min", "max")
        units += (_OWN if own else _PEER).format("(us)", "(GB/s)", "", "", "")
        if name == shared:
            width += len(_GAP.format("", "", ""))
            names += _GAP.format("ours-bare", "overhead", "best")
            units += _GAP.format("(us)", "(%)", "(us)")
        groups += name.rjust(len(_OWN.format("", ""))).ljust(width)
    lines = [f"#{line[1:].rstrip()}" for line in (groups, names, units)]
    return [f"# {_PLACE_NAMES[place]}", *lines]


def versus_line(rows: Mapping[str, Row], contestants: Sequence[str], shared: str = "") -> str:
    """A line of such a table; contestants without a row could not do the case."""
    ours = rows[OURS]
    line = _key(ours.case)
    for name in contestants:
        row = rows.get(name)
        if name == OURS:
            line += _OWN.format(microseconds(ours.seconds), bandwidth(ours.busbw))
            continue
        if row is None:
            line += _PEER.format(*["N/A"] * 5)
            line += _GAP.format("N/A", "N/A", "N/A") if name == shared else ""
            continue
        compared = compare(ours, row)
        spread = compared.ratio
        ratios = [_ratio(value) for value in (spread.median, spread.lowest, spread.highest)]
        line += _PEER.format(microseconds(row.seconds), bandwidth(row.busbw), *ratios)
        if name == shared:
            gap, share = compared.difference.median, compared.overhead.median
            best = compared.best_difference
            line += _GAP.format(f"{gap * 1e6:+.2f}", f"{share:+.1f}", f"{best * 1e6:+.2f}")
    return line


def footer(rows: Sequence[Row]) -> list[str]:
    """The last lines: whether results were wrong, average bandwidths, memory."""
    lines = []
    checked = [row.wrong for row in rows if row.wrong is not None]
    if checked:
        wrong = sum(checked)
        lines.append(f"# Wrong values      : {wrong} {'FAILED' if wrong else 'OK'}")
        for name in dict.fromkeys(row.contestant for row in rows if row.wrong):
            bad = [row for row in rows if row.contestant == name and row.wrong]
            what = ", ".join(dict.fromkeys(row.case.operation for row in bad))
            lines.append(f"#   {name}: {sum(row.wrong or 0 for row in bad)} in {what}")
    else:
        lines.append("# Wrong values      : not checked")
    for name in dict.fromkeys(row.contestant for row in rows):
        values = [row.busbw for row in rows if row.contestant == name]
        average = sum(values) / len(values)
        lines.append(f"# Avg bus bandwidth : {average:.4g} GB/s ({name})")
    for name in dict.fromkeys(row.contestant for row in rows if row.memory):
        found = [row.memory for row in rows if row.contestant == name]
        peak = max(highest_rss(memory) for memory in found) / MIB
        shared = max(pss_per_rank(memory) for memory in found) / MIB
        lines.append(f"# Memory per rank   : {peak:.1f} MiB at most, {shared:.1f} PSS ({name})")
    return lines


def _key(case: Case) -> str:
    return _KEY.format(case.size, case.count, case.dtype, case.op, case.root)


def _ratio(value: float) -> str:
    return bandwidth(value) if value < 100 else f"{value:.0f}"


def _wrong(row: Row) -> str:
    return "N/A" if row.wrong is None else str(row.wrong)
