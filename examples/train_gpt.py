"""Train a byte-level GPT, fully sharded, on the source code of the Python standard library.

    python examples/train_gpt.py                          # 4 ranks, threads of this process
    python examples/train_gpt.py --transport zmq          # 4 processes over TCP
    fsdpcore run -n 2 examples/train_gpt.py               # ranks started by a launcher
    fsdpcore run --transport nccl -n 2 examples/train_gpt.py   # each on a GPU of its own, with CuPy
    python examples/train_gpt.py --checkpoint runs/ckpt   # --resume goes on, on any number of ranks
    python examples/train_gpt.py --precision bf16         # mixed precision; made for GPUs
    python examples/train_gpt.py --compress int8          # over slow links: a quarter of the bytes
    python examples/train_gpt.py --compress int4 --outer-every 50   # groups that meet rarely
    fsdpcore run --elastic -n 1:4 examples/train_gpt.py --virtual-ranks 8   # ranks come and go

Model and gradients are plain NumPy (gpt_model.py), or CuPy where the ranks have GPUs. What makes it
distributed is in ``Trainer``: the engine takes over the layers' parameters, and each rank computes
its rows of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer
from corpus import batch, load
from gpt_model import BITS_PER_NAT, GPTConfig, build, cross_entropy, keep_freed_memory, sample
from loss_curve import save_png
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fsdpcore as fc

console = Console(highlight=False)


# Master parameters, their reduction over the ranks and the optimizer are in float32 in all of them.
PRECISIONS = {
    "fp32": fc.Precision(),
    "bf16": fc.Precision(ml_dtypes.bfloat16, np.float32),
    "fp16": fc.Precision(np.float16, np.float32, fc.LossScale(4096.0)),
}


@dataclass(frozen=True)
class Options:
    """One training run; the same on all ranks."""

    model: GPTConfig
    steps: int
    batch: int
    lr: float
    seed: int
    strategy: fc.Strategy
    prefetch: int
    algorithm: str
    out: Path
    checkpoint: Path | None = None
    every: int = 100
    resume: bool = False
    precision: str = "fp32"
    evaluate_every: int = 50
    evaluation_batches: int = 4
    virtual_ranks: int | None = None
    compression: fc.Compression | None = None
    outer_every: int | None = None
    groups: int | None = None  # one for each rank, with outer steps
    sample_bytes: int = 300


class Trainer:
    """The model on one rank."""

    def __init__(self, backend: fc.Backend, options: Options) -> None:
        # A batch is dealt to virtual ranks where there are such, else to ranks.
        self.leaves = options.virtual_ranks or backend.world_size
        if options.batch < self.leaves:
            raise fc.ArgumentError(
                f"a batch of {options.batch} sequences is too small for {self.leaves} ranks"
            )
        self.backend = backend
        self.options = options
        # Groups that meet in outer steps only train an engine each.
        apart = 1 if options.outer_every is None else options.groups or backend.world_size
        self.mesh, self.groups = fc.Mesh(backend, {"group": apart, "shard": -1}), apart
        self.group = self.mesh.coordinates["group"]
        own = self.mesh["shard"] if apart > 1 else backend
        self.train, self.validation = load()
        self.xp = backend.device.xp
        self.stack = fc.LayerStack(build(options.model, self.xp))
        self.engine = fc.FSDP(
            self.stack.units(np.random.default_rng(options.seed)),
            own,
            strategy=options.strategy,
            precision=PRECISIONS[options.precision],
            optimizer=fc.optim.AdamW(learning_rate(options), betas=(0.9, 0.95), weight_decay=0.1),
            prefetch=options.prefetch,
            algorithm=options.algorithm,
            virtual_ranks=options.virtual_ranks,
            compression=options.compression if apart == 1 else None,
        )
        self.outer = self.outer_step()

    def outer_step(self) -> fc.OuterStep | None:
        """How groups meet from the parameters on that they have now; None if there is one group."""
        if self.options.outer_every is None:
            return None
        return fc.OuterStep(
            self.engine,
            self.mesh["group"],
            every=self.options.outer_every,
            compression=self.options.compression,
        )

    @property
    def state(self) -> Any:
        """What a checkpoint has to hold; each group has its own."""
        return self.engine if self.outer is None else {"model": self.engine, "outer": self.outer}

    @property
    def folder(self) -> Path | None:
        """Where the checkpoints of this rank's group are."""
        folder = self.options.checkpoint
        return folder if folder is None or self.outer is None else folder / f"group{self.group}"

    def step(self, number: int) -> float:
        """One step on the global batch; returns its loss in bits per byte, equal on all ranks.

        Where gradients do not fit float16, it is made again, with the loss scaled by less.
        """
        while True:
            scale = self.engine.loss_scale
            losses, skipped = self._update(number)
            if not skipped:
                return self._mean(losses)
            if self.engine.loss_scale == scale:
                raise fc.NonFiniteGradientError(
                    f"gradients of step {number} are inf or nan with a loss scale of {scale:g}, "
                    "which gets no smaller; lower the learning rate, or use --precision bf16"
                )

    def _update(self, number: int) -> tuple[dict[int, Any], bool]:
        """Forward, backward and update; the losses, and whether the update was left out."""
        # Gradients are summed over the sequences of all ranks and divided by their number, so
        # that it does not matter how many ranks there are, or whether they get equally many.
        losses, tokens = {}, 0
        rows = self.options.batch / self.groups
        with self.engine.step(divisor=rows) as step, self._overflow():
            for leaf in step.leaves():
                x, y = self._rows(self.train, number, self.options.seed, leaf)
                logits, saved = self.stack.forward(step, x)
                loss, dlogits = cross_entropy(logits, y, self.xp)
                losses[leaf] = loss * len(x)
                tokens += x.size
                dlogits *= len(x) * self.engine.loss_scale
                self.stack.backward(step, saved, dlogits)
            step.tokens = tokens  # for ``fsdpcore top``
            step.update(clip=1.0)
        if self.outer is not None:
            self.outer.step()
        return losses, step.skipped

    def _overflow(self) -> np.errstate:
        """NumPy need not warn of what the scaling of the loss is there for."""
        scaled = self.engine.precision.scaling is not None
        return np.errstate(over="ignore", invalid="ignore") if scaled else np.errstate()

    def evaluate(self) -> float:
        """The loss on the same few batches of unseen files each time, in bits per byte."""
        losses: dict[int, Any] = dict.fromkeys(self.engine.leaves, 0.0)
        for number in range(self.options.evaluation_batches):
            with self.engine.evaluation() as step:
                for leaf in step.leaves():
                    x, y = self._rows(self.validation, number, 0, leaf)
                    logits, _ = self.stack.forward(step, x)
                    losses[leaf] += cross_entropy(logits, y, self.xp)[0] * len(x)
        return self._mean(losses) / self.options.evaluation_batches

    def generate(self) -> str:
        """Continue a prompt on rank 0, with all parameters gathered; the other ranks return ''."""
        with self.engine.gathered():
            params = {unit.name: unit.params for unit in self.engine.units}

            def forward(window: NDArray[Any]) -> NDArray[Any]:
                x = self.xp.asarray(window)
                for name, layer in self.stack.layers:
                    x, _ = layer.forward(params[name], x)
                return self.backend.device.to_host(x)

            text = b""
            if self.backend.rank == 0:
                rng = np.random.default_rng(self.options.seed)
                context, length = self.options.model.context, self.options.sample_bytes
                text = b"def " + sample(forward, b"def ", length, context, rng, 0.8)
        return text.decode("utf-8", "replace")

    def _rows(self, data: NDArray[Any], number: int, seed: int, leaf: int) -> tuple[Any, Any]:
        """A leaf's rows of a global batch, which every rank draws alike, where it computes."""
        x, y = batch(
            data,
            step=number,
            seed=seed,
            batch_size=self.options.batch,
            context=self.options.model.context,
        )
        mine = np.array_split(np.arange(self.options.batch), self.leaves)[self._number(leaf)]
        return self.xp.asarray(x[mine]), self.xp.asarray(y[mine])

    def _number(self, leaf: int) -> int:
        """Which of the leaves of all groups one of this group is."""
        return self.group * (self.leaves // self.groups) + leaf

    def _mean(self, losses: dict[int, Any]) -> float:
        """Bits per byte, from the sums of this rank's leaves over sequences, in nats."""
        row = np.zeros(self.leaves)
        for leaf, loss in losses.items():
            row[self._number(leaf)] = float(loss)  # a GPU is waited for here, and for the norm
        # Nobody else has a number where one rank has: this sum has no order.
        fc.all_reduce(row, self.backend, out=row, algorithm=self.engine.host_algorithm)
        return float(row.sum()) / self.options.batch * BITS_PER_NAT


@dataclass
class History:
    """What the run has shown so far, in bits per byte; equal on all ranks."""

    losses: list[float]
    validation: list[list[float]]  # pairs of a step and a loss

    @classmethod
    def begin(cls, trainer: Trainer, job: fc.elastic.Job) -> History:
        """Go on from where the ranks were, or from a checkpoint if that is wanted, else begin."""
        state = job.restore({"engine": trainer.engine, "losses": [], "validation": []})
        history = cls(state["losses"], state["validation"])
        if job.commits:
            return history
        folder = trainer.folder
        there = fc.checkpoint.steps(folder) if folder is not None else []
        resume = trainer.options.resume or job.generation > 1  # too much was lost for the memory
        if there and not resume:
            raise fc.ArgumentError(
                f"{folder} has checkpoints up to step {there[-1]}: go on from there with --resume, "
                "or choose another folder"
            )
        if folder is not None and resume:
            try:
                loaded = fc.checkpoint.load(folder, trainer.state, trainer.engine.backend)
            except fc.CheckpointNotFoundError:
                say(trainer.backend, f"no checkpoint in {folder}: training begins anew")
            else:
                say(trainer.backend, f"resumed after step {loaded.step} from {folder}")
                history.losses += loaded.extra["losses"]
                history.validation += loaded.extra["validation"]
                return history
        history.validation.append([0, trainer.evaluate()])
        return history

    def extra(self) -> dict[str, Any]:
        """As it goes into a checkpoint."""
        return {"losses": self.losses, "validation": self.validation}


@contextmanager
def checkpoints(trainer: Trainer) -> Iterator[Any]:
    """Give a function that saves a checkpoint, in the background, where one is due."""
    options = trainer.options
    if trainer.folder is None:
        yield lambda done, history: None
        return
    keep = fc.checkpoint.Retention(last=2)
    with fc.checkpoint.AsyncCheckpointer(
        trainer.folder, trainer.engine.backend, retention=keep
    ) as saver:

        def save(done: int, history: History) -> None:
            if done % options.every == 0 or done == options.steps:
                saver.save(trainer.state, extra=history.extra())

        yield save


def say(backend: fc.Backend, text: str) -> None:
    """Print on one rank."""
    if backend.rank == 0:
        console.print(text, markup=False, soft_wrap=True)


def learning_rate(options: Options) -> fc.optim.Schedule:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(20, options.steps // 10 + 1)
    total = max(options.steps, warmup + 1)
    return fc.optim.schedules.Cosine(options.lr, warmup, total, floor=options.lr / 10)


@fc.elastic.run
def main(job: fc.elastic.Job, options: Options) -> list[float]:
    """One rank's program; returns the losses of all steps.

    Where ranks come and go it is called again, and goes on from the last commit.
    """
    keep_freed_memory()
    backend = job.backend
    if job.elastic and options.outer_every is not None:
        raise fc.ArgumentError(
            "--outer-every has groups that train apart, each with parameters of its own, and "
            "--elastic keeps one engine of all ranks; leave one of them out"
        )
    trainer = Trainer(backend, options)
    if job.generation > 1:
        say(backend, f"generation {job.generation}: {backend.world_size} ranks ({job.reason})")
    memory = show_memory(trainer)
    history = History.begin(trainer, job)
    first = trainer.engine.steps
    if first >= options.steps:
        say(backend, f"nothing is left to do of {options.steps} steps")
        return history.losses
    with checkpoints(trainer) as save, progress_line(backend, options.steps) as show:
        start = backend.clock.now()
        for number in range(first, options.steps):
            history.losses.append(trainer.step(number))
            done = number + 1
            if done % options.evaluate_every == 0 or done == options.steps:
                history.validation.append([done, trainer.evaluate()])
            save(done, history)
            job.commit()
            tokens = (done - first) * options.batch * options.model.context
            rate = tokens / (backend.clock.now() - start)
            show(done, history.losses[-1], history.validation[-1][1], rate, memory)
    text = trainer.generate()
    if backend.rank == 0:
        finish(options, history, text)
    return history.losses


def show_memory(trainer: Trainer) -> str:
    """Print what every rank holds between steps, measured; returns one rank's share."""
    held = trainer.engine.held()
    mine = [held.parameters, held.gradients, held.optimizer, held.padding, held.unsharded]
    everyone = fc.gather(np.array([mine], np.int64), trainer.backend)
    if everyone is not None:
        table = Table(title="Held per rank between steps (bytes, measured)", title_justify="left")
        for name in ("rank", "parameters", "gradients", "optimizer", "padding", "of the total"):
            table.add_column(name, justify="right")
        for rank, row in enumerate(everyone):
            share = row[:3].sum() / row[4]
            table.add_row(str(rank), *(f"{size:,}" for size in row[:4]), f"{share:.2%}")
        console.print(table)
    return f"{held.total / 1e6:.1f} MB/rank"


@contextmanager
def progress_line(backend: fc.Backend, steps: int) -> Iterator[Any]:
    """Give a function that shows how far the training is: a live line, or text in a pipe."""
    bar = Progress(
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("[bold]{task.fields[info]}"),
        TimeRemainingColumn(),
        console=console,
        disable=backend.rank != 0 or not console.is_terminal,
    )
    task = bar.add_task("train", total=steps, info="")

    def show(done: int, loss: float, validation: float, rate: float, memory: str) -> None:
        info = f"loss {loss:.3f} (unseen {validation:.3f}) bits/byte"
        info += f"  {rate:,.0f} tokens/s  {memory}"
        bar.update(task, completed=done, info=info)
        if backend.rank == 0 and not console.is_terminal and (done % 50 == 0 or done == steps):
            console.print(f"step {done}/{steps}  {info}", soft_wrap=True)

    with bar:
        yield show


def finish(options: Options, history: History, text: str) -> None:
    """Print a sample and the final loss, draw the curve."""
    console.rule("a sample")
    console.print(text, markup=False)
    console.rule()
    validation = [(int(step), loss) for step, loss in history.validation]
    first, last = validation[0][1], validation[-1][1]
    console.print(f"validation: {first:.2f} bits per byte before, [bold]{last:.2f}[/] after")
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "loss.png"
    try:
        save_png(picture, history.losses, validation, f"Byte-level GPT, {options.steps} steps")
        console.print(f"loss curve: {picture}")
    except fc.MissingDependencyError as error:
        console.print(f"no picture: {error}", markup=False)


def cli(
    ranks: Annotated[int, typer.Option(min=1, help="Where no launcher decides.")] = 4,
    transport: Annotated[
        str | None, typer.Option(help="sim, zmq, mpi, nccl (GPUs), or a URL.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="In all; the learning rate goes by it, too.")
    ] = 600,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of all ranks together.")] = 32,
    context: Annotated[int, typer.Option(min=1, help="Bytes of a sequence.")] = 128,
    width: Annotated[int, typer.Option(min=1)] = 96,
    layers: Annotated[int, typer.Option(min=1)] = 3,
    heads: Annotated[int, typer.Option(min=1)] = 2,
    hidden: Annotated[int | None, typer.Option(help="Default: 4 times the width.")] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-3,
    seed: int = 1337,
    strategy: Annotated[str, typer.Option(help="What is sharded; see fc.Strategy.")] = "full_shard",
    shard_group_size: Annotated[int | None, typer.Option(help="Of hybrid_shard.")] = None,
    precision: Annotated[
        str, typer.Option(help="fp32, bf16, or fp16; 16 bits are for GPUs, on a CPU they are slow.")
    ] = "fp32",
    prefetch: Annotated[int, typer.Option(min=0, help="Units gathered ahead.")] = 1,
    algorithm: Annotated[str, typer.Option(help="auto, or one such as direct.")] = "auto",
    virtual_ranks: Annotated[
        int | None, typer.Option(help="Shares of a batch: the bits are the same on any ranks.")
    ] = None,
    compress: Annotated[
        str | None, typer.Option(help="How they travel: int8, int4, int8,int4 or int8,int4,keep.")
    ] = None,
    outer_every: Annotated[
        int | None, typer.Option(min=1, help="Steps in which groups of ranks train apart.")
    ] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="How many, by default one for each rank.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the loss curve goes.")] = Path("runs/train_gpt"),
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps from checkpoint to checkpoint.")] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
) -> None:
    """Train a small GPT, fully sharded over the ranks."""
    try:
        model = GPTConfig(context=context, width=width, heads=heads, layers=layers, hidden=hidden)
        sharded = fc.Strategy(strategy, shard_group_size=shard_group_size)
        if precision not in PRECISIONS:
            raise fc.ArgumentError(
                f"--precision is {precision!r}; choose one of {', '.join(PRECISIONS)}"
            )
        if resume and checkpoint is None:
            raise fc.ArgumentError("--resume needs --checkpoint, the folder to resume from")
        options = Options(
            model=model,
            steps=steps,
            batch=batch,
            lr=lr,
            seed=seed,
            strategy=sharded,
            prefetch=prefetch,
            algorithm=algorithm,
            out=out,
            checkpoint=checkpoint,
            every=every,
            resume=resume,
            precision=precision,
            virtual_ranks=virtual_ranks,
            compression=None if compress is None else fc.Compression.parse(compress),
            outer_every=outer_every,
            groups=groups,
        )
        fc.launch(main, world_size=ranks, transport=transport, args=(options,))
    except (fc.ConfigError, fc.ArgumentError) as error:
        raise typer.BadParameter(str(error)) from None
    except fc.RankFailedError as error:  # a rank may be who finds the option wrong, or no GPU
        if error.misuse:
            raise typer.BadParameter(str(error)) from None
        raise


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(cli)
    app()
