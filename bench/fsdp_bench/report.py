"""What came of a run: lines of text, JSON, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_bench.cases import ALONE, OURS, PEER, Case, Exchange, Training, to_order
from fsdpcore import __version__
from fsdpcore.bench import plot, record
from fsdpcore.bench.memory import MIB, Memory, highest_rss, pss_per_rank
from fsdpcore.bench.results import Spread, Timing, compare

if TYPE_CHECKING:
    from fsdp_bench.run import Request

SCHEMA = "fsdpcore.bench.fsdp_step/1"

_LINE = "{:<14}{:>10}{:>10}{:>9}{:>8}{:>8}{:>8}{:>11}{:>9}{:>9}"
_COLOURS = {OURS: "#2454c6", PEER: "#e07b00", ALONE: "#9aa1ad"}
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
        inside: per cent of our steps that are not in layers, loss and AdamW, one per round.
        versions: of libraries, by contestant.
    """

    case: Case
    ranks: int
    rows: Mapping[str, Timing]
    before: Mapping[str, Sequence[Memory]]
    trials: Mapping[str, float]
    inside: Sequence[float]
    versions: Mapping[str, Mapping[str, str]]

    @property
    def communication(self) -> Spread | None:
        """Per cent of our step that are not computing; None where nothing is computed."""
        if ALONE not in self.rows:
            return None
        pairs = zip(self.rows[OURS].rounds, self.rows[ALONE].rounds, strict=True)
        return Spread.of([100 * (ours - alone) / ours for ours, alone in pairs])

    @property
    def best_communication(self) -> float | None:
        """As ``communication``, between the fastest rounds of the two."""
        if ALONE not in self.rows:
            return None
        ours, alone = (min(self.rows[name].rounds) for name in (OURS, ALONE))
        return 100 * (ours - alone) / ours


def title(request: Request, machine: Mapping[str, Any]) -> list[str]:
    """The first lines."""
    plan = request.plan
    each = f"{plan.iterations} steps" if plan.iterations else f"{plan.seconds:g} s"
    threads = request.threads_per_rank
    return [
        f"# fsdpcore {__version__}, transport {request.transport}, {request.ranks} ranks, "
        f"{threads} thread{'s' if threads > 1 else ''} each",
        f"# {machine['cpu']}, {machine['cores']} cores",
        f"# {plan.rounds} rounds of {each} each; median over the rounds of the mean over the ranks",
        "# ratio: the other's time over ours in the same round; median, min and max",
        "# memory per rank in MiB: peak resident set, proportional set (shared pages count once "
        "per host),",
        "#   and the latter without what the process had before it made the model",
    ]


def short_title(request: Request, machine: Mapping[str, Any]) -> str:
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
    lines = [f"# {describe(result.case, result.ranks)}"]
    names = ("contestant", "time", "best", "ratio", "min", "max", "wrong", "resident", "prop.")
    lines.append("# " + _LINE.format(*names, "added"))
    lines.append("# " + _LINE.format("", "(ms)", "(ms)", "", "", "", "", "(MiB)", *["(MiB)"] * 2))
    for name, row in result.rows.items():
        lines.append("  " + _LINE.format(*_cells(result, name, row)))
    if result.trials:
        tried = ", ".join(f"{name} {1e3 * t:.1f} ms" for name, t in result.trials.items())
        lines.append(f"# {PEER} is measured with '{result.case.setting}'; fastest trials: {tried}")
    share = result.communication
    if share is not None:
        lines.append(
            f"# communication and engine: {share.median:.1f} % of our step "
            f"({share.lowest:.1f} to {share.highest:.1f}; "
            f"between the fastest rounds {result.best_communication:.1f})"
        )
    if result.inside:
        spread = Spread.of(list(result.inside))
        lines.append(
            f"# outside of layers, loss and AdamW: {spread.median:.1f} % of our step "
            f"({spread.lowest:.1f} to {spread.highest:.1f})"
        )
    return [*lines, "#"]


