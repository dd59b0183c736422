"""``fsdpcore top``: what the running jobs of this host do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fsdpcore.bench.harness.usage import one_line
from fsdpcore.core import text
from fsdpcore.core.errors import ArgumentError
from fsdpcore.diagnostics import live

Answer = Mapping[str, Any]

_SLOW = 1.05
_NONE = "no job of this user answers on this host; ranks answer at the passes of an engine's steps"
_HEADER = (
    *("rank", "step", "step time", "computing", "waiting", "moving", "optimizer", "between steps"),
    *("tokens/s", "engine", "process", "now"),
)


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print plain text once, when all ranks have answered.")
    ] = False,
    job: Annotated[str, typer.Option(help="Only jobs whose id begins so.")] = "",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    patience: Annotated[
        float, typer.Option(help="Of --once: seconds to wait for answers.", min=0.0)
    ] = 5.0,
) -> None:
    """Show the running jobs of this user on this host: steps, waiting, memory, the slowest rank.

    Ranks with an engine answer by themselves, in their next step; who is not asked writes nothing.
    With --once the exit code is 1 if nobody answers.
    """
    with one_line():
        began = time.time()
        try:
            if once:
                found = _wait(job, began, patience)
                typer.echo("\n\n".join(map(as_text, _jobs(found))) or _NONE)
                raise typer.Exit(0 if found else 1)
            _watch(job, began, interval)
        finally:
            live.end()


def _wait(job: str, began: float, patience: float) -> list[Answer]:
    """Ask until every rank of the jobs that answer has done so, or patience is over."""
    while True:
        live.ask()
        time.sleep(0.1)
        found = _answers(job, began)
        complete = all(len(ranks) >= ranks[0]["here"] for ranks in _jobs(found))
        if (found and complete and time.time() > began + 1.0) or time.time() > began + patience:
            return found


def _watch(job: str, began: float, interval: float) -> None:
    console = Console()
    try:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as shown:
            while True:
                live.ask()
                tables: list[RenderableType] = [*map(_table, _jobs(_answers(job, began)))]
                shown.update(Group(*(tables or [Text(_NONE)])), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _answers(job: str, since: float) -> list[Answer]:
    try:
        return [one for one in live.read(since) if one["job"].startswith(job) and "figures" in one]
    except (KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{live.folder()}: holds an answer that is none: {error}") from error


def _jobs(answers: Iterable[Answer]) -> list[list[Answer]]:
    return [list(ranks) for _, ranks in groupby(answers, lambda answer: answer["job"])]


def _table(ranks: Sequence[Answer]) -> Table:
    table = Table(title=Text("\n".join(summary(ranks))), title_justify="left")
    for name in _HEADER:
        table.add_column(name, justify="left" if name == "now" else "right", overflow="fold")
    slow = slowest(ranks)
    for answer in ranks:
        silent = time.time() - answer["written"] > live.SILENT_SECONDS
        style = "red" if silent else "yellow" if answer is slow else ""
        table.add_row(*map(Text, _row(answer)), style=style)
    return table


def as_text(ranks: Sequence[Answer]) -> str:
    """Return what is shown of a job as plain text.

    Args:
        ranks: what its ranks have answered, in order.
    """
    return "\n".join([*summary(ranks), "", text.columns(_HEADER, map(_row, ranks), left=0)])


def summary(ranks: Sequence[Answer]) -> list[str]:
    """Say in words how the job goes on, and who holds it up."""
    size, here, found = ranks[0]["world_size"], ranks[0].get("here", len(ranks)), len(ranks)
    whole = f"{size} ranks" if found == size else f"{found} of its {size} ranks on this host"
    if found < here:
        whole = f"{found} of the {here} ranks on this host answer"
    lines = [f"job {text.printable(ranks[0]['job'])}: {whole}"]
    tokens = [rank["figures"].get("tokens_per_second") for rank in ranks]
    if all(each is not None for each in tokens):
        lines[0] += f", {text.count(round(sum(tokens)))} tokens/s"
    slow = slowest(ranks)
    if slow is not None:
        others = median(_own(rank) for rank in _stepped(ranks) if rank is not slow)
        lines.append(
            f"rank {slow['rank']} is the slowest: in a step it works {text.duration(_own(slow))} "
            f"without waiting, the others {text.duration(others)}"
        )
    now = time.time()
    silent = [rank["rank"] for rank in ranks if now - rank["written"] > live.SILENT_SECONDS]
    if silent:
        lines.append(f"{text.name_ranks(silent)}: silent for {live.SILENT_SECONDS:g} s and more")
    return lines


def slowest(ranks: Sequence[Answer]) -> Answer | None:
    """Return the rank that others wait for; None if none stands out."""
    stepped = _stepped(ranks)
    if len(stepped) < 2:
        return None
    most = max(stepped, key=_own)
    others = median(_own(rank) for rank in stepped if rank is not most)
    return most if _own(most) > _SLOW * others else None


def _stepped(ranks: Sequence[Answer]) -> list[Answer]:
    return [rank for rank in ranks if "seconds" in rank["figures"]]


def _own(rank: Answer) -> float:
    """Seconds from the end of one step to that of the next in which it did not wait."""
    figures = rank["figures"]
    return float(figures["seconds"] + figures.get("between_steps", 0.0) - figures["waiting"])


def _row(answer: Answer) -> list[str]:
    figures = answer["figures"]

    def seconds(name: str) -> str:
        return text.duration(figures[name]) if name in figures else "-"

    tokens = figures.get("tokens_per_second")
    parts = ("computing", "waiting", "moving", "optimizer")
    return [
        str(answer["rank"]),
        f"{figures['step']:.0f}" if "step" in figures else "-",
        *map(seconds, ("seconds", *parts, "between_steps")),
        "-" if tokens is None else text.count(round(tokens)),
        text.size(figures["memory_bytes"]) if "memory_bytes" in figures else "-",
        text.size(answer["resident"]),
        text.printable(f"{answer['phase']} {answer['unit']}".strip()) or "outside of passes",
    ]
