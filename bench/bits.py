"""Show that no bit of a training depends on how many ranks compute it, with what, and where.

    python bench/bits.py                                          # the default of train_gpt.py
    python bench/bits.py --width 528 --layers 8 --heads 8 --steps 1 --precisions fp32
    python bench/bits.py --ranks 1,2,3 --transports sim --json bits.json
    python bench/bits.py --ranks 1 --transports sim --changes 10 --steps 14   # ranks come and go

bench/README.md says what is compared.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model

from gpt_model import GPTConfig, keep_freed_memory
from train_gpt import Options, Trainer

import fsdpcore as fc

Digests = dict[str, str]


@dataclass(frozen=True)
class Training:
    """What every rank trains: a few steps with each strategy and precision.

    Attributes:
        options: of ``train_gpt.py``.
        precisions: those to go through.
        names: of the strategies, as in ``strategies``; none for all.
        told: file that rank 0 writes the digests to, of what it has in the end, by case.
    """

    options: Options
    precisions: tuple[str, ...]
    names: tuple[str, ...]
    told: Path

    def run(self, backend: fc.Backend) -> None:
        """Train by every strategy."""
        keep_freed_memory()
        found: Digests = {}
        for precision in self.precisions:
            for name, strategy in strategies(backend.world_size).items():
                if self.names and name not in self.names:
                    continue
                options = replace(self.options, precision=precision, strategy=strategy)
                found[f"{precision} {name}"] = _digest(Trainer(backend, options))
        if backend.rank == 0:
            self.told.write_text(json.dumps(found))


def strategies(ranks: int) -> dict[str, fc.Strategy]:
    """Return those that so many ranks can have, by what they are called in the table."""
    group = max((size for size in range(2, ranks) if ranks % size == 0), default=1)
    found = {
        "full_shard": fc.Strategy("full_shard"),
        "full_shard, kept": fc.Strategy("full_shard", reshard_after_forward=False),
        "shard_grad_op": fc.Strategy("shard_grad_op"),
        "shard_optimizer": fc.Strategy("shard_optimizer"),
        "hybrid_shard": fc.Strategy("hybrid_shard", shard_group_size=group),
        "no_shard": fc.Strategy("no_shard"),
    }
    if ranks % 2 == 0:
        found["full_shard, half kept"] = fc.Strategy("full_shard", reshard_after_forward=2)
    return found


def _digest(trainer: Trainer) -> str:
    losses = [trainer.step(number) for number in range(trainer.options.steps)]
    return _digest_of(trainer, losses)


def _digest_of(trainer: Trainer, losses: list[float]) -> str:
    """On rank 0, of losses, parameters and optimizer state."""
    state = trainer.engine.state_dict(full=True, to=0)
    digest = hashlib.sha256(np.array(losses).tobytes())
    for name, values in sorted(_flat(state)):
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).view(np.uint8).data)
    trainer.engine.close()
    return digest.hexdigest()[:16]


def _flat(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _flat(value, f"{name}/{key}")
    else:
        yield name, np.atleast_1d(np.asarray(state))


class Changing:
    """A training whose ranks come and go, threads of this process.

    Args:
        options: of ``train_gpt.py``.
        changes: how often the number of ranks changes: ranks leave, are added, or one is killed.
    """

    SIZES = (3, 5, 2, 8, 1, 4, 7, 6)

    def __init__(self, options: Options, changes: int) -> None:
        if changes >= options.steps:
            raise fc.ArgumentError(f"{changes} changes need more than {options.steps} steps")
        self._options, self._left = options, changes
        self._asked_at = -1
        self._job: Any = None
        self._ready = threading.Event()

    def run(self) -> str:
        """Train to the end; return the digest."""
        self._job = fc.elastic.launch(self._program(), world_size=(1, 8))
        self._ready.set()
        digests = [found for found in self._job.wait() if found]
        assert self._left == 0, f"{self._left} changes were not made"
        return str(digests[0])

    def _program(self) -> Any:
        @fc.elastic.run
        def train(job: fc.elastic.Job) -> str:
            keep_freed_memory()
            trainer = Trainer(job.backend, self._options)
            losses = job.restore({"engine": trainer.engine, "losses": []})["losses"]
            while job.commits < self._options.steps:
                if job.rank == 0:
                    self._change(job)
                losses.append(trainer.step(job.commits))
                job.commit()
            digest = _digest_of(trainer, losses)
            return digest if job.rank == 0 else ""

        return train

    def _change(self, job: fc.elastic.Job) -> None:
        """Ask for another number of ranks, once for each commit."""
        if not self._left or job.commits <= self._asked_at:
            return
        self._ready.wait()
        self._asked_at, wanted = job.commits, self.SIZES[self._left % len(self.SIZES)]
        self._left -= 1
        more = wanted - job.world_size
        if more > 0:
            self._job.add(more)
        for number in range(-more):
            rank = job.world_size - 1 - number
            # Two that are killed at once may have kept each other's parts.
            if self._left % 2 or number:
                self._job.leave(rank)
            else:
                self._job.kill(rank)


def _main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2,3,5,8",
    transports: Annotated[str, typer.Option(help="Schemes or URLs.")] = "sim,zmq,mpi",
    precisions: Annotated[str, typer.Option(help="fp32, bf16, fp16.")] = "fp32,bf16",
    names: Annotated[str, typer.Option("--strategies", help="Some; by default all.")] = "",
    virtual_ranks: Annotated[int, typer.Option(help="Shares of a batch.")] = 8,
    steps: Annotated[int, typer.Option(help="Of each training.")] = 3,
    width: Annotated[int, typer.Option()] = 96,
    layers: Annotated[int, typer.Option()] = 3,
    heads: Annotated[int, typer.Option()] = 2,
    batch: Annotated[int, typer.Option(help="Sequences of all ranks together.")] = 32,
    changes: Annotated[
        int, typer.Option(help="Also train while the number of ranks changes so often.")
    ] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="All digests.")] = None,
    told: Annotated[Path | None, typer.Option("--told", hidden=True)] = None,
) -> None:
    """Train on each number of ranks and each transport; exit with 1 if a bit differs."""
    options = Options(
        model=GPTConfig(width=width, layers=layers, heads=heads),
        steps=steps,
        batch=batch,
        lr=6e-3,
        seed=1337,
        strategy=fc.Strategy(),
        prefetch=1,
        algorithm="auto",
        out=Path(),
        virtual_ranks=virtual_ranks,
    )
    if told is not None:
        wanted = tuple(filter(None, names.split(",")))
        fc.launch(Training(options, tuple(precisions.split(",")), wanted, told).run)
        return
    rows: dict[str, Digests] = {}
    for transport in transports.split(","):
        for number in ranks.split(","):
            rows[f"{transport} {number}"] = _on(number, transport)
            typer.echo(f"{transport:6} {number:>2} ranks: {_compared(rows)}")
            if json_file is not None:
                json_file.write_text(json.dumps(rows, indent=1))
    if changes:
        rows["changing"] = _changed(options, precisions.split(","), names, changes)
        typer.echo(f"{changes} changes:      {_compared(rows)}")
    if any(len(found) > 1 for found in _by_precision(rows).values()):
        raise typer.Exit(1)


def _changed(options: Options, precisions: list[str], names: str, changes: int) -> Digests:
    """Have every training made by ranks that come and go."""
    found: Digests = {}
    for precision in precisions:
        for name, strategy in strategies(1).items():
            if name == "hybrid_shard" or (names and name not in names.split(",")):
                continue  # whose groups need a number of ranks that they divide
            case = replace(options, precision=precision, strategy=strategy)
            found[f"{precision} {name}"] = Changing(case, changes).run()
    return found


def _on(ranks: str, transport: str) -> Digests:
    """Have a job of so many ranks make all trainings, by this script with the same options."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "digests.json"
        launcher = ["-m", "fsdpcore", "run", "-n", ranks, "--transport", transport]
        command = [sys.executable, *launcher, *sys.argv, "--told", str(told)]
        subprocess.run(command, check=True)  # noqa: S603 - this script
        digests: Digests = json.loads(told.read_text())
    return digests


def _by_precision(rows: dict[str, Digests]) -> dict[str, set[str]]:
    """Return all digests that there are, which should be one for each precision."""
    found: dict[str, set[str]] = {}
    for digests in rows.values():
        for case, digest in digests.items():
            found.setdefault(case.split()[0], set()).add(digest)
    return found


def _compared(rows: dict[str, Digests]) -> str:
    """Say of the last row in which cases it has the digest of the first one."""
    first, last = next(iter(rows.values())), list(rows.values())[-1]
    expected = {case.split()[0]: digest for case, digest in reversed(first.items())}
    other = [case for case, digest in last.items() if digest != expected[case.split()[0]]]
    if other:
        return f"OTHER BITS of {len(last)} trainings in {', '.join(other)}"
    told = ", ".join(f"{precision} {digest}" for precision, digest in expected.items())
    return f"{len(last)} trainings, all {told}"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_main)
    app()