def _cells(result: Result, name: str, row: Timing) -> list[str]:
    ratios = ["", "", ""]
    if name != OURS:
        ratios = [f"{value:.3g}" for value in compare(result.rows[OURS], row).ratio]
    proportional = pss_per_rank(row.memory)
    added = proportional - pss_per_rank(result.before[name])
    return [
        name,
        f"{1e3 * row.seconds:.2f}",
        f"{1e3 * min(row.rounds):.2f}",
        *ratios,
        "N/A" if row.wrong is None else str(row.wrong),
        f"{highest_rss(row.memory) / MIB:.1f}",
        *((f"{size / MIB:.1f}" if proportional else "N/A") for size in (proportional, added)),
    ]


def document(
    request: Request, results: Sequence[Result], started: str, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything about a run, ready for ``json.dump``; bench/README.md describes it."""
    plan = request.plan
    versions: dict[str, dict[str, str]] = {}
    for result in results:
        versions.update({name: dict(found) for name, found in result.versions.items()})
    return {
        "schema": SCHEMA,
        "started": started,
        "command": list(request.command),
        "machine": dict(machine),
        "versions": versions,
        "settings": {
            "ranks": request.ranks,
            "transport": request.transport,
            "threads": request.threads_per_rank,
            "plan": vars(plan),
            "against": list(request.against),
            "peer_setting": request.setting,
        },
        "results": [_result(result) for result in results],
    }


def _result(result: Result) -> dict[str, Any]:
    ours, share = result.rows[OURS], result.communication
    inside = Spread.of(list(result.inside)) if result.inside else None
    return {
        "case": to_order(result.case),
        "peer_trials_ms": {name: 1e3 * seconds for name, seconds in result.trials.items()},
        "rows": [_row(result, name, row) for name, row in result.rows.items()],
        "ratios": {
            name: compare(ours, row).ratio._asdict()
            for name, row in result.rows.items()
            if name != OURS
        },
        "communication_percent": None if share is None else share._asdict(),
        "best_communication_percent": result.best_communication,
        "outside_layers_percent": None if inside is None else inside._asdict(),
    }


def _row(result: Result, name: str, row: Timing) -> dict[str, Any]:
    before = pss_per_rank(result.before[name]) / MIB
    return {
        "contestant": name,
        "iterations": row.iterations,
        "wrong": row.wrong,
        "time_ms": {
            "avg": 1e3 * row.seconds,
            "min": 1e3 * row.fastest_rank,
            "max": 1e3 * row.slowest_rank,
            "best": 1e3 * min(row.rounds),
        },
        "memory_mib": {**record.memory(row), "pss_before": before or None},
        "samples_ms": [[1e3 * seconds for seconds in ranks] for ranks in row.samples],
    }


def save_png(path: Path, results: Sequence[Result], title: str) -> None:
    """Draw times and memory of each case as bars.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with plot.picture(path, title, 11.0, 0.9 + 2.3 * len(results)) as figure:
        for index, result in enumerate(results):
            rows = result.rows.items()
            times = {name: 1e3 * row.seconds for name, row in rows}
            memory = {
                name: (pss_per_rank(row.memory) - pss_per_rank(result.before[name])) / MIB
                for name, row in rows
            }
            head = _TITLES[type(result.case)]
            for column, (values, what) in enumerate(
                ((times, f"{head} (ms)"), (memory, "memory that it adds per rank (MiB)"))
            ):
                axes = figure.add_subplot(len(results), 2, 2 * index + column + 1)
                _bars(axes, values, what)


def _bars(axes: Any, values: Mapping[str, float], what: str) -> None:
    plot.style(axes)
    names = list(values)[::-1]
    widths = [values[name] for name in names]
    bars = axes.barh(names, widths, height=0.6, color=[_COLOURS[name] for name in names])
    axes.bar_label(bars, [f"{width:.3g}" for width in widths], padding=4, fontsize=9)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.15 * max(*widths, 0.001))
    axes.set_title(what, loc="left", fontsize=10, color=plot.INK)
