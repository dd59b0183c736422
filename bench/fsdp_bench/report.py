"""What came of a run: lines of text, JSON, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_bench.cases import ALONE, PEER, Case, Exchange, Training, to_order
from fsdp_bench.job import Moved
from fsdpcore import __version__
from fsdpcore.bench.harness import picture, record
from fsdpcore.bench.harness.measurements import OURS, Comparison, Measurement, Spread, compare
from fsdpcore.bench.harness.memory import MIB, Memory, highest_rss, pss_per_rank
from fsdpcore.bench.harness.table import Column, heading, lines, ratios, times, wrong

if TYPE_CHECKING:
    from fsdp_bench.run import StepRun

_COLOURS = {OURS: picture.BLUE, PEER: picture.ORANGE, ALONE: picture.GREY}
_TITLES = {
    Exchange: "forward and backward exchange, no compute",
    Training: "training step of a GPT",
}


@dataclass(frozen=True)
class Result:
    """One case, measured.

    Attributes:
        case: with the peer's setting that was chosen.
        ranks: of every contestant.
        rows: by contestant, ours first.
        before: memory of each rank's process before it made its model, by contestant.
        trials: seconds of a step in the peer's fastest trial by setting, where these were tried.
        outside: per cent of our steps that are not in layers, loss and AdamW, one per round.
        slower: per cent of them in which a rank waited for a slower one, at the least; likewise.
        moved: between memory and files in a step, by contestant that offloads.
        versions: of libraries, by contestant.
    """

    case: Case
    ranks: int
    rows: Mapping[str, Measurement]
    before: Mapping[str, Sequence[Memory]]
    trials: Mapping[str, float]
    outside: Sequence[float]
    slower: Sequence[float]
    moved: Mapping[str, Moved]
    versions: Mapping[str, Mapping[str, str]]

    @property
    def beside_alone(self) -> Comparison | None:
        """Our step beside computing alone; None where nothing is computed."""
        alone = self.rows.get(ALONE)
        return None if alone is None else compare(self.rows[OURS], alone)

    @property
    def best_communication(self) -> float | None:
        """Per cent of our step that are not computing, between the fastest rounds of the two."""
        found = self.beside_alone
        return None if found is None else 100 * (1 - found.best_ratio)

    def added(self, row: Measurement) -> int:
        """Bytes per rank that the steps take beyond what the processes had before."""
        return pss_per_rank(row.memory) - pss_per_rank(self.before[row.contestant])


def title(request: StepRun, machine: Mapping[str, Any]) -> list[str]:
    """The first lines."""
    plan = request.plan
    each = f"{plan.iterations} steps" if plan.iterations else f"{plan.seconds:g} s"
    threads = request.threads_per_rank
    return [
        *heading(
            machine,
            f"fsdpcore {__version__}, transport {request.transport}, {request.ranks} ranks, "
            f"{threads} thread{'s' if threads > 1 else ''} each",
            f"{plan.rounds} rounds of {each} each; "
            "median over the rounds of the mean over the ranks",
            "ratio: the other's time over ours in the same round; median, min and max",
            "memory per rank in MiB: peak resident set, proportional set (shared pages count "
            "once per host),",
            "  and the latter without what the process had before it made the model",
        ),
        "#",
    ]


def short_title(request: StepRun, machine: Mapping[str, Any]) -> str:
    """The picture's."""
    return f"{request.ranks} ranks, float32, {machine['cpu']}"


def describe(case: Case, ranks: int) -> str:
    """A case in words."""
    if isinstance(case, Exchange):
        size = case.bytes / MIB
        what = f"{case.units} units of {case.rows}x{case.columns} float32 ({size:.4g} MiB)"
        return f"exchange: {what}, gathered twice, reduced once"
    what = f"{case.layers} layers, width {case.width}, {case.heads} heads, context {case.context}"
    return f"training: GPT, {what}, {case.batch // ranks} of {case.batch} sequences per rank"


