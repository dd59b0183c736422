"""Random models, strategies and steps, against the same training unsharded in float64."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_models import strategies

import fsdpcore as fc

LR, MOMENTUM = 0.1, 0.9
SHAPES = [(), (0,), (1,), (2,), (0, 3), (3, 5), (4, 1, 2), (41,)]
UNIT = st.lists(st.sampled_from(SHAPES), max_size=4).map(tuple)
AHEAD = st.one_of(
    st.integers(0, 3),
    st.builds(fc.Prefetch, st.integers(0, 3), st.just(50), st.integers(0, 1)),
)
CLIPPING = st.one_of(
    st.fixed_dictionaries(
        {
            "clip": st.sampled_from([1e-3, 1.0, 1e6]),
            "norm_type": st.sampled_from([1, 2, 3, math.inf]),
        }
    ),
    st.sampled_from([{}, {"clip_value": 0.3}]),
)


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything about a run; the same on all ranks.

    Attributes:
        shapes: of each unit's parameters.
        frozen: of each unit, whether its last parameter is.
        ties: of some units, a parameter of another one that they use, too.
        steps: for each step the passes, forward and back, and the units that each goes through.
        deferred: gradients of all passes but the last of a step are kept by ``no_sync``.
        missing: one in so many gradients is never written.
        clip: keywords of ``update``.
        scale: of the loss.
    """

    world_size: int
    strategy: fc.Strategy
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    frozen: tuple[bool, ...]
    ties: tuple[tuple[int, int, int], ...]
    dtypes: tuple[str, ...]
    steps: tuple[tuple[tuple[int, ...], ...], ...]
    deferred: bool
    prefetch: Any
    window: bool
    divisor: float | None
    clip: dict[str, float]
    scale: float | None
    missing: int
    seed: int

    def params(self):
        rng = np.random.default_rng(self.seed)
        return {
            f"u{i}": {f"p{j}": rng.normal(size=s).astype(dtype) for j, s in enumerate(shapes)}
            for i, (shapes, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True))
        }

    def frozen_of(self, unit):
        number = int(unit[1:])
        last = len(self.shapes[number]) - 1
        return {f"p{last}"} if self.frozen[number] and last >= 0 else set()

    def owners(self, unit):
        """The parameters that a unit uses, and where each of them is."""
        number = int(unit[1:])
        own = {f"p{j}": (unit, f"p{j}") for j in range(len(self.shapes[number]))}
        tied = {f"t{n}": (f"u{u}", f"p{p}") for n, u, p in self.ties if n == number}
        return {**own, **tied}

    def gradient(self, unit, name, shape, *numbers):
        """Of one rank, in one use of a unit, at most 1; None if it is not written."""
        place = int(unit[1:]), int(name[1:]) + 100 * (name[0] == "t"), *numbers
        rng = np.random.default_rng((self.seed, *place))
        if self.missing and rng.integers(self.missing) == 0:
            return None
        owner = self.owners(unit)[name][0]
        return (rng.integers(-8, 9, shape) / 8).astype(self.dtypes[int(owner[1:])])


@st.composite
def programs(draw):
    world_size = draw(st.integers(1, 6))
    shapes = tuple(draw(st.lists(UNIT, min_size=1, max_size=4)))
    dtypes = st.sampled_from(["float32", "float64"])
    deferred = draw(st.booleans())
    every = range(len(shapes))
    passes = st.lists(st.sampled_from(every), min_size=1, max_size=5).map(tuple)
    steps = [draw(st.lists(passes, min_size=1, max_size=3)) for _ in range(2)]
    if deferred or draw(st.booleans()):  # as usual: all units, in order, in each pass
        steps = [[*early[:-1], tuple(every)] for early in steps]
    places = [(n, u, p) for n in every for u in every for p in range(len(shapes[u])) if u != n]
    ties = draw(st.lists(st.sampled_from(places), max_size=2)) if places else []
    return Program(
        world_size=world_size,
        strategy=draw(st.sampled_from(list(strategies(world_size, bits=False)))),
        shapes=shapes,
        frozen=tuple(draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))),
        ties=tuple({tie[0]: tie for tie in ties}.values()),
        dtypes=tuple(draw(st.lists(dtypes, min_size=len(shapes), max_size=len(shapes)))),
        steps=tuple(map(tuple, steps)),
        deferred=deferred,
        prefetch=draw(AHEAD),
        window=draw(st.booleans()),
        divisor=draw(st.sampled_from([None, 1, 7, 0.5])),
        clip=draw(CLIPPING),
        scale=draw(st.sampled_from([None, 1024.0])),
        missing=draw(st.sampled_from([0, 3])),
        seed=draw(st.integers(0, 2**16)),
    )


