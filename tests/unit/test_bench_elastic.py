"""``bench/elastic.py``: what a diary says of a loss."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from support.elastic_fire import Entry
from support.house import ROOT


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(ROOT, "bench")), *sys.path])
    return importlib.import_module("elastic_bench.losses")


def _lived(pid: int, late: float) -> list[Entry]:
    """A rank's diary, where each phase takes a second more than that before."""
    old, new = {"generation": 3}, {"generation": 4}
    known = {"words": "generation 4: this is rank 0 of 2", **old}
    marks = [("log", 13.0, known), ("called", 16.0, new), ("made", 20.0, new)]
    marks += [("restored", 25.0, new), ("commit", 31.0, new), ("commit", 99.0, new)]
    return [
        Entry("commit", 9.0, pid, old),
        Entry("unwound", 11.0 + late, pid, {"why": "PeerFailedError", **old}),
        *(Entry(what, at + late, pid, rest) for what, at, rest in marks),
    ]


def test_a_phase_of_a_loss_ends_when_the_last_of_those_that_go_on_is_through(losses: Any) -> None:
    victim = [Entry("commit", 9.0, 3, {"generation": 3})]
    newcomer = [Entry("commit", 98.0, 4, {"generation": 4})]  # did not live through it
    entries = [*_lived(1, 0.0), *_lived(2, 0.5), *victim, *newcomer]
    entries.sort(key=lambda entry: entry.at)
    assert losses.phases(entries, 10.0) == {
        "notice": 1.0,
        "decision": 2.5,
        "meeting": 3.0,
        "engine": 4.0,
        "restore": 5.0,
        "step": 6.0,
        "recovery": 20.5,
    }
