"""Tables, and which targets were reached."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.table import bandwidth, microseconds
from gpu_bench.collectives import BARE, STARTED

Part = Mapping[str, Any]

# What is wanted: of bare NCCL's bandwidth from such a size on; microseconds more for calls of less;
# of the bandwidth of a copy on the device.
LEAST_RATIO, LARGE = 0.98, 1 << 20
MOST_MORE_US, SMALL = 15.0, 64 * 1024
LEAST_OF_COPY = 0.80
# What NCCL has, and what takes several messages in a group; scatter tells its shape first, too.
_OWN = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
_COMPOSED = ("gather", "scatter", "all_to_all")


def targets(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Each target with what was found, in words, and whether it was reached; None if not seen."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if part["part"] == "collectives":
            found += _of_collectives(part)
        if part["part"] == "optimizer":
            found += _of_optimizer(part)
    return found


def _of_collectives(part: Part) -> Iterator[dict[str, Any]]:
    """Of NCCL's own operations; those that are put together of messages tell besides."""
    rows = [row for row in part["rows"] if "operation" in row]
    where = f"{part['ranks']} ranks" + (" on one GPU" if part["share_gpu"] else "")
    for names, what in ((_OWN, ", ".join(_OWN)), (_COMPOSED, ", ".join(_COMPOSED))):
        some = [row for row in rows if row["operation"] in names]
        large = [row for row in some if row["size"] >= LARGE]
        small = [row for row in some if row["size"] < SMALL]
        below = [row for row in large if row["bandwidth_ratio"] < LEAST_RATIO]
        above = [row for row in small if row["host_us_more"] > MOST_MORE_US]
        yield {
            "target": f"at least {LEAST_RATIO:.0%} of bare NCCL's bandwidth from 1 MiB, {where}",
            "of": what,
            "reached": not below if large else None,
            "below": ", ".join(f"{_name(row)} {row['bandwidth_ratio']:.3f}" for row in below),
            "lowest": min((row["bandwidth_ratio"] for row in large), default=None),
        }
        yield {
            "target": f"at most {MOST_MORE_US:g} us more on the host per small call, {where}",
            "of": what,
            "reached": not above if small else None,
            "above": ", ".join(f"{_name(row)} {row['host_us_more']:.1f}" for row in above),
            "highest": max((row["host_us_more"] for row in small), default=None),
        }
    wrong = sum(row["wrong"] or 0 for row in rows)
    yield {"target": f"the same values, {where}", "reached": not wrong if rows else None}


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['operation']} {row['size']} B"


def _of_optimizer(part: Part) -> Iterator[dict[str, Any]]:
    for row in part["rows"]:
        if row.get("share_of_copy") is not None and row.get("target"):
            yield {
                "target": f"{row['name']}: at least {LEAST_OF_COPY:.0%} of a copy's bandwidth",
                "reached": row["share_of_copy"] >= LEAST_OF_COPY,
                "found": f"{row['share_of_copy']:.3f}",
            }


def text(
    machine: Mapping[str, Any], parts: Sequence[Part], targets: Sequence[Mapping[str, Any]]
) -> str:
    """All of it as tables."""
    lines = [f"# {key}: {json.dumps(value)}" for key, value in machine.items()]
    for part in parts:
        where = f"{part['ranks']} ranks" + (" on one GPU" if part["share_gpu"] else "")
        lines += ["#", f"# {part['part']}, {where}, {part['took_s']} s"]
        if part.get("error"):
            lines.append(f"# FAILED: {part['error']}")
        lines += _quoted(part.get("output", ""))
        lines += list(_TABLES[part["part"]](part["rows"]))
        left = [row for row in part["rows"] if "left_out" in row]
        lines += [f"# left out, for want of time: {json.dumps(row['left_out'])}" for row in left]
        for row in part["rows"]:
            if "error" in row:
                lines.append(f"# {row.get('contestant')} FAILED: {row['error']}")
    lines.append("#")
    for target in targets:
        word = {True: "reached", False: "MISSED", None: "not measured"}[target["reached"]]
        more = [f"{k} {_short(v)}" for k, v in target.items() if k not in _WORDS and v]
        lines.append(f"# {word}: {'; '.join([target['target'], *more])}")
    return "\n".join(lines) + "\n"


_WORDS = ("target", "reached")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _quoted(output: str) -> list[str]:
    return [f"#   | {line}" for line in output.splitlines()[-25:]]


_COLLECTIVE = "{:>14} {:>12} {:>4}  {:>10} {:>8} {:>8}  {:>10} {:>8} {:>8}  {:>6} {:>9} {:>9} {:>6}"


def _collectives(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    titles = ("operation", "size", "", "ours", "algbw", "busbw", "bare", "algbw", "busbw")
    units = ("", "(B)", "", "(us)", "(GB/s)", "(GB/s)", "(us)", "(GB/s)", "(GB/s)")
    yield "#" + _COLLECTIVE.format(*titles, "ratio", "host more", "async", "#wrong")[1:]
    yield "#" + _COLLECTIVE.format(*units, "", "(us)", "(host us)", "")[1:]
    for row in rows:
        if "operation" not in row:
            continue
        cells: list[Any] = [row["operation"], row["size"], row["place"]]
        for name in (OURS, BARE):
            one = row["contestants"][name]
            cells.append(microseconds(one["device_us"] / 1e6))
            cells += [bandwidth(one["algbw_gbs"]), bandwidth(one["busbw_gbs"])]
        started = row["contestants"].get(STARTED)
        cells += [f"{row['bandwidth_ratio']:.3f}", f"{row['host_us_more']:+.2f}"]
        cells.append("" if started is None else microseconds(started["host_us"] / 1e6))
        wrong = row["wrong"]
        yield _COLLECTIVE.format(*cells, "N/A" if wrong is None else wrong)


_STEP = "{:>14}  {:>10} {:>12} {:>10}  {:>10}  {:>8}  {}"


def _training(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        if "contestants" not in row:
            continue
        case = row["case"]
        sizes = ", ".join(f"{key} {case[key]}" for key in ("layers", "width", "context", "batch"))
        yield f"# {case['precision']}, {sizes}"
        names = (
            "contestant",
            "step (ms)",
            "tokens/s",
            "GPU (MiB)",
            "time/ours",
            "agrees",
            "losses",
        )
        yield "#" + _STEP.format(*names)[1:]
        for name, one in row["contestants"].items():
            memory = one["gpu_memory_bytes"]
            yield _STEP.format(
                name,
                f"{one['step_ms']:.3f}",
                f"{one['tokens_per_second']:.0f}",
                "" if memory is None else f"{memory / 2**20:.1f}",
                f"{one['time_over_ours']:.3f}",
                str(one["agrees"]),
                " ".join(f"{loss:.4f}" for loss in one["losses"] or []),
            )
        if "exposed_ms" in row:
            yield (
                f"# communication and engine, exposed: {row['exposed_ms']:.3f} ms, "
                f"{row['exposed_percent']:.1f} % of our step"
            )


_UPDATE = "{:>50}  {:>10} {:>10}  {:>14}"


def _optimizer(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "#" + _UPDATE.format("", "time (us)", "GB/s", "share of copy")[1:]
    for row in rows:
        if "name" in row:
            yield _UPDATE.format(
                row["name"],
                microseconds(row["seconds"]),
                f"{row['gigabytes_per_second']:.0f}",
                f"{row['share_of_copy']:.3f}",
            )


_TABLES = {"collectives": _collectives, "training": _training, "optimizer": _optimizer}