def engine_of(backend, program):
    units = []
    for name, params in program.params().items():
        ties = {t: fc.Tied(*o) for t, o in program.owners(name).items() if t not in params}
        units.append(fc.Unit(name, {**params, **ties}, frozen=program.frozen_of(name)))
    return fc.FSDP(
        units,
        backend,
        strategy=program.strategy,
        optimizer=fc.optim.SGD(lr=LR, momentum=MOMENTUM),
        precision=fc.Precision(loss_scale=program.scale),
        prefetch=program.prefetch,
        window=program.window,
    )


def train(backend, program):
    """Of each step the shards of reduced gradients and the norm; all parameters in the end."""
    engine = engine_of(backend, program)
    steps = []
    for number, passes in enumerate(program.steps):
        with engine.step(divisor=program.divisor) as step:
            for part, through in enumerate(passes):
                early = program.deferred and part < len(passes) - 1
                with step.no_sync() if early else nullcontext():
                    go_through(program, step, through, number, part, backend.rank)
            shards = {
                unit.name: (unit.shard_rank, unit.grad_shard[: unit.valid_size] / engine.loss_scale)
                for unit in engine.units
                if unit.grad_shard is not None
            }
            steps.append((shards, step.update(**program.clip)))
    assert engine.held().buffers == 0
    with engine.full_params() as params:
        return steps, {name: array.copy() for name, array in params.items()}


def go_through(program, step, through, *numbers):
    for unit in through:
        with step.forward(f"u{unit}"):
            pass
    for use, unit in reversed(list(enumerate(through))):
        with step.backward(f"u{unit}") as (params, grads):
            for name, array in params.items():
                value = program.gradient(f"u{unit}", name, array.shape, *numbers, use)
                if name in grads and value is not None:
                    grads[name] = value * value.dtype.type(program.scale or 1)


def gradients(program, params, number):
    """Of a step, in float64: summed over the ranks, passes and uses, and divided."""
    totals = {
        (unit, name): np.zeros(array.shape)
        for unit, arrays in params.items()
        for name, array in arrays.items()
        if name not in program.frozen_of(unit)
    }
    for part, through in enumerate(program.steps[number]):
        for rank in range(program.world_size):
            for use, unit in enumerate(through):
                for name, (owner, param) in program.owners(f"u{unit}").items():
                    shape = params[owner][param].shape
                    value = program.gradient(f"u{unit}", name, shape, number, part, rank, use)
                    if value is not None and (owner, param) in totals:
                        totals[owner, param] += value
    divisor = program.world_size if program.divisor is None else program.divisor
    return {place: total / divisor for place, total in totals.items()}


def unsharded(program):
    """The same as ``train`` in float64 on one rank."""
    params = {u: {n: a.astype(float) for n, a in p.items()} for u, p in program.params().items()}
    buffers = {u: {n: np.zeros(a.shape) for n, a in p.items()} for u, p in params.items()}
    steps = []
    for number in range(len(program.steps)):
        grads, norm, scale = gradients(program, params, number), None, 1.0
        if "clip" in program.clip:
            norm = norm_of(grads.values(), program.clip["norm_type"])
            scale = min(1.0, program.clip["clip"] / norm) if norm else 1.0
        limit = program.clip.get("clip_value", math.inf)
        steps.append((grads, norm))
        for (unit, name), grad in grads.items():
            buffer = buffers[unit][name]
            buffer[...] = MOMENTUM * buffer + np.clip(grad, -limit, limit) * scale
            params[unit][name][...] -= LR * buffer
    named = [(u, n, o) for u in params for n, o in program.owners(u).items()]
    return steps, {f"{unit}.{name}": params[o][p] for unit, name, (o, p) in named}


