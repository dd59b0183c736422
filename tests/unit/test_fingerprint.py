from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fsdpcore.collectives.fingerprint import Fingerprint

BASE = Fingerprint(
    "reduce_scatter_v", np.dtype(np.float32), (6, 2), "sum", 0, "direct", (2, 4), "layer 1"
)

DIFFERENT: dict[str, dict[str, Any]] = {
    "operation": {"operation": "all_reduce"},
    "dtype": {"dtype": np.dtype(np.int32)},
    "no dtype": {"dtype": None},
    "rows": {"shape": (5, 2)},
    "columns": {"shape": (6, 3)},
    "dimensions": {"shape": (6, 2, 1)},
    "op": {"op": "mean"},
    "root": {"root": 1},
    "no root": {"root": -1},
    "algorithm": {"algorithm": "ring"},
    "counts": {"counts": (4, 2)},
    "label": {"label": "layer 2"},
    "policy": {"policy": "deterministic"},
}


def _agreed(fingerprint: Fingerprint) -> int:
    return fingerprint.digest


@pytest.mark.parametrize("what", DIFFERENT)
def test_everything_must_agree(what: str) -> None:
    other = replace(BASE, **DIFFERENT[what])
    assert _agreed(other) != _agreed(BASE)
    assert _agreed(replace(BASE)) == _agreed(BASE)


def test_only_rows_may_differ_in_ragged_calls() -> None:
    ragged = replace(BASE, ragged=True)
    assert _agreed(replace(ragged, shape=(99, 2))) == _agreed(ragged)
    for shape in ((6, 3), (6,), (6, 2, 1)):
        assert _agreed(replace(ragged, shape=shape)) != _agreed(ragged)


def test_words() -> None:
    assert str(Fingerprint("barrier")) == "barrier()"
    assert str(Fingerprint("all_reduce", np.dtype(np.float32), (3,), "sum")) == (
        "all_reduce(sum, float32 of shape (3,))"
    )
    assert str(BASE) == (
        "reduce_scatter_v(sum, float32 of shape (6, 2), root 0, counts [2, 4], "
        "algorithm direct, for layer 1)"
    )


def test_digests_fit_a_word_however_long_the_call() -> None:
    long = replace(BASE, counts=tuple(range(10_000)), label="ä" * 1000)
    for fingerprint in (BASE, Fingerprint("barrier"), long):
        assert 0 <= fingerprint.digest < 2**64
    assert _agreed(replace(long, label=long.label + "b")) != _agreed(long)


def test_rows() -> None:
    assert BASE.rows == 6
    assert Fingerprint("barrier").rows == 1
