"""``bench/checkpoint_planning.py``: its layouts are what they are said to be, and it measures."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    return importlib.import_module("planning_bench.layouts")


@pytest.mark.parametrize("name", ["flat", "tensor", "rows"])
def test_ranks_have_every_element_once(parts, name):
    made = parts.layout(name, 20, 16)
    held = [made.holding(rank) for rank in range(16)]
    assert [len(each) for each in held] == [20] * 16
    for arrays in zip(*held, strict=True):
        regions = {piece.region for array in arrays for piece in array.pieces}
        assert sum(each.size for each in regions) == math.prod(arrays[0].shape)


def test_a_table_is_printed_and_written(parts, tmp_path, capsys):
    script = importlib.import_module("checkpoint_planning")
    record = tmp_path / "found.json"
    cases = "flat:20x8,flat:20x16,tensor:20x16,rows:20x16"
    script.main(cases=cases, rounds=1, against="none", json=record)
    printed = capsys.readouterr().out
    assert "flat:20: exponents from 8 to 16 ranks" in printed
    found = {row["case"]: row for row in json.loads(record.read_text())}
    assert list(found) == cases.split(",")
    assert found["rows:20x16"]["pieces"] == 20 * 16
    assert all(row[what]["seconds"] > 0 for row in found.values() for what in ("save", "load"))