def norm_of(arrays, kind):
    values = np.abs(np.concatenate([np.zeros(1), *(array.reshape(-1) for array in arrays)]))
    if kind == math.inf:
        return float(values.max())
    return float((values**kind).sum() ** (1 / kind))


def tolerances(program):
    """By dtype, how far an element of a gradient may be off; and a norm."""
    uses = program.world_size * max(sum(map(len, passes)) for passes in program.steps)
    largest = max(1.0, uses / (program.divisor or program.world_size))
    near = {name: 8 * float(np.finfo(name).eps) * largest for name in ("float32", "float64")}
    # Norms are rounded to float32, so that they are the same in every strategy.
    elements = sum(a.size for arrays in program.params().values() for a in arrays.values())
    return near, near["float32"] * (elements + 1)


@given(programs())
@settings(max_examples=30, deadline=None)
def test_training_is_that_of_one_rank(program):
    ranks = fc.launch(
        train, world_size=program.world_size, transport="sim", args=(program,), timeout=30
    )
    (wanted_steps, wanted) = unsharded(program)
    near, near_norm = tolerances(program)
    for number, (grads, norm) in enumerate(wanted_steps):
        norms = [steps[number][1] for steps, _ in ranks]
        assert norms == norms[:1] * len(norms)  # to the bit
        assert (norms[0] is None) == (norm is None)
        if norm is not None:
            assert_allclose(norms[0], norm, rtol=0, atol=near_norm)
        if not program.ties:  # whose gradients wait for the update
            check_shards(program, [steps[number][0] for steps, _ in ranks], grads, near)
    for _, params in ranks:
        assert set(params) == set(wanted)
        for name, array in params.items():
            limit = 4 * near[array.dtype.name] + ("clip" in program.clip) * near_norm
            assert_allclose(array, wanted[name], rtol=0, atol=limit, err_msg=name)
            assert_array_equal(array, ranks[0][1][name])


def check_shards(program, ranks, grads, near):
    """Compare the shards of reduced gradients of all ranks, by unit, with whole gradients."""
    shards = program.strategy.place(program.world_size).shards
    for unit in program.params():
        flat = [array.reshape(-1) for (u, _), array in grads.items() if u == unit]
        for first in range(0, len(ranks), shards):  # each replica has all of it
            found = [rank[unit] for rank in ranks[first : first + shards] if unit in rank]
            if not (flat and found):  # nothing is trained, or was used
                assert not any(array.any() for array in flat)
                continue
            assert [place for place, _ in found] == list(range(shards))
            joined = np.concatenate([part for _, part in found])
            assert joined.dtype == program.dtypes[int(unit[1:])]
            limit = near[joined.dtype.name]
            assert_allclose(joined, np.concatenate(flat), rtol=0, atol=limit)


EVERY = [fc.Strategy("hybrid_shard", True, 2), *(s for s in strategies(4) if s.name[0] != "h")]


@pytest.mark.parametrize("divisor", [None, 1, 4, 10.0])
def test_a_divisor_means_the_same_in_every_strategy(divisor):
    """The sum over ranks and microbatches, divided by it; the mean over ranks by default."""
    program = Program(
        4, EVERY[0], (((5, 3), (2,)),), (False,), (), ("float32",), (((0,),) * 3,), False, 1, True,
        divisor, {"clip": 1e9, "norm_type": 2}, None, 0, 5,
    )  # fmt: skip
    results = []
    for strategy in EVERY:
        for deferred in (False, True):
            variant = dataclasses.replace(program, strategy=strategy, deferred=deferred)
            ranks = fc.launch(train, world_size=4, transport="sim", args=(variant,), timeout=30)
            results.append((deferred, ranks[0][0][0][1], ranks[0][1]))
    for first in results[:2]:
        for other in (each for each in results if each[0] == first[0]):
            assert other[1] == first[1]
            for name, array in other[2].items():
                assert_array_equal(array, first[2][name])
    ((_, norm),) = unsharded(program)[0]
    assert_allclose([found for _, found, _ in results], norm, rtol=2e-6)