def table(result: Result) -> list[str]:
    """A case's lines: one per contestant, and what follows from them."""
    found = [
        f"# {describe(result.case, result.ranks)}",
        *lines(
            result.rows,
            [*times(), *ratios(result.rows), *wrong(), *_memory_columns(result)],
        ),
    ]
    if result.trials:
        tried = ", ".join(f"{name} {1e3 * t:.1f} ms" for name, t in result.trials.items())
        found.append(f"# {PEER} is measured with '{result.case.setting}'; fastest trials: {tried}")
    beside = result.beside_alone
    if beside is not None:
        share = beside.share
        found.append(
            f"# communication and engine: {share.median:.1f} % of our step "
            f"({share.lowest:.1f} to {share.highest:.1f}; "
            f"between the fastest rounds {result.best_communication:.1f})"
        )
    if result.outside:
        for what, spread in (
            ("outside of layers, loss and AdamW", Spread.of(result.outside)),
            ("waiting for a slower rank, a part of that", Spread.of(result.slower)),
        ):
            found.append(
                f"# {what}: {spread.median:.1f} % of our step "
                f"({spread.lowest:.1f} to {spread.highest:.1f})"
            )
    for name, moved in result.moved.items():
        found.append(
            f"# {name}: {moved.held / MIB:.1f} MiB of each rank in a file; a step reads "
            f"{moved.read / MIB:.1f} ({moved.disk_read / MIB:.1f} on disk), writes "
            f"{moved.written / MIB:.1f} ({moved.disk_written / MIB:.1f}); "
            f"{moved.ready:.0%} was there in time, {1e3 * moved.waited:.1f} ms waited for the "
            f"rest, {1e3 * moved.flushed:.1f} ms for writing"
        )
    return [*found, "#"]


def _memory_columns(result: Result) -> list[Column]:
    def proportional(row: Measurement, size: int) -> str:
        return f"{size / MIB:.1f}" if pss_per_rank(row.memory) else "N/A"

    return [
        Column("resident", "(MiB)", lambda row: f"{highest_rss(row.memory) / MIB:.1f}", 11),
        Column("prop.", "(MiB)", lambda row: proportional(row, pss_per_rank(row.memory))),
        Column("added", "(MiB)", lambda row: proportional(row, result.added(row))),
    ]


def content(request: StepRun, results: Sequence[Result]) -> dict[str, Any]:
    """What the record of a run holds; bench/README.md describes it."""
    return {
        "versions": {name: found for one in results for name, found in one.versions.items()},
        "settings": {
            "ranks": request.ranks,
            "transport": request.transport,
            "threads": request.threads_per_rank,
            "plan": vars(request.plan),
            "against": list(request.against),
            "peer_setting": request.setting,
        },
        "results": [_result(result) for result in results],
    }


def _result(result: Result) -> dict[str, Any]:
    beside = result.beside_alone
    return {
        "case": to_order(result.case),
        "peer_trials_ms": {name: 1e3 * seconds for name, seconds in result.trials.items()},
        "rows": [_row(result, row) for row in result.rows.values()],
        "ratios": record.ratios(result.rows),
        "communication_percent": None if beside is None else beside.share._asdict(),
        "best_communication_percent": result.best_communication,
        "outside_layers_percent": Spread.of(result.outside)._asdict() if result.outside else None,
        "slower_rank_percent": Spread.of(result.slower)._asdict() if result.slower else None,
        "moved": {name: moved._asdict() for name, moved in result.moved.items()},
    }


def _row(result: Result, row: Measurement) -> dict[str, Any]:
    found = record.row(row, "ms")
    found["memory_mib"]["pss_before"] = pss_per_rank(result.before[row.contestant]) / MIB or None
    return found


def save_png(path: Path, results: Sequence[Result], title: str) -> None:
    """Draw times and memory of each case as bars.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with picture.picture(path, title, 11.0, 0.9 + 2.3 * len(results)) as figure:
        for index, result in enumerate(results):
            rows = result.rows.items()
            times = {name: 1e3 * row.seconds for name, row in rows}
            memory = {name: result.added(row) / MIB for name, row in rows}
            head = _TITLES[type(result.case)]
            for column, (values, what) in enumerate(
                ((times, f"{head} (ms)"), (memory, "memory that it adds per rank (MiB)"))
            ):
                axes = figure.add_subplot(len(results), 2, 2 * index + column + 1)
                _bars(axes, values, what)


def _bars(axes: Any, values: Mapping[str, float], what: str) -> None:
    picture.style(axes)
    names = list(values)[::-1]
    widths = [values[name] for name in names]
    bars = axes.barh(
        names, widths, height=0.6, color=[_COLOURS.get(n, picture.GREEN) for n in names]
    )
    axes.bar_label(bars, [f"{width:.3g}" for width in widths], padding=4, fontsize=9)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.15 * max(*widths, 0.001))
    axes.set_title(what, loc="left", fontsize=10, color=picture.INK)
