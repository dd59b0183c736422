"""More files than are looked at one after the other."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import fsdpcore as fc
from fsdpcore.checkpoint import flat_shard_metadata, load_distributed, save_distributed
from fsdpcore.checkpoint.storage.many import for_many
from fsdpcore.core.errors import CheckpointError

RANKS = 40


def test_many_are_done_several_at_a_time_few_by_the_caller():
    meeting = threading.Barrier(4, timeout=20)

    def wait_for_others(number):
        meeting.wait()
        return -number

    assert for_many(wait_for_others, range(RANKS)) == [-number for number in range(RANKS)]
    here = threading.get_ident()
    assert for_many(lambda _: threading.get_ident(), range(5)) == [here] * 5


def test_the_first_of_many_that_fails_is_told():
    def fail(number):
        if number >= 20:
            raise FileNotFoundError(number)

    with pytest.raises(FileNotFoundError, match="20"):
        for_many(fail, range(RANKS))


def _save(folder, ranks, full, save_id):
    metadata = flat_shard_metadata({"w": full.shape}, "f4", RANKS, step=30, save_id=save_id)
    for rank in ranks:
        regions = [region for spec in metadata.shards[rank] for region in spec.regions]
        pieces = tuple(fc.ArrayPiece(r.start, r.stop, full[r.start : r.stop]) for r in regions)
        state = {"w": fc.ShardedArray(full.shape, full.dtype, pieces)}
        done = save_distributed(state, folder, rank, RANKS, metadata)
    return done


def test_the_files_of_many_ranks_are_committed_together(tmp_path):
    full, folder = np.arange(1000, dtype="f4"), tmp_path / "step_00000030"
    assert not _save(folder, range(RANKS - 1), full, "one")
    with open(folder / "rank_17.safetensors", "r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match=r"rank_17\.safetensors is not what its rank"):
        _save(folder, [RANKS - 1], full, "one")
    os.remove(folder / "rank_17.part")
    assert _save(folder, [17], full, "one")
    assert sorted(os.listdir(folder)) == sorted(
        ["COMMIT", "metadata.json", *(f"rank_{rank}.safetensors" for rank in range(RANKS))]
    )
    state, _ = load_distributed(folder, 0, 1)
    assert state["w"].pieces[0].array.tobytes() == full.tobytes()
    assert fc.checkpoint.latest(tmp_path).step == 30
    with open(folder / "rank_23.safetensors", "ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"rank_23\.safetensors has"):
        fc.checkpoint.latest(tmp_path)
