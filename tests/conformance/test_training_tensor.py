"""A GPT that is cut over ranks and sharded over others follows the training on one rank.

Processes start slowly: there is one job of them for every transport, with all that is asked of it.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from gpt_model import build
from numpy.testing import assert_allclose
from support import parallel_chain
from support.spmd import run
from test_parallel_layers import check_all_layers
from test_training import BATCH, CLIP, EPS, MODEL, batch, reference

import fsdpcore as fc
from fsdpcore import parallel as tp

STEPS = 12
CUT_AND_SHARDED = {"shard": 2, "tensor": 2}
PROCESSES = ["zmq", "mpi"]
# Where the parameters of the unsharded model are in this one.
NAMES = {
    "embed": {"byte": "byte.w", "position": "position.w"},
    "block": {
        **{f"norm{i}.{kind}": f"norm{i}.{kind}" for i in (1, 2) for kind in ("gain", "bias")},
        **{
            f"{name}.{kind}": f"attention.{name}.{kind}"
            for name in ("qkv", "proj")
            for kind in "wb"
        },
        **{f"{name}.{kind}": f"mlp.{name}.{kind}" for name in ("up", "down") for kind in "wb"},
    },
    "head": {name: name for name in ("norm.gain", "norm.bias", "out.w", "out.b")},
}


def gpt(group, along_sequence):
    """The example's model, of parallel layers; between embed and head along the sequence."""
    options = {"sequence_parallel": along_sequence}
    embed = [
        ("byte", tp.VocabParallelEmbedding(MODEL.vocab, MODEL.width, group)),
        ("position", tp.PositionEmbedding(MODEL.context, MODEL.width)),
    ]
    if along_sequence:
        embed.append(("scatter", tp.ScatterSequence(group)))
    head = [
        ("norm", tp.LayerNorm(MODEL.width, group, **options)),
        ("out", tp.ColumnParallelLinear(MODEL.width, MODEL.vocab, group, **options)),
    ]
    sizes = (MODEL.width, MODEL.heads, MODEL.mlp_width)
    scale = 1 / np.sqrt(2 * MODEL.layers)
    block = tp.ParallelBlock(*sizes, group, residual_scale=scale, **options)
    blocks = [(f"block{i}", block) for i in range(MODEL.layers)]
    return fc.LayerStack([("embed", fc.Chain(embed)), *blocks, ("head", fc.Chain(head))])


def units(stack, dtype):
    """The initial values of the unsharded model, which is float32, in another type."""

    def cast(value):
        if isinstance(value, fc.BoxShard):
            return fc.BoxShard(value.shape, value.start, value.array.astype(dtype))
        return value.astype(dtype)

    rng = np.random.default_rng(11)
    return [
        fc.Unit(name, {key: cast(value) for key, value in layer.init(rng).items()})
        for name, layer in stack.layers
    ]


def train(backend, axes, steps, along_sequence, dtype, strategy):
    """Losses and norms of every step, in the end all parameters, and what this rank holds."""
    mesh = fc.Mesh(backend, axes)
    data, group = mesh[tuple(axes)[:-1]], mesh["tensor"]
    stack = gpt(group, along_sequence)
    engine = fc.FSDP(
        units(stack, dtype),
        data,
        tensor=group,
        strategy=strategy,
        optimizer=fc.optim.AdamW(lr=3e-3, eps=EPS),
    )
    mine = np.array_split(np.arange(BATCH), data.world_size)[data.rank]
    losses, norms = [], []
    for number in range(steps):
        x, y = batch(number)
        with engine.step(divisor=BATCH) as step:
            logits, saved = stack.forward(step, x[mine])
            loss, dlogits = tp.cross_entropy(logits, y[mine], group, vocab=MODEL.vocab)
            stack.backward(step, saved, dlogits * dtype(len(mine)))
            norms.append(step.update(clip=CLIP))
        total = fc.all_reduce(np.float64(loss * len(mine)), data)
        losses.append(float(total) / BATCH)
    with engine.full_params() as whole:
        params = {name: array.copy() for name, array in whole.items()}
    return losses, norms, params, engine.held()


def trained(axes, along_sequence, steps=STEPS, dtype=np.float32, strategy="full_shard"):
    return run(
        train,
        transport="sim",
        world_size=int(np.prod(list(axes.values()))),
        args=(axes, steps, along_sequence, dtype, strategy),
    )


def train_and_pass(backend):
    """The training along the sequence, which has all kinds of collectives; and all layers."""
    result = train(backend, CUT_AND_SHARDED, STEPS, True, np.float32, "full_shard")
    return result, parallel_chain.both_ways(backend)


