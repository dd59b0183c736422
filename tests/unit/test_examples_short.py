"""The examples that fit on a screen."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.spmd import run

import fsdpcore as fc


@pytest.fixture(params=["digits_logistic", "layers_fully_shard", "mlp_autograd", "mlp_jax"])
def example(request: pytest.FixtureRequest) -> Any:
    """Imported here, since scikit-learn takes a second, and every process collects all tests."""
    return importlib.import_module(request.param)


def test_one_line_runs_it_on_four_ranks(example, capsys, monkeypatch):
    """Of its steps, fewer."""
    launch = fc.launch
    monkeypatch.setattr(fc, "launch", lambda *args, **options: launch(*args, **options, args=(80,)))
    monkeypatch.delenv("FSDPCORE_TRANSPORT", raising=False)
    runpy.run_path(example.__file__, run_name="__main__")
    shown = capsys.readouterr().out
    found = re.fullmatch(r"4 ranks: (\d+\.\d)% of unseen digits recognised\n", shown)
    assert found
    assert float(found[1]) > 85  # guessing: 10


def test_the_result_does_not_depend_on_the_number_of_ranks(example):
    (alone,) = run(example.main, transport="sim", world_size=1, args=(40,), blas_threads=1)
    assert alone > 0.7
    one_digit = 1 / 297
    for accuracy in run(example.main, transport="sim", world_size=3, args=(40,), blas_threads=1):
        assert (
            abs(accuracy - alone) < 1.5 * one_digit
        )  # rounding may decide about one that is close


def test_it_fits_on_a_screen(example):
    assert len(Path(example.__file__).read_text().splitlines()) <= 75
