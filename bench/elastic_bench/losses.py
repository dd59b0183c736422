"""What a loss costs, phase by phase, and what commits cost; from the diaries of a job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from support.elastic_fire import Entry, Fire, read
from support.hosts.lab import Lab

from elastic_bench.training import Training

SCRIPT = Path(__file__).with_name("training.py")
PHASES = ("notice", "decision", "meeting", "engine", "restore", "step", "recovery")
"""Of a loss; all but the first one are in ``recovery``."""

_MARKS = ("unwound", "log", "called", "made", "restored", "commit")
_PATIENCE = 600.0
_SKIPPED = 1  # of a block, the steps in which what was before it ends


def lose(
    lab: Lab, folder: Path, training: Training, kind: str, times: int
) -> list[dict[str, float]]:
    """Have a rank killed, or a host vanish, several times; the seconds of each phase of each.

    Args:
        lab: the hosts, of one rank each.
        folder: for diaries; does not exist.
        training: what is trained.
        kind: of the loss, as ``Fire`` calls it.
        times: how often.
    """
    began = []
    with Fire(
        lab, folder, (training.text(),), per_host=1, script=SCRIPT, patience=_PATIENCE
    ) as fire:
        for _ in range(times):
            fire.wait(lambda: fire.whole(0.0), "the job does not begin")
            began.append(time.monotonic())
            fire.strike(kind)
    entries = read(folder)
    return [phases(entries, at) for at in began]


def phases(entries: Sequence[Entry], at: float) -> dict[str, float]:
    """Return the seconds of each phase of the loss that began at a time.

    Each ends when the last of those that go on has come to its end.
    """
    later = [entry for entry in entries if entry.at > at]
    first = next(entry for entry in later if entry.what == "unwound")
    commits = [
        entry for entry in later if _is_commit(entry) and entry.generation > first.generation
    ]
    newest = min(entry.generation for entry in commits)
    done = [entry for entry in commits if entry.generation == newest]
    there = {entry.pid for entry in entries if entry.at < at}
    stayed = {entry.pid for entry in done} & there
    marks = [first.at]
    for what in _MARKS[1:]:
        ends = []
        for pid in stayed:
            own = [entry for entry in later if entry.pid == pid and entry.what == what]
            if what == "commit":
                own = [entry for entry in done if entry.pid == pid]
            elif what == "log":
                text = f"generation {newest}: this is"
                own = [entry for entry in own if entry.words.startswith(text)]
            else:
                own = [entry for entry in own if entry.generation == newest]
            ends.append(own[0].at)
        marks.append(max(ends))
    took = [end - begin for begin, end in pairwise(marks)]
    return dict(zip(PHASES, [first.at - at, *took, marks[-1] - marks[0]], strict=True))


def _is_commit(entry: Entry) -> bool:
    """Whether a step was committed; if others come along at once, the ranks hand over by that."""
    return entry.what == "commit" or (entry.what == "unwound" and entry.why == "HandedOver")


def keep(lab: Lab, folder: Path, training: Training) -> tuple[list[float], list[float]]:
    """Train with commits and without, block by block; the seconds of the steps of both.

    Args:
        lab: the hosts, of one rank each.
        folder: for diaries; does not exist.
        training: what is trained, with a ``block``.
    """
    with Fire(
        lab, folder, (training.text(),), per_host=1, script=SCRIPT, patience=_PATIENCE
    ) as fire:
        last = training.steps - 1

        def over() -> bool:
            found = [entry for entry in read(folder) if entry.what == "commit"]
            return any(entry.number == last for entry in found)

        fire.wait(over, "the training does not end")
    steps: dict[int, list[Entry]] = {}
    for entry in read(folder):
        if entry.what == "commit" and entry.number % training.block >= _SKIPPED:
            steps.setdefault(entry.number, []).append(entry)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number, entries in steps.items():
        if number >= 2 * training.block:  # memory was new before
            took = max(entry.at for entry in entries) - min(entry.began for entry in entries)
            taken[entries[0].kept].append(took)
    return taken[True], taken[False]