@functools.cache
def between_processes(transport):
    return run(train_and_pass, transport=transport, world_size=4)


@functools.cache
def alone(steps):
    """The same program on one rank."""
    return trained({"shard": 1, "tensor": 1}, False, steps)[0]


def unsharded(steps, dtype):
    """Losses, norms and parameters of the example's model without the engine, by our names."""
    losses, norms, params = reference(steps, dtype=dtype)
    assert list(params) == [name for name, _ in build(MODEL)]
    renamed = {
        f"{unit}.{NAMES[unit.rstrip('0123456789')][name]}": array
        for unit, named in params.items()
        for name, array in named.items()
    }
    return losses, norms, renamed


def assert_follows(result, wanted, *, losses, norms, params):
    """``losses`` and ``norms`` are relative, ``params`` absolute limits."""
    assert_allclose(result[0], wanted[0], rtol=losses)
    assert_allclose(result[1], wanted[1], rtol=norms)
    assert set(result[2]) == set(wanted[2])
    for name, array in wanted[2].items():
        assert_allclose(
            result[2][name].reshape(array.shape), array, atol=params, rtol=0, err_msg=name
        )


# float32 rounds by 6e-8. A gradient is a chain of sums that are added up in another order: off by
# 1e-6 of the size of its parameter's. Adam divides it by its own size, so a parameter moves by a
# part of lr = 3e-3, and that part is off by 1e-6, or where the gradient is small more, up to what
# eps = 1e-5 leaves of it: rarely by a few ten thousandths. That is 1e-6 in a step, and a dozen may
# add up to 1.2e-5. The loss feels a mean over all parameters, most of which are far better.
FP32 = {"losses": 5e-6, "norms": 2e-5, "params": 2e-5}


def assert_follows_one_rank(ranks):
    steps = len(ranks[0][0])
    wanted = unsharded(steps, np.float32)
    assert wanted[0][-1] < wanted[0][0] - 0.2  # it learns, so the comparison means something
    assert min(wanted[1]) < CLIP < max(wanted[1])
    for result in ranks:
        assert_follows(result, wanted, **FP32)
        assert_follows(result, alone(steps), **FP32)


@pytest.mark.parametrize("along_sequence", [False, True], ids=["whole", "sequence"])
def test_tensor_parallel_and_sharded_training_follows_one_rank(along_sequence):
    assert_follows_one_rank(trained(CUT_AND_SHARDED, along_sequence))


@pytest.mark.parametrize("transport", PROCESSES)
def test_so_it_does_between_processes(transport):
    assert_follows_one_rank([result for result, _ in between_processes(transport)])


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_model_of_all_layers_is_the_unsharded_one_between_processes(transport):
    check_all_layers([passed for _, passed in between_processes(transport)])


HYBRID = fc.Strategy("hybrid_shard", shard_group_size=2)


@pytest.mark.parametrize(
    ("axes", "along_sequence", "strategy"),
    [
        ({"shard": 1, "tensor": 3}, False, "full_shard"),
        ({"shard": 1, "tensor": 3}, True, "full_shard"),
        ({"shard": 3, "tensor": 1}, True, "full_shard"),
        ({"replicate": 2, "shard": 2, "tensor": 2}, True, HYBRID),
    ],
    ids=["tensor", "tensor, sequence", "shard", "hybrid"],
)
def test_so_it_does_on_other_meshes(axes, along_sequence, strategy):
    for result in trained(axes, along_sequence, strategy=strategy):
        assert_follows(result, unsharded(STEPS, np.float32), **FP32)


@pytest.mark.parametrize("along_sequence", [False, True], ids=["whole", "sequence"])
def test_in_float64_nothing_else_differs(along_sequence):
    wanted = unsharded(STEPS, np.float64)
    for result in trained(CUT_AND_SHARDED, along_sequence, STEPS, np.float64):
        assert_follows(result, wanted, losses=1e-9, norms=1e-9, params=1e-9)


def test_ranks_hold_their_part_of_the_cut_matrices_only():
    """But for what all ranks of ``tensor`` have, such as norms and positions."""
    sizes = {name: array.nbytes for name, array in alone(1)[2].items()}
    boxed = ("byte.w", "qkv.w", "qkv.b", "proj.w", "up.w", "up.b", "down.w", "out.w", "out.b")
    cut = sum(size for name, size in sizes.items() if name.endswith(boxed))
    copied = sum(sizes.values()) - cut
    ranks = trained(CUT_AND_SHARDED, False, 1)
    held = sum(result[3].parameters - result[3].padding // 2 for result in ranks)
    assert cut + 2 * copied <= held <= cut + 2 * copied + 4 * 4 * (MODEL.layers + 2)
