"""Two jobs that save to one folder: neither removes what the other has committed."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import support.ckpt_saves
from support.fsdp_steps import launch
from support.jobs import clean_environ, python, started

import fsdpcore as fc
from fsdpcore.checkpoint.storage.local_storage import LocalStorage

LONG = 60  # seconds, for what takes none unless the machine is slow


def save(storage, step, ranks=1):
    def body(backend):
        state = {f"w{backend.rank}": np.full(4, float(step))}
        return fc.checkpoint.save(storage, state, backend, step=step)

    return launch(body, ranks)[0]


def test_what_is_committed_while_it_is_taken_for_a_leftover_stays(tmp_path):
    opened, looked, done = (threading.Event() for _ in range(3))

    class Slow(LocalStorage):
        def writer(self, name):
            opened.set()
            assert looked.wait(LONG)
            return super().writer(name)

    class Clearing(LocalStorage):
        """Of a process that is scheduled out between looking and locking."""

        @contextmanager
        def claim(self, directory):
            if directory == "step_00000010":
                looked.set()
                assert done.wait(LONG)
            with super().claim(directory) as claimed:
                yield claimed

    def other():
        save(Slow(tmp_path), 10)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert opened.wait(LONG)
    save(Clearing(tmp_path), 11)
    thread.join()
    assert fc.checkpoint.steps(tmp_path) == [10, 11]


def test_a_folder_that_another_job_made_is_left_to_it(tmp_path):
    made, taken, done = (threading.Event() for _ in range(3))

    class First(LocalStorage):
        """Its folder is cleared before it is claimed, and made again by the other job."""

        waits = True

        @contextmanager
        def claim(self, directory):
            if self.waits and directory == "step_00000005":
                self.waits = False
                made.set()
                assert taken.wait(LONG)
            with super().claim(directory) as claimed:
                yield claimed

    class Second(LocalStorage):
        def writer(self, name):
            taken.set()
            assert done.wait(LONG)
            return super().writer(name)

    outcome = []
    first = threading.Thread(target=lambda: outcome.append(save(First(tmp_path), 5)))
    first.start()
    assert made.wait(LONG)
    second = threading.Thread(target=lambda: outcome.append(save(Second(tmp_path), 5)))
    second.start()
    first.join()
    done.set()
    second.join()
    assert len({saved.name for saved in outcome}) == 2
    for saved in outcome:
        if (tmp_path / saved.name).exists():
            assert (tmp_path / saved.name / "COMMIT").exists()
    assert fc.checkpoint.read(tmp_path)["w0"].tolist() == [5.0] * 4


LOOP = """
import sys
import numpy as np
import fsdpcore as fc
from support.ckpt_saves import found, save

folder, first, count = sys.argv[1], *map(int, sys.argv[2:])
for step in range(first, 2 * count, 2):
    save(folder, step, step)
    assert found(folder, step) == step
"""


@pytest.mark.parametrize("count", [20])
def test_two_processes_lose_nothing_of_each_other(tmp_path, count):
    script, folder = tmp_path / "loop.py", tmp_path / "run"
    script.write_text(LOOP)
    tests = Path(support.ckpt_saves.__file__).parents[1]
    environ = clean_environ(PYTHONPATH=os.fspath(tests), OPENBLAS_NUM_THREADS="1")
    one, other = (python(script, folder, first, count) for first in (0, 1))
    with started(one, environ) as first, started(other, environ) as second:
        for job in (first, second):
            done = job.finish()
            assert (done.code, done.err) == (0, "")
    assert fc.checkpoint.steps(folder) == list(range(2 * count))
