"""A byte-level GPT whose matrices are cut over ranks, and sharded over others (FSDP).

    python examples/gpt_tensor_parallel.py                  # 2 x 2 ranks, threads of this process
    python examples/gpt_tensor_parallel.py --transport zmq  # 4 processes over TCP
    mpirun -n 8 python examples/gpt_tensor_parallel.py --tensor 4

Ranks along the mesh's axis ``tensor`` compute the same rows of a batch together, each some heads,
hidden features and bytes of the vocabulary; those along ``shard`` have other rows, and shard what
such a rank has of the matrices. So each keeps about one part in ``shard * tensor`` of the model.
"""

from __future__ import annotations

import math

import numpy as np
import typer
from corpus import batch, load

import fsdpcore as fc
from fsdpcore import parallel as tp

VOCAB, CONTEXT, WIDTH, HEADS, BLOCKS, BATCH = 256, 64, 96, 4, 3, 16


def gpt(group: fc.Backend) -> fc.LayerStack:
    """The model of a rank; every entry is a unit, gathered at once."""
    table = tp.VocabParallelEmbedding(VOCAB, WIDTH, group)
    embed = fc.Chain([("byte", table), ("position", tp.PositionEmbedding(CONTEXT, WIDTH))])
    scale = 1 / math.sqrt(2 * BLOCKS)
    block = tp.ParallelBlock(WIDTH, HEADS, 4 * WIDTH, group, residual_scale=scale)
    logits = tp.ColumnParallelLinear(WIDTH, VOCAB, group)
    head = fc.Chain([("norm", tp.LayerNorm(WIDTH)), ("logits", logits)])
    blocks = [(f"block{i}", block) for i in range(BLOCKS)]
    return fc.LayerStack([("embed", embed), *blocks, ("head", head)])


def main(backend: fc.Backend, tensor: int = 2, steps: int = 300) -> list[float]:
    """Train on one rank; returns the losses in bits per byte, the same for any mesh."""
    mesh = fc.Mesh(backend, {"shard": -1, "tensor": tensor})
    data, group = mesh["shard"], mesh["tensor"]
    model, (text, _) = gpt(group), load()
    adam = fc.optim.AdamW(lr=fc.optim.schedules.Cosine(6e-3, 10, max(steps, 11)))
    units = model.units(np.random.default_rng(0))
    engine = fc.FSDP(units, data, tensor=group, optimizer=adam)

    losses: list[float] = []
    for number in range(steps):
        x, y = batch(text, step=number, seed=0, batch_size=BATCH, context=CONTEXT)
        mine = np.array_split(np.arange(BATCH), data.world_size)[data.rank]
        with engine.step(divisor=BATCH) as step:  # sums over all sequences become means
            logits, saved = model.forward(step, x[mine])
            loss, dlogits = tp.cross_entropy(logits, y[mine], group, vocab=VOCAB)
            model.backward(step, saved, dlogits * np.float32(len(mine)))
            step.update(clip=1.0)
        total = float(fc.all_reduce(loss * len(mine), data)) / BATCH
        losses.append(total / math.log(2))
        if backend.rank == 0 and (number % 50 == 0 or number == steps - 1):
            print(f"step {number}: {losses[-1]:.3f} bits per byte", flush=True)

    state = engine.state_dict().values()  # parameters and both moments of AdamW
    share = sum(a.nbytes for a in state) / sum(a.size * a.dtype.itemsize for a in state)
    shares = fc.gather(np.array([share]), backend)
    if shares is not None:
        print("parts of the model that the ranks hold:", *(f"{part:.1%}" for part in shares))
    return losses


def cli(ranks: int = 4, transport: str | None = None, tensor: int = 2, steps: int = 300) -> None:
    """Train a small GPT on a mesh of ranks."""
    fc.launch(main, world_size=ranks, transport=transport, args=(tensor, steps))


if __name__ == "__main__":
    typer.run(cli)
