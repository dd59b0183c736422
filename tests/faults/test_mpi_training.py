"""Training on MPI: the bits of every other transport, with reductions in canonical order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.jobs import finished, python
from support.spmd_mpi import mpi_environ, mpirun

pytestmark = pytest.mark.side_by_side(2)

GPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"

# The losses of every step, to the last bit, instead of a table for people.
SCRIPT = """
import sys
from pathlib import Path
import fsdpcore as fc
import numpy as np
import train_gpt
from gpt_model import GPTConfig

def main(backend):
    model = GPTConfig(context=16, width=24, heads=2, layers=2, hidden=50)
    out = Path(sys.argv[1])
    options = train_gpt.Options(model, 4, 6, 6e-3, 1337, fc.Strategy(), 1, "auto", out)
    trainer = train_gpt.Trainer(backend, options)
    losses = [trainer.step(number).hex() for number in range(options.steps)]
    if backend.rank == 0:
        print(*losses)

if __name__ == "__main__":
    fc.launch(main, world_size=3, deterministic=True)
"""


def test_losses_are_those_of_threads_to_the_last_bit(script):
    path = script(SCRIPT)
    environ = mpi_environ(OPENBLAS_NUM_THREADS="1", FSDPCORE_BLAS_THREADS="1")
    ours = finished([*mpirun(3), *python(path, path.parent)], environ)
    assert (ours.code, ours.err) == (0, "")
    threads = finished(python(path, path.parent), environ)
    assert (threads.code, threads.err) == (0, "")
    losses = [float.fromhex(word) for word in threads.out.split()]
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    assert ours.out == threads.out


def test_the_example_runs_under_mpirun(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("example")
    small = ["--steps", 2, "--batch", 4, "--context", 16, "--width", 8, "--layers", 1]
    command = [*mpirun(2), *python(GPT, *small, "--out", tmp_path)]
    done = finished(command, mpi_environ(FSDPCORE_DETERMINISTIC="true"))
    assert (done.code, done.err) == (0, "")
    assert "bits per byte before" in done.out
    assert (tmp_path / "loss.png").stat().st_size > 0
