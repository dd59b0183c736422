"""Saving processes that are killed for real: what is loaded is the save before, or that one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import support.ckpt_kill_loop
from support.ckpt_saves import check_mixed, found, mixed_state, save
from support.jobs import clean_environ, finished, python

import fsdpcore as fc

LOOP = Path(support.ckpt_kill_loop.__file__)


def loop(folder: Path, kills: int, seed: int) -> str:
    environ = clean_environ(PYTHONPATH=os.fspath(LOOP.parents[1]), OPENBLAS_NUM_THREADS="1")
    done = finished(python(LOOP, folder, kills, seed), environ)
    assert (done.code, done.err) == (0, "")
    assert f"{kills} kills" in done.out
    return done.out


def test_a_few_kills(tmp_path):
    loop(tmp_path, 15, 1)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(5))
def test_many_kills(tmp_path, seed):
    print(loop(tmp_path, 120, 100 + seed))


# A job of processes, of which one is killed at a call of its own.
JOB = """
import os
import signal
import sys
import fsdpcore as fc
from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from support.ckpt_saves import mixed_state

folder, mark, victim, at = sys.argv[1], *map(int, sys.argv[2:])

class Deadly(Files):
    left = at

    def _count(self):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def open(self, *args, **options):
        self._count()
        return super().open(*args, **options)

    def writev(self, *args):
        self._count()
        return super().writev(*args)

    def fsync(self, *args):
        self._count()
        return super().fsync(*args)

def main(backend):
    files = Deadly() if backend.rank == victim else Files()
    state = mixed_state(backend.rank, backend.world_size, mark)
    try:
        fc.checkpoint.save(LocalStorage(folder, files), state, backend, step=mark)
    except fc.FsdpcoreError as error:
        print(f"rank {backend.rank} saw {type(error).__name__}", flush=True)
        raise
    print(f"rank {backend.rank} saved", flush=True)

if __name__ == "__main__":
    fc.launch(main, world_size=2, transport="zmq", timeout=30)
"""


@pytest.mark.side_by_side(4)
@pytest.mark.parametrize(
    ("victim", "at", "steps"),
    [(1, 2, 1), (0, 20, 1), (0, 46, 2)],  # after 44 calls, rank 0 has written the marker
)
def test_a_process_that_is_killed_takes_the_save_with_it(
    script, tmp_path_factory, victim, at, steps
):
    script, folder = script(JOB), tmp_path_factory.mktemp("save") / "run"
    environ = clean_environ(PYTHONPATH=os.fspath(LOOP.parents[1]), OPENBLAS_NUM_THREADS="1")
    save(folder, 1, 1, state=mixed_state)
    cut = finished(python(script, folder, 2, victim, at), environ)
    assert cut.code != 0
    assert f"rank {victim} saved" not in cut.out
    assert "SIGKILL" in cut.err
    assert found(folder) == steps
    check_mixed(folder, steps)
    save(folder, 3, 3)
    assert found(folder) == 3
    assert found(folder, 1) == 1
    assert len(os.listdir(folder)) == len(fc.checkpoint.steps(folder)) == 1 + steps
