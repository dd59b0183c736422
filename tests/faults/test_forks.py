"""A process that a rank forks has the rank's memory and descriptors, but is not the rank."""

from __future__ import annotations

import pytest
from support.jobs import finished, fsdpcore

SCRIPT = """
import os, sys
import numpy as np
import fsdpcore as fc

backend = fc.init(timeout=20)
fc.all_reduce(np.ones(3), backend)
if backend.rank == 1:
    pid = os.fork()
    if pid == 0:
        try:
            fc.all_reduce(np.ones(3), backend)
        except fc.ClosedError as error:
            os.write(1, f"child: {error}\\n".encode())
        backend.close()
        sys.exit(0)  # which runs what was registered for the end of the rank
    os.waitpid(pid, 0)
total = fc.all_reduce(np.full(3, 2.0), backend)
os.write(1, f"rank {backend.rank}: {total.tolist()}\\n".encode())
"""


@pytest.mark.side_by_side(3)
@pytest.mark.parametrize("transport", ["zmq", "zmq://?shm=off", "mpi"])
def test_a_forked_process_leaves_the_rank_alone(script, transport):
    done = finished(fsdpcore("run", "-n", 2, "--transport", transport, script(SCRIPT)))
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [
        "child: this process was forked from rank 1, and is not that rank",
        "rank 0: [4.0, 4.0, 4.0]",
        "rank 1: [4.0, 4.0, 4.0]",
    ]
