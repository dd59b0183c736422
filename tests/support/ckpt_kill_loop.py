"""Run as a script: save without end in another process, kill that, look, again and again.

    python ckpt_kill_loop.py FOLDER KILLS SEED

Prints how often the save that was cut off was found, and how often the one before it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from typing import NoReturn

from support.ckpt_saves import found, save

import fsdpcore as fc

_RETENTION = (None, fc.checkpoint.Retention(last=1), fc.checkpoint.Retention(last=2, every=3))


def saves(folder: str, mark: int, pipe: int) -> NoReturn:
    """Save marks in ascending order, some of them as the same step as the one before."""
    while True:
        mark += 1
        os.write(pipe, f"begin {mark}\n".encode())
        save(folder, mark // 2, mark, retention=_RETENTION[mark % 3])
        os.write(pipe, f"done {mark}\n".encode())


def killed(folder: str, mark: int, seconds: float) -> tuple[int, int]:
    """Save from ``mark`` on for so long; return the last mark begun, and the last one done."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            saves(folder, mark, writing)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        told = lines.readline()  # it has begun
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        told += lines.read()
    assert os.WIFSIGNALED(status), "a save failed by itself"
    words = [line.split() for line in told.splitlines()]
    begun = max(int(number) for word, number in words if word == "begin")
    done = [int(number) for word, number in words if word == "done"]
    return begun, max(done, default=mark)


def main(folder: str, kills: int, seed: int) -> None:
    """Kill so often."""
    chance = random.Random(seed)
    mark, before, cut = 0, 0, 0
    for _ in range(kills):
        begun, done = killed(folder, mark, chance.uniform(0, 0.1))
        outcome = found(fc.checkpoint.storage.opening.open_storage(folder))
        if outcome is None:
            assert done == 0, "a checkpoint that was done is gone"
            continue
        assert outcome in (done, begun), (outcome, done, begun)
        before += outcome == done
        cut += outcome != done
        mark = outcome
    print(
        f"{kills} kills: {before} times the save before, {cut} times the one cut off, {mark} saves"
    )
    # What the killed saves left behind goes with the next one.
    save(folder, mark + 1, mark + 1, retention=fc.checkpoint.Retention(last=1))
    assert os.listdir(folder) == [f"step_{mark + 1:08d}"], os.listdir(folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
