"""Ranks that save without communication, killed with SIGKILL at a chosen call of the system.

Run as a program, so that it may fork: ``python ckpt_kills.py FOLDER SEED ROUNDS``. In each round
four processes save at once; some kill themselves at one of their calls, some are killed by their
pid from outside. What is there then must be nothing or the whole save; a further attempt, under
another id and with other values, must end in the whole of it. Prints what happened, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np

from fsdpcore.checkpoint.load.distributed import load_distributed
from fsdpcore.checkpoint.plan.shard_specs import flat_shard_metadata
from fsdpcore.checkpoint.save import distributed
from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.core.errors import ArgumentError, CheckpointNotFoundError

RANKS = 4
SHAPES = {"w": (70, 300), "b": (33,), "scale": ()}
CALLS = ("open", "writev", "fsync", "mkdir", "listdir", "unlink", "flock", "close")


class Deadly(Files):
    """Kills its own process at call number ``at``."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)


def values(save_id: str) -> dict[str, Any]:
    rng = np.random.default_rng([ord(each) for each in save_id])
    return {name: rng.standard_normal(shape).astype("f4") for name, shape in SHAPES.items()}


def described(save_id: str) -> distributed.ShardMetadata:
    return flat_shard_metadata(SHAPES, "f4", RANKS, step=7, save_id=save_id)


def save(root: str, save_id: str, rank: int, at: int) -> int:
    """Return 1 if this rank has committed, 2 if a checkpoint was there, else 0."""
    metadata, full = described(save_id), values(save_id)
    state = {
        spec.name: full[spec.name].reshape(-1)[region.start : region.stop]
        for spec in metadata.shards[rank]
        for region in spec.regions
    }
    storage = LocalStorage(root, Deadly(at))
    try:
        return int(distributed._save(storage, "step_00000007", state, rank, RANKS, metadata))
    except ArgumentError as error:
        if "is a committed checkpoint" not in str(error):
            raise
        return 2


def attempt(root: str, save_id: str, ats: list[int], kills: list[tuple[float, int]]) -> list[int]:
    """Save on all ranks at once; return the exit codes, negative for a signal."""
    pids = []
    for rank, at in enumerate(ats):
        pid = os.fork()
        if not pid:
            code = 99
            try:
                code = save(root, save_id, rank, at)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", file=sys.stderr)
            finally:
                os._exit(code)
        pids.append(pid)
    for delay, rank in kills:
        time.sleep(delay)
        os.kill(pids[rank], signal.SIGKILL)  # not waited for yet, so that the pid is still its own
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def found(root: str) -> str | None:
    """Return the id of the save that is there, every value of which is right; None if none is."""
    try:
        state, metadata = load_distributed(f"{root}/step_00000007", 0, 1, threads=1)
    except CheckpointNotFoundError:
        return None
    for name, full in values(metadata.save_id).items():
        (piece,) = state[name].pieces
        assert piece.array.tobytes() == full.tobytes(), f"{name} of {metadata.save_id} is mixed"
    return metadata.save_id


def one_round(root: str, chance: random.Random) -> dict[str, int]:
    told = {"killed": 0, "committed early": 0}
    for number in range(2):
        deaths = [chance.randint(0, 75) if chance.random() < 0.5 else 10**9 for _ in range(RANKS)]
        kills = [(chance.random() * 0.01, r) for r in range(RANKS) if chance.random() < 0.3]
        codes = attempt(root, f"try{number}", deaths, kills)
        assert set(codes) <= {0, 1, 2, -signal.SIGKILL}, codes
        told["killed"] += codes.count(-signal.SIGKILL)
        assert codes.count(1) <= 1, codes
        there = found(root)
        if there is not None:
            told["committed early"] += 1
            assert there == f"try{number}" or codes.count(2), (there, codes)
            return told
        assert 1 not in codes, codes
    codes = attempt(root, "last", [10**9] * RANKS, [])
    assert sorted(codes) == [0, 0, 0, 1], codes
    assert found(root) == "last"
    assert sorted(os.listdir(f"{root}/step_00000007")) == [
        "COMMIT",
        "metadata.json",
        *(f"rank_{rank}.safetensors" for rank in range(RANKS)),
    ]
    return told


if __name__ == "__main__":
    folder, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    total = {"killed": 0, "committed early": 0}
    for number in range(rounds):
        result = one_round(f"{folder}/{number}", random.Random(seed * 1000 + number))
        total = {key: total[key] + result[key] for key in total}
    print(json.dumps(total))
