"""Training that stops and goes on: from one number of ranks, transport and strategy to another."""

from __future__ import annotations

import fnmatch
import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_gpt
import typer
from support.jobs import finished, python
from support.spmd_mpi import mpi_environ, mpirun
from typer.testing import CliRunner

import fsdpcore as fc

# The losses of every step, to the last bit, and at the end a checkpoint.
SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
import fsdpcore as fc
import train_gpt
from gpt_model import GPTConfig

def main(backend, folder, target, strategy):
    model = GPTConfig(context=16, width=24, heads=2, layers=2, hidden=50)
    sharding = fc.Strategy(strategy)
    # So many steps that the learning rate of a step does not depend on where a run stops.
    options = train_gpt.Options(model, 1000, 13, 6e-3, 1337, sharding, 1, "auto", Path("unused"))
    trainer = train_gpt.Trainer(backend, options)
    try:
        fc.checkpoint.load(folder, trainer.engine, backend)
    except fc.CheckpointNotFoundError:
        assert trainer.engine.steps == 0
    losses = [trainer.step(number).hex() for number in range(trainer.engine.steps, int(target))]
    fc.checkpoint.save(folder, trainer.engine, backend)
    if backend.rank == 0:
        print(*losses)
    return losses

if __name__ == "__main__":
    transport, ranks = (sys.argv[4:] or [None])[0], int((sys.argv[5:] or [0])[0]) or None
    args = sys.argv[1:4]
    fc.launch(main, world_size=ranks, transport=transport, args=args, deterministic=True)
"""


class Runs:
    """Runs of the script, one after the other, in the same folder of checkpoints."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._environ = mpi_environ(OPENBLAS_NUM_THREADS="1", FSDPCORE_BLAS_THREADS="1")
        self.folder = folder
        self.losses: list[float] = []

    def go_on(self, upto: int, strategy: str, transport: str, ranks: int) -> None:
        if transport == "sim":  # which starts no process: in this one
            main = runpy.run_path(os.fspath(self._path))["main"]
            options: dict[str, Any] = {"deterministic": True, "blas_threads": 1}
            args = (self.folder, upto, strategy)
            words = fc.launch(main, world_size=ranks, transport="sim", args=args, **options)[0]
            self.losses += [float.fromhex(word) for word in words]
            return
        more = [] if transport == "mpi" else [transport, ranks]
        command = python(self._path, self.folder, upto, strategy, *more)
        if transport == "mpi":
            command = [*mpirun(ranks), *command]
        done = finished(command, self._environ)
        assert (done.code, done.err) == (0, "")
        self.losses += [float.fromhex(word) for word in done.out.split()]

    def arrays(self) -> dict[str, np.ndarray]:
        return fc.checkpoint.read(self.folder)


@pytest.fixture(scope="module")
def runs(script, tmp_path_factory):
    path = script(SCRIPT)
    return lambda name: Runs(path, tmp_path_factory.mktemp(name))


@pytest.mark.side_by_side(2)
def test_training_goes_on_with_other_ranks_transports_and_strategies(runs):
    stops, whole = runs("stops"), runs("whole")
    stops.go_on(5, "full_shard", "sim", 4)
    stops.go_on(10, "full_shard", "sim", 3)
    stops.go_on(15, "shard_grad_op", "mpi", 2)
    whole.go_on(15, "full_shard", "sim", 4)
    assert len(stops.losses) == len(whole.losses) == 15
    assert stops.losses[:5] == whole.losses[:5]
    np.testing.assert_allclose(stops.losses, whole.losses, rtol=2e-5)
    one, other = stops.arrays(), whole.arrays()
    assert one.keys() == other.keys()
    assert len(fnmatch.filter(one, "optimizer/*")) == 2 * len(fnmatch.filter(one, "[!o]*"))
    for name, array in one.items():
        if name.endswith("qkv.b"):
            # A bias of keys changes no output: its gradient is rounding, which Adam scales up.
            continue
        scale = float(np.abs(other[name]).max())
        np.testing.assert_allclose(array, other[name], rtol=0, atol=1e-3 * scale, err_msg=name)
    latest = fc.checkpoint.latest(stops.folder)
    assert (latest.step, latest.skipped) == (15, ())


@pytest.mark.side_by_side(2)
def test_training_goes_on_bit_for_bit_in_the_same_layout(runs):
    stops, whole = runs("stops"), runs("whole")
    stops.go_on(5, "no_shard", "zmq", 3)
    stops.go_on(10, "no_shard", "sim", 3)
    whole.go_on(10, "no_shard", "sim", 3)
    assert stops.losses == whole.losses
    one, other = stops.arrays(), whole.arrays()
    assert one.keys() == other.keys()
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


SMALL = ["--batch", 4, "--context", 16, "--width", 8, "--layers", 1, "--every", 2]


def here(*arguments):
    """Run the example in this process."""
    app = typer.Typer()
    app.command()(train_gpt.cli)
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_example_resumes(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("example")
    folder = tmp_path / "checkpoints"
    small = [*SMALL, "--out", tmp_path, "--checkpoint", folder, "--resume"]
    first = here(*small, "--steps", 5)
    assert (first.exit_code, first.stderr) == (0, "")
    assert "training begins anew" in first.stdout
    assert fc.checkpoint.steps(folder) == [4, 5]
    then = here(*small, "--steps", 7, "--ranks", 2, "--strategy", "no_shard")
    assert (then.exit_code, then.stderr) == (0, "")
    assert f"resumed after step 5 from {folder}" in then.stdout
    assert fc.checkpoint.steps(folder) == [6, 7]
    done = here(*small, "--steps", 7)
    assert done.exit_code == 0
    assert "nothing is left to do of 7 steps" in done.output
    again = here(*(each for each in small if each != "--resume"))
    assert again.exit_code == 2
    assert "checkpoints up to step 7" in " ".join(again.output.replace("│", " ").split())
    wrong = here("--resume")
    assert wrong.exit_code == 2
    assert "--checkpoint" in wrong.output
