"""A GPT that is trained by ranks that come and go; each process keeps a diary.

    fsdpcore run --elastic -n 1:6 bench/elastic_bench/training.py FOLDER '{"width": 96}'

A line of the diary says what has happened, when (the machine's monotonic clock), and in which
generation.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # the model

from gpt_model import GPTConfig, build, cross_entropy, keep_freed_memory

import fsdpcore as fc


@dataclass(frozen=True)
class Training:
    """What is trained, the same on all ranks.

    Attributes:
        width, layers, heads, context: of the model.
        batch: sequences of a step.
        leaves: virtual ranks, over which they are dealt.
        steps: until the end.
        block: steps in a row with a commit each, then as many without one, and so on; 0 for commits
            at all steps.
        pause: seconds that each step takes besides, as if it computed.
    """

    width: int = 96
    layers: int = 3
    heads: int = 2
    context: int = 32
    batch: int = 8
    leaves: int = 8
    steps: int = 1_000_000
    block: int = 0
    pause: float = 0.0

    def text(self) -> str:
        """As a rank is given it."""
        return json.dumps(asdict(self))


class Diary(logging.Handler):
    """What happens to this process, in a file that only it writes; what the library logs, too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.INFO)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self.here: dict[str, Any] = {}

    def tell(self, what: str, **details: Any) -> None:
        """Write a line."""
        line = {"what": what, "at": time.monotonic(), "cpu": time.process_time()}
        line |= {"pid": os.getpid(), **self.here, **details}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def emit(self, record: logging.LogRecord) -> None:
        self.tell("log", words=record.getMessage())


def train(job: fc.elastic.Job, training: Training, diary: Diary) -> None:
    """Train to the end; tell when what was done."""
    diary.here = {
        "host": int(os.environ.get("LAB_HOST", "0")),
        "rank": job.rank,
        "world_size": job.world_size,
        "generation": job.generation,
    }
    diary.tell("called")
    config = GPTConfig(
        context=training.context,
        width=training.width,
        heads=training.heads,
        layers=training.layers,
    )
    stack = fc.LayerStack(build(config))
    engine = fc.FSDP(
        stack.units(cast(Any, _Later())),
        job.backend,
        optimizer=fc.optim.AdamW(1e-3),
        virtual_ranks=training.leaves,
    )
    diary.tell("made", bytes=engine.held().total)
    job.restore({"model": engine})
    diary.tell("restored", commits=job.commits)
    for number in range(job.commits, training.steps):
        began = time.monotonic()
        _step(engine, stack, training, number)
        stepped = time.monotonic()
        kept = not training.block or number // training.block % 2 == 0
        if kept:
            job.commit()
        diary.tell("commit", number=number, began=began, stepped=stepped, kept=kept)


class _Later:
    """In place of a generator: parameters are drawn by each rank, its own share of them only."""

    def standard_normal(self, shape: tuple[int, ...], dtype: object) -> _Drawn:
        return _Drawn(shape)


@dataclass
class _Drawn:
    shape: tuple[int, ...]

    def __mul__(self, scale: float) -> fc.Spec:
        return fc.Spec(self.shape, init=fc.initializers.normal(std=scale))


def _step(engine: fc.FSDP, stack: fc.LayerStack, training: Training, number: int) -> None:
    rng = np.random.default_rng(number)
    shape = (training.batch, training.context)
    x, y = rng.integers(0, 256, shape), rng.integers(0, 256, shape)
    shares = np.array_split(np.arange(training.batch), training.leaves)
    with engine.step(divisor=training.batch) as step:
        for leaf in step.leaves():
            logits, saved = stack.forward(step, x[shares[leaf]])
            _, slope = cross_entropy(logits, y[shares[leaf]], np)
            stack.backward(step, saved, slope)
        if training.pause:
            time.sleep(training.pause)
        step.update(clip=1.0)


def main() -> None:
    """Be a rank."""
    folder, training = Path(sys.argv[1]), Training(**json.loads(sys.argv[2]))
    diary = Diary(folder / "diaries")
    logger = logging.getLogger("fsdpcore")
    logger.setLevel(logging.INFO)
    logger.addHandler(diary)
    keep_freed_memory()

    @fc.elastic.run(every=1)
    def program(job: fc.elastic.Job) -> None:
        try:
            train(job, training, diary)
        except BaseException as error:
            diary.tell("unwound", why=type(error).__name__)
            raise

    diary.tell("ready")
    program()


if __name__ == "__main__":
    main()
