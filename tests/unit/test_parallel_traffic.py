"""What a tensor-parallel block sends, counted by the transport, is what its formula says."""

from __future__ import annotations

import numpy as np
import pytest
from support.counting import CountingSim
from support.spmd import run_on
from support.tensor_parallel import own_values
from support.transformer_oracle import block_shapes

from fsdpcore.parallel.block import ParallelBlock
from fsdpcore.parallel.traffic import BlockTraffic, PassTraffic

WIDTH, HEADS, HIDDEN, LENGTH = 12, 4, 20, 12
TELLING = {"parallel attention, sequence, extents", "parallel linear, sequence, extents"}
# All of them send as few bytes as can be.
ALGORITHMS = {"all_reduce": "direct", "all_gather": "direct", "reduce_scatter": "direct"}


def collectives(backend):
    """Operation and elements of every collective so far, but those that tell extents: 8 bytes."""
    calls = [entry.call for entry in backend.recorder.entries()]
    return [
        (call.operation.removesuffix("_v"), call.nbytes // 4)
        for call in calls
        if call.label not in TELLING
    ]


def block_passes(backend, batch, length, along_sequence):
    """The formula; then collectives and bytes sent of either pass."""
    layer = ParallelBlock(WIDTH, HEADS, HIDDEN, backend, sequence_parallel=along_sequence)
    initial = layer.init(np.random.default_rng(0))
    whole = {name: np.ones(s, np.float32) for name, s in block_shapes(WIDTH, HEADS, HIDDEN).items()}
    params = own_values(initial, whole)
    grads = {name: np.zeros_like(value) for name, value in params.items()}
    x = np.ones((batch, length, WIDTH), np.float32)
    if along_sequence:
        x = np.array_split(x, backend.world_size, axis=1)[backend.rank]

    counted = []
    before, sent = len(collectives(backend)), sum(backend.sent)
    y, saved = layer.forward(params, x)
    counted.append((collectives(backend)[before:], sum(backend.sent) - sent))
    before, sent = len(collectives(backend)), sum(backend.sent)
    layer.backward(params, saved, y, grads)
    counted.append((collectives(backend)[before:], sum(backend.sent) - sent))
    return layer.traffic(batch, length), counted


def counted(world_size, batch, length, along_sequence):
    return run_on(
        CountingSim,
        block_passes,
        world_size=world_size,
        args=(batch, length, along_sequence),
        shm="off",
        algorithms=ALGORITHMS,
    )


@pytest.mark.parametrize("along_sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [LENGTH, 7])
def test_bytes_and_operations_are_those_of_the_formula(world_size, length, along_sequence):
    full = counted(world_size, 3, length, along_sequence)
    # What ranks send to check that they call the same, and their extents, is not in the formula; it
    # does not depend on the batch, and neither do the gradients of the norms.
    none = counted(world_size, 0, length, along_sequence)
    for number, direction in enumerate(("forward", "backward")):
        formula, without = (getattr(ranks[0][0], direction) for ranks in (full, none))
        for _, passes in full:
            operations = [operation for operation, _ in passes[number][0]]
            for name, sizes in formula._asdict().items():
                assert operations.count(name) == len(sizes), direction
            assert len(operations) == sum(map(len, formula))
        sent, at_least = (sum(passes[number][1] for _, passes in ranks) for ranks in (full, none))
        assert sent - at_least == formula.sent(world_size, 4) - without.sent(world_size, 4)


def test_the_norms_add_up_their_gradients_along_the_sequence():
    _, passes = counted(2, 3, LENGTH, True)[0]
    assert [call for call in passes[1][0] if call[0] == "all_reduce"] == [
        ("all_reduce", 2 * WIDTH)
    ] * 2
    assert not [call for call in passes[0][0] if call[0] == "all_reduce"]


def test_the_formula():
    size = 3 * LENGTH * WIDTH
    for along_sequence, wanted in (
        (False, BlockTraffic(PassTraffic((size, size)), PassTraffic((size, size)))),
        (
            True,
            BlockTraffic(
                PassTraffic((), (size, size), (size, size)),
                PassTraffic((2 * WIDTH, 2 * WIDTH), (size, size), (size, size)),
            ),
        ),
    ):
        formula = counted(2, 3, LENGTH, along_sequence)[0][0]
        assert formula == wanted
        assert formula.forward.sent(2, 4) == 4 * size * 4


def test_a_group_of_one_sends_nothing():
    formula, passes = counted(1, 3, LENGTH, True)[0]
    assert formula.sent(1, 4) == 0
    assert passes == [([], 0), ([], 0)]
