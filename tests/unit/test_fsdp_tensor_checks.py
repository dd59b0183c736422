"""Boxes and groups of ranks that do not fit together: found out when the engine is made."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.fsdp_steps import cause_of, launch
from support.fsdp_tensor import Grid, Model, engine_on, raised_alike, train

import fsdpcore as fc
from fsdpcore.core.geometry.boxes import BoxShard

TWO = Grid(tensor=2, shard=2)
WHOLE = np.arange(12, dtype=np.float32).reshape(4, 3)


def rows(start, stop, whole=WHOLE):
    return BoxShard(whole.shape, (start, 0), whole[start:stop])


def test_boxes_need_the_ranks_with_the_others():
    error = cause_of(lambda backend: fc.FSDP([fc.Unit("u", {"w": rows(1, 3)})], backend))
    assert type(error) is fc.ArgumentError
    assert str(error) == (
        "u.w is the box [1:3, 0:3] of an array of shape (4, 3), and no rank of this engine has the "
        "rest; pass the group of ranks that do: FSDP(..., tensor=mesh['tensor'])"
    )


def test_a_deferred_box_needs_them_too():
    unit = fc.Unit("u", {"w": fc.Spec((4, 3))[:, :2]})
    assert "u.w is the box [0:4, 0:2]" in str(cause_of(lambda backend: fc.FSDP([unit], backend)))


def test_boxes_that_are_whole_are_plain_parameters():
    def body(backend, tensor):
        group = backend.sub([backend.rank]) if tensor else None
        unit = fc.Unit("u", {"w": rows(0, 4), "s": fc.Spec((2, 2))[:]})
        engine = fc.FSDP([unit], backend, tensor=group)
        boxes = [shard.box for shard in engine.state_dict().values()]
        return unit.boxes, boxes, engine.state_dict(full=True)["u.w"]

    for tensor in (False, True):
        for boxes, shards, whole in launch(body, 2, args=(tensor,)):
            assert boxes == {}
            assert shards == [None, None]
            assert_array_equal(whole, WHOLE)


def test_one_rank_may_have_all_and_the_others_nothing():
    """As where a vocabulary is smaller than the number of ranks."""

    def body(backend):
        mesh = fc.Mesh(backend, {"shard": 2, "tensor": 2})
        rank = mesh["tensor"].rank
        unit = fc.Unit("u", {"w": rows(4 * rank, 4), "s": fc.Spec((2, 3))[:, 3 * rank :]})
        sgd = fc.optim.SGD(lr=1.0)
        engine = fc.FSDP([unit], mesh["shard"], tensor=mesh["tensor"], optimizer=sgd)
        with engine.step() as step:
            with step.forward("u") as params:
                shape = params["w"].shape
            with step.backward("u") as (_, grads):
                grads["w"][...] = 1
            norm = step.update(clip=100.0)
        return shape, norm, engine.state_dict(full=True)["u.w"]

    for rank, (shape, norm, whole) in enumerate(launch(body, 4)):
        assert shape == ((0, 3) if rank % 2 else (4, 3))
        assert norm == pytest.approx(12**0.5, rel=1e-6)
        assert_array_equal(whole, WHOLE - 1)


# What a rank of two, and two that cut, gives: the units by its ``tensor.rank``, and the message.
TOLD = "the parts that ranks [0, 1] have of u.w do not make one array of shape (4, 3): "
MISFITS = {
    "overlap": (
        lambda rank: {"w": rows(0, 3) if rank == 0 else rows(2, 4)},
        TOLD + "ranks 0 and 1 of tensor have the same elements",
    ),
    "gap": (
        lambda rank: {"w": rows(0, 1) if rank == 0 else rows(2, 4)},
        TOLD + "no rank of tensor has 3 of its elements",
    ),
    "whole, but other values": (
        lambda rank: {"w": rows(0, 4, WHOLE + rank)},
        TOLD + "they have other values",
    ),
    "whole on one rank": (
        lambda rank: {"w": rows(0, 4) if rank else rows(1, 2)},
        TOLD + "ranks 0 and 1 of tensor have the same elements",
    ),
    "plain on one rank": (lambda rank: {"w": WHOLE if rank else rows(0, 4)}, "unit 'u' differs in"),
    "other wholes": (
        lambda rank: {"w": rows(rank, rank + 1, WHOLE[: 2 + rank])},
        "unit 'u' differs in the whole shape or dtype of w: float32 (2, 3), of which it has a box "
        "on rank 0, but float32 (3, 3), of which it has a box on rank 1 and rank 3",
    ),
    "other names": (lambda rank: {"wv"[rank]: rows(2 * rank, 2 * rank + 2)}, "unit 'u' differs"),
    "other dtypes": (
        lambda rank: {"w": rows(2 * rank, 2 * rank + 2, WHOLE.astype("f8" if rank else "f4"))},
        "unit 'u' differs",
    ),
    "another initialiser": (
        lambda rank: {"w": fc.Spec((4, 3), init=fc.initializers.constant(rank))[2 * rank :][:2]},
        "unit 'u' differs",
    ),
    "other values of what is whole": (
        lambda rank: {"w": rows(2 * rank, 2 * rank + 2), "b": np.full(3, rank, np.float32)},
        "unit 'u' differs",
    ),
}


@pytest.mark.parametrize("case", list(MISFITS))
def test_boxes_of_all_ranks_make_the_whole(case):
    params, words = MISFITS[case]

    def body(backend):
        mesh = fc.Mesh(backend, {"shard": 2, "tensor": 2})
        unit = fc.Unit("u", params(mesh["tensor"].rank))
        fc.FSDP([unit], mesh["shard"], tensor=mesh["tensor"])

    found = {}

    def caught(backend):
        with pytest.raises(fc.MismatchError) as raised:
            body(backend)
        backend.barrier()
        found[backend.rank] = str(raised.value)

    launch(caught, 4)
    first = found[0].replace("ranks [2, 3]", "ranks [0, 1]")
    assert words in first
    assert all(
        message.replace("ranks [2, 3]", "ranks [0, 1]") == first for message in found.values()
    )


OPTIONS = {
    "optimizer": lambda rank: {"optimizer": fc.optim.SGD(lr=1.0 + (rank == 3))},
    "seed": lambda rank: {"seed": rank % 2},
    "prefetch": lambda rank: {"prefetch": rank // 2},
}


@pytest.mark.parametrize("case", list(OPTIONS))
def test_options_are_those_of_all_ranks(case):
    def body(backend):
        engine_on(TWO, backend, Model(), **OPTIONS[case](backend.rank))

    kind, message = raised_alike(body, 4)
    assert kind is fc.MismatchError
    assert "the engine's options (strategy, optimizer" in message


@pytest.mark.parametrize("what", ["frozen", "tied", "box"])
def test_a_single_rank_that_has_other_units_is_found_by_all(what):
    model = Model()

    def body(backend):
        rank = backend.rank
        bounds = (
            (lambda name, extent, parts: [0, 1 + (rank > 1), extent]) if what == "box" else None
        )
        units = Model(bounds=bounds).units(2, rank % 2)
        if what == "frozen" and rank == 3:
            units[2] = fc.Unit("c", {"plain": model.params["c.plain"]}, frozen="plain")
        if what == "tied":
            tie = fc.Tied("c", "plain") if rank == 3 else model.params["c.plain"]
            units.append(fc.Unit("d", {"plain": tie}))
        engine_on(TWO, backend, model, units=units)

    kind, message = raised_alike(body, 4)
    assert kind is fc.MismatchError
    assert re.search(r"unit '[abcd]' differs in", message)


def test_ignored_arrays_are_no_boxes():
    with pytest.raises(fc.ArgumentError, match=r"u\.w is ignored, .* but it is a box"):
        fc.Unit("u", {"w": rows(0, 2)}, ignored="w")


def test_one_array_is_one_box():
    units = [
        fc.Unit("u", {"w": rows(0, 2)}),
        fc.Unit("v", {"w": BoxShard((4, 3), (2, 0), WHOLE[:2])}),
    ]

    def body(backend):
        fc.FSDP(units, backend.sub([backend.rank]), tensor=backend)

    error = cause_of(body, 2)
    assert "u.w and v.w are the same array, but the first is the box [0:2, 0:3]" in str(error)


ALONE = "alone in both: take two axes of one mesh"
GROUPS = {
    "no group": (lambda backend: 2, "tensor must be the group of ranks"),
    "the same ranks": (lambda backend: backend, ALONE),
    "others of them": (lambda backend: backend.sub([0, 1]), ALONE),
}


@pytest.mark.parametrize("case", list(GROUPS))
def test_tensor_is_a_group_across(case):
    group, words = GROUPS[case]

    def body(backend):
        if backend.rank < 2:
            fc.FSDP(Model().units(), backend, tensor=group(backend))

    error = cause_of(body, 4)
    assert type(error) is fc.ArgumentError
    assert words in str(error)


def test_groups_that_are_no_rows_of_a_grid():
    """The second rank that shards has its fellows in another order."""

    def body(backend):
        shard = backend.sub([[0, 2], [1, 3]][backend.rank % 2])
        tensor = backend.sub([[0, 1], [3, 2]][backend.rank // 2])
        fc.FSDP(Model().units(2, tensor.rank), shard, tensor=tensor)

    error = cause_of(body, 4)
    assert type(error) is fc.ArgumentError
    assert "must be rows of a grid of ranks" in str(error)


def test_an_engine_closes_the_group_it_made_and_no_other():
    model = Model()

    def body(backend):
        for _ in range(2):
            engine = engine_on(TWO, backend, model)
            train(engine, model, range(1))
            engine.close()
        assert engine.everyone.order.closed
        return engine.tensor.order.closed or engine.backend.order.closed

    assert launch(body, 4) == [False] * 4
