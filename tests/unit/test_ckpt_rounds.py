"""Shared reads: whatever goes wrong on one rank, the others are told, and nobody waits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arrays import array_of
from support.ckpt_make import make_checkpoint
from support.fsdp_steps import launch

import fsdpcore as fc
from fsdpcore.checkpoint import BoxShard, load
from fsdpcore.checkpoint.load import shared_reads
from fsdpcore.core.errors import CheckpointError

ROWS, WIDTH, RANKS = 256, 100, 3


def columns(rank: int, dtype: Any) -> BoxShard:
    """Every rank's part of every row, so that all need parts of the same blocks."""
    return BoxShard((ROWS, WIDTH * RANKS), (0, WIDTH * rank), np.zeros((ROWS, WIDTH), dtype))


@pytest.mark.parametrize(
    "name",
    [
        "wasteful_pieces",
        "read_alone",
        "encode",
        "decode",
        "rounds",
        "read_parts",
        "BlockPacker.give",
        "BlockUnpacker.take",
        "FileSet.read",
    ],
)
def test_an_error_on_one_rank_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make_checkpoint(tmp_path, {"w": array_of(0, (ROWS, WIDTH * RANKS), np.float32)})
    *owner, attribute = name.split(".")
    place = getattr(shared_reads, owner[0]) if owner else shared_reads
    original = getattr(place, attribute)
    where = 0 if attribute == "give" else 1  # so little is read by one rank alone
    failing: list[int] = []  # threads

    def fails(*args: Any, **more: Any) -> Any:
        if threading.get_ident() in failing:
            raise MemoryError("no room")
        return original(*args, **more)

    monkeypatch.setattr(place, attribute, fails)

    def body(backend: fc.Backend) -> str:
        if backend.rank == where:
            failing.append(threading.get_ident())
        with pytest.raises(CheckpointError, match="no room") as caught:
            load(tmp_path, {"w": columns(backend.rank, "f4")}, backend, timeout=60)
        backend.barrier()  # it is still usable
        return str(caught.value)

    texts = launch(body, RANKS)
    assert len(set(texts)) == 1
    assert f"(on rank {where})" in texts[0]
    assert "half overwritten" in texts[0]


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_whatever_was_saved_can_be_rounded(tmp_path: Path, dtype: str) -> None:
    """Even signalling NaN, of which NumPy warns, and warnings are errors here."""
    given = np.ones((ROWS, WIDTH * RANKS))
    given[1] = 1e300
    given.view(np.uint64)[:, ::WIDTH] = 0x7FF0000000000001
    make_checkpoint(tmp_path, {"w": given})

    def body(backend: fc.Backend) -> None:
        shard = columns(backend.rank, dtype)
        load(tmp_path, {"w": shard}, backend, cast=True, timeout=60)
        expected = np.ones((ROWS, WIDTH))
        expected[1] = np.inf
        expected[:, 0] = np.nan
        assert np.array_equal(shard.array, expected, equal_nan=True)

    launch(body, RANKS)
