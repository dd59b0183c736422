"""Tensor-parallel layers in an engine: ranks without a part, 16 bits, frozen units.

The oracle is the same training on one rank, whose layers are held against formulas elsewhere.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support.parallel_cases import Alone
from support.spmd import run

import fsdpcore as fc
from fsdpcore import parallel

VOCAB, WIDTH, BATCH, LENGTH, STEPS = 3, 5, 4, 6, 5
HALF = fc.Precision(np.dtype(np.float16), np.float32, fc.LossScale(64.0))


def layers(group, hidden, deferred=False):
    """With 4 ranks, one has no row of the table; with hidden 1, one has all there is."""
    along = {"sequence_parallel": True}
    initial = {"init": fc.initializers.normal(std=0.3)} if deferred else {}
    return fc.LayerStack(
        [
            ("embed", parallel.VocabParallelEmbedding(VOCAB, WIDTH, group, **along, **initial)),
            (
                "middle",
                fc.Chain(
                    [
                        ("norm", parallel.RMSNorm(WIDTH, group, **along)),
                        (
                            "up",
                            parallel.ColumnParallelLinear(WIDTH, hidden, group, **along, **initial),
                        ),
                        (
                            "down",
                            parallel.RowParallelLinear(hidden, WIDTH, group, **along, **initial),
                        ),
                        ("join", parallel.GatherSequence(group)),
                    ]
                ),
            ),
            ("head", parallel.ColumnParallelLinear(WIDTH, VOCAB, group, **initial)),
        ]
    )


def _trained(backend, tensor, hidden, precision=None, deferred=False, frozen=""):
    """The mean losses of all steps, and all parameters in the end."""
    mesh = fc.Mesh(backend, {"shard": backend.world_size // tensor, "tensor": tensor})
    group, shard = mesh["tensor"], mesh["shard"]
    stack = layers(group, hidden, deferred)
    rng = np.random.default_rng(0)
    units = [
        fc.Unit(name, layer.init(rng), frozen="*" if name == frozen else ())
        for name, layer in stack.layers
    ]
    engine = fc.FSDP(
        units, shard, tensor=group, optimizer=fc.optim.SGD(lr=0.1), precision=precision
    )
    rng = np.random.default_rng(1)
    losses = []
    for _ in range(STEPS):
        x, y = (
            np.array_split(rows, shard.world_size)[shard.rank]
            for rows in rng.integers(VOCAB, size=(2, BATCH, LENGTH))
        )
        with engine.step() as step:
            logits, saved = stack.forward(step, x)
            loss, d = parallel.cross_entropy(logits, y, group, vocab=VOCAB)
            stack.backward(step, saved, d * np.float32(engine.loss_scale))
            step.update(clip=0.5)
        losses.append(float(fc.all_reduce(np.float64(loss), shard, op="mean")))
    return losses, engine.state_dict(full=True, optimizer=False)


@functools.cache
def trained(ranks, tensor, *options):
    return run(_trained, transport="sim", world_size=ranks, args=(tensor, *options))


def check(ranks, tensor, tolerance, **options):
    """Return the parameters of one rank after the training that they all agree on."""
    kinds = {"hidden": 7, "precision": None, "deferred": False, "frozen": "", **options}
    args = tuple(kinds.values())
    ((losses, state),) = trained(1, 1, *args)
    assert losses[-1] != losses[0]
    for found_losses, found in trained(ranks, tensor, *args):
        np.testing.assert_allclose(found_losses, losses, rtol=tolerance)
        assert found.keys() == state.keys()
        for name, array in state.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance, err_msg=name)
    return state


# About a hundred roundings of 6e-8 in a step, five times.
FLOAT32 = 3e-5


@pytest.mark.parametrize(
    ("ranks", "tensor", "hidden"),
    [(2, 2, 7), (3, 3, 1), (4, 2, 7), (4, 4, 1), (4, 4, 7), (6, 3, 1)],
)
def test_training_is_that_of_one_rank(ranks, tensor, hidden):
    check(ranks, tensor, FLOAT32, hidden=hidden)


def test_training_with_sixteen_bits_and_a_scaled_loss_is_that_of_one_rank():
    check(4, 2, 3e-2, precision=HALF)


def test_deferred_values_do_not_depend_on_the_mesh():
    check(6, 3, FLOAT32, deferred=True)


@pytest.mark.parametrize("frozen", ["embed", "middle"])
def test_frozen_units_stay_what_they_were(frozen):
    """A frozen layer hands the gradient on; the values do not depend on what is frozen."""
    state = check(4, 2, FLOAT32, frozen=frozen)
    free = check(2, 2, FLOAT32)
    rng = np.random.default_rng(0)
    for name, layer in layers(Alone(), 7).layers:
        for key, value in layer.init(rng).items():
            unchanged = np.array_equal(state[f"{name}.{key}"], value)
            assert unchanged == (name == frozen), (name, key)
            assert not np.array_equal(free[f"{name}.{key}"], value)
