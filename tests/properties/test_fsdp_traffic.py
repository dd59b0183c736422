"""Bytes that a step sends and holds, counted by the transport, against formulas and the plan."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
from support.counting import CountingSim
from support.fsdp_models import named, strategies
from support.spmd import run_on

import fsdpcore as fc
from fsdpcore.collectives import context
from fsdpcore.comm.backend import Backend
from fsdpcore.core import device
from fsdpcore.fsdp.plan.make_plan import make_plan

EVEN = {"a": (48, 2), "b": (24,), "c": (24, 7), "d": (72,)}  # each divides by up to 24
EQUAL = dict.fromkeys("abcdef", (50, 10))
# 1, 3, 35, none: less than one element for each rank, or nothing at all.
ODD = {"a": (5, 7), "b": (), "c": (3,), "d": (0, 4), "e": (301,)}
UNEQUAL = {"a": (64, 5), "b": (1000,), "c": (333, 3), "d": (17,), "e": (700,)}
AGREED = 120  # bytes per rank of the agreement on the update, see agreement.py


@pytest.fixture(autouse=True)
def _no_meetings(monkeypatch):
    """Ranks meet in some calls, so that none runs away: that is not to be counted here."""
    monkeypatch.setattr(context, "FREE_CALLS", 10**9)


_here = threading.local()


class AllocatingSim(CountingSim):
    """Counts the bytes of arrays that this rank has allocated, in any group, and not let go."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lock = threading.Lock()
        self.alive = self.most_alive = 0

    def count(self, nbytes):
        with self.lock:
            self.alive += nbytes
            self.most_alive = max(self.alive, self.most_alive)


def alive(root, array):
    root.count(array.nbytes)
    weakref.finalize(array, root.count, -array.nbytes)
    return array


def counting_empty(self, shape, dtype=np.float32):
    return alive(self.root, np.empty(shape, dtype))


def counting_zeros(size, dtype):
    return alive(_here.root, np.zeros(size, dtype))


@pytest.fixture
def _counting(monkeypatch):
    monkeypatch.setattr(Backend, "empty", counting_empty)
    monkeypatch.setattr(device, "lined_up_zeros", counting_zeros)  # of this thread's rank


def engine_of(backend, shapes, strategy, **options):
    _here.root = backend.root
    options = {"window": False, "optimizer": fc.optim.AdamW(), **options}
    return fc.FSDP(units_of(shapes), backend, strategy=strategy, **options)


def units_of(shapes):
    return [fc.Unit(name, {"w": fc.Spec(shape)}) for name, shape in shapes.items()]


def one_step(engine, microbatches=1, deferred=False, clip=None):
    with engine.step() as step:
        for number in range(microbatches):
            early = deferred and number < microbatches - 1
            with step.no_sync() if early else nullcontext():
                for unit in engine.units:
                    with step.forward(unit):
                        pass
                for unit in reversed(engine.units):
                    with step.backward(unit) as (params, grads):
                        for name in params:
                            if name in grads:
                                grads.empty(name)[...] = 1
                        del params, grads  # which hold on to memory that is given back now
        step.update(clip=clip)


def sent_by(backend, shapes, strategy, microbatches, deferred, options):
    """Bytes that a rank sends in its second step, and what the engine says of that."""
    engine = engine_of(backend, shapes, strategy, **options)
    one_step(engine, microbatches, deferred)
    before = sum(backend.sent)
    one_step(engine, microbatches, deferred, clip=1.0)
    return sum(backend.sent) - before, engine.stats.bytes_sent


def counted(backend, shapes, *args):
    """Bytes of data, those that ranks exchange to agree, and the engine's own count of data.

    A model of the same units without any element has the same collectives, but no data.
    """
    control, _ = sent_by(backend, dict.fromkeys(shapes, 0), *args)
    sent, told = sent_by(backend, shapes, *args)
    return sent - control, control, told - AGREED * (backend.world_size - 1)


def factor(strategy, ranks, microbatches, deferred):
    """The notes' elements sent by each rank and step, as multiples of those of a unit."""
    a, r = microbatches, 1 if deferred else microbatches
    if strategy.name == "no_shard":
        return 2 * r * _others(ranks)
    if strategy.name == "shard_grad_op":
        return (1 + r) * _others(ranks)
    if strategy.name == "shard_optimizer":
        return (1 + 2 * r) * _others(ranks)
    f = strategy.shard_group_size or ranks
    after = strategy.reshard_after_forward
    backward = 0 if after is False else _others(f if after is True else after)
    outer = Fraction(2, f) * (1 - Fraction(f, ranks))
    return a * _others(f) + a * backward + r * _others(f) + r * outer


def _others(ranks):
    return 1 - Fraction(1, ranks)


STEPS = [(1, False), (4, False), (4, True)]
# Three ranks go through all strategies, six through those with groups that three do not have.
EVERY = [
    *((3, s) for s in strategies(3, bits=False)),
    *(
        (6, s)
        for s in strategies(6, bits=False)
        if {2, 3} & {s.reshard_after_forward, s.shard_group_size}
    ),
]
NAMES = [f"{p}-{named(s)}" for p, s in EVERY]


@pytest.mark.parametrize(("world_size", "strategy"), EVERY, ids=NAMES)
def test_a_step_sends_what_the_formulas_say(world_size, strategy):
    """To the byte, on every rank: gradients in each microbatch, or in the last one."""
    size = sum(int(np.prod(shape)) for shape in EVEN.values())
    for number, (microbatches, deferred) in enumerate(STEPS):
        if world_size == 6 and number != EVERY.index((world_size, strategy)) % 3:
            continue  # three ranks go through all of them
        options = {"algorithm": ("direct", "ring")[number % 2], "prefetch": number}
        args = (EVEN, strategy, microbatches, deferred, options)
        found = run_on(CountingSim, counted, world_size=world_size, args=args, shm="off")
        data = 4 * size * factor(strategy, world_size, microbatches, deferred)
        assert found == [(data, AGREED * (world_size - 1), data)] * world_size
        for rank in range(world_size):
            plan = make_plan(
                units_of(EVEN),
                world_size,
                strategy=strategy,
                prefetch=number,
                microbatches=microbatches,
                sync="last" if deferred else "each",
                rank=rank,
            )
            assert plan.bytes_sent == data + AGREED * (world_size - 1)


@pytest.mark.parametrize(("world_size", "strategy"), EVERY[::2], ids=NAMES[::2])
def test_sizes_that_do_not_divide_cost_no_more_than_the_padding_that_is_named(world_size, strategy):
    def body(backend):
        engine = engine_of(backend, ODD, strategy)
        assert [u.layout.size for u in engine.units] == [35, 1, 3, 0, 301]
        padding = [u.layout.padding for u in engine.units]
        return counted(backend, ODD, strategy, 2, False, {"algorithm": "direct"})[0], padding

    ranks = run_on(CountingSim, body, world_size=world_size, shm="off")
    sent, (padding, *_) = sum(data for data, _ in ranks), [names for _, names in ranks]
    shards = strategy.place(world_size).shards
    assert padding == [-size % shards for size in (35, 1, 3, 0, 301)]
    elements = 35 + 1 + 3 + 301 + sum(padding)
    # All ranks together: where shards are reduced over replicas, some have an element more.
    assert sent == 4 * elements * factor(strategy, world_size, 2, False) * world_size


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
def test_narrow_dtypes_and_frozen_parameters_send_less(strategy):
    """float16 parameters, of which half are frozen, and float32 gradients of the others."""

    def body(backend):
        totals = []
        for size in (0, 240):
            params = {"w": fc.Spec(size), "f": fc.Spec(size)}
            engine = fc.FSDP(
                [fc.Unit("u", params, frozen="f"), fc.Unit("v", {"w": fc.Spec(size)})],
                backend,
                strategy=strategy,
                optimizer=fc.optim.AdamW(),
                precision=fc.Precision(param_dtype=np.float16, reduce_dtype=np.float32),
                algorithm="direct",
                window=False,
            )
            one_step(engine)
            before = sum(backend.sent)
            one_step(engine)
            totals.append(sum(backend.sent) - before)
        return totals[1] - totals[0]

    trained, frozen = 2 * 240, 240
    elements = {  # gathered in two bytes, and reduced in four
        "full_shard": 2 * 2 * (trained + frozen) + 4 * trained,
        "shard_grad_op": 2 * trained + 4 * trained,
        "shard_optimizer": 2 * trained + 2 * 4 * trained,
        "no_shard": 2 * 4 * trained,
    }
    found = run_on(CountingSim, body, world_size=4, shm="off")
    assert found == [elements[strategy] * 3 / 4] * 4


# Memory.

MODELS = {"equal": EQUAL, "unequal": UNEQUAL}
PASSES = [(1, False), (2, False), (3, True)]


def peaks(backend, shapes, strategy, ahead, microbatches, deferred):
    """Of the third step: allocated at most, gathered at most, and held in the end."""
    before = backend.alive
    engine = engine_of(backend, shapes, strategy, prefetch=ahead)
    for _ in range(2):
        one_step(engine, microbatches, deferred)
    backend.most_alive = backend.alive
    one_step(engine, microbatches, deferred)
    return backend.most_alive - before, engine.gathered_peak, engine.held()


def far_from_the_plan(world_size, shapes, prefetch, reductions, chosen):
    """Strategies whose peaks are more than two percent off, and by what."""
    found = []
    for number, strategy in enumerate(chosen):
        microbatches, deferred = PASSES[(number + prefetch) % 3]
        ahead = fc.Prefetch(prefetch, reductions=reductions)
        args = (shapes, strategy, ahead, microbatches, deferred)
        ranks = run_on(AllocatingSim, peaks, world_size=world_size, args=args, shm="off")
        for rank, (allocated, gathered, held) in enumerate(ranks):
            plan = make_plan(
                units_of(shapes),
                world_size,
                strategy=strategy,
                prefetch=prefetch,
                overlap=bool(reductions),
                microbatches=microbatches,
                sync="last" if deferred else "each",
                rank=rank,
            )
            told = plan.persistent
            between = held.parameters, held.gradients, held.optimizer
            assert between == (told.parameters, told.gradients, told.optimizer)
            pairs = (gathered, plan.peak_live_bytes), (allocated, plan.peak_bytes)
            if any(abs(real - planned) > 0.02 * planned for real, planned in pairs):
                found.append((named(strategy), microbatches, deferred, rank, pairs))
    return found


def keeps_a_part(strategy, world_size):
    """After the forward pass a larger part than the own shard stays."""
    place = strategy.place(world_size)
    return place.regather < place.shards


@pytest.mark.usefixtures("_counting")
@pytest.mark.parametrize(("prefetch", "reductions"), [(0, 0), (1, 1)])
def test_the_peak_is_within_two_percent_of_the_plan(prefetch, reductions):
    chosen = [s for s in strategies(4) if not keeps_a_part(s, 4)]
    assert not far_from_the_plan(4, EQUAL, prefetch, reductions, chosen)


@pytest.mark.usefixtures("_counting")
@pytest.mark.campaign
@pytest.mark.parametrize("reductions", [0, 1])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_so_it_is_with_other_prefetches(prefetch, reductions):
    chosen = [s for s in strategies(4) if not keeps_a_part(s, 4)]
    assert not far_from_the_plan(4, EQUAL, prefetch, reductions, chosen)


@pytest.mark.usefixtures("_counting")
@pytest.mark.parametrize(("model", "prefetch"), [("equal", 1), ("unequal", 3)])
def test_the_peak_of_buffers_of_different_sizes_is_too(model, prefetch):
    chosen = [s for s in strategies(4) if model == "unequal" or keeps_a_part(s, 4)]
    wrong = far_from_the_plan(4, MODELS[model], prefetch, 1, chosen)
    assert not wrong


@pytest.mark.usefixtures("_counting")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_eight_ranks_hold_an_eighth_of_everything_and_the_units_in_use(prefetch):
    """At most 16 bytes for each parameter over 8 ranks, the live units, and padding."""
    shapes = dict.fromkeys("abcdef", (41, 13))
    unit, padding = 4 * 41 * 13, 4 * 7
    args = (shapes, "full_shard", fc.Prefetch(prefetch, reductions=1), 1, False)
    ranks = run_on(AllocatingSim, peaks, world_size=8, args=args, shm="off")
    live = prefetch + 1 + 2  # parameters; gradients that are written, and that are reduced
    for allocated, *_ in ranks:
        assert allocated <= 6 * (4 * unit + 2 * padding) / 8 + live * (unit + padding)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_what_is_quantised_sends_the_bytes_of_the_formula(strategy):
    """4 ranks, 8192 elements each of a unit, in blocks of 64 with a scale of 4 bytes."""
    packed = 8192 // 64 * (4 + 32)
    moves = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 2}[strategy]

    def body(backend):
        shapes = dict.fromkeys("ab", (128, 256))
        int4 = fc.Compression("int4", "int4")
        engine = engine_of(backend, shapes, strategy, compression=int4, algorithm="direct")
        counts = []
        for _ in range(3):
            before = sum(backend.sent)
            one_step(engine)
            counts.append(sum(backend.sent) - before)
        assert counts[-1] == engine.stats.bytes_sent == engine.plan().bytes_sent
        return counts[-1] - AGREED * 3

    assert run_on(CountingSim, body, world_size=4, shm="off") == [2 * moves * 3 * packed] * 4


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_quantised_gradients_of_unequal_chunks_are_counted(strategy):
    def body(backend):
        int4 = fc.Compression(None, "int4", block=8)  # 35 elements: 2, 2, 2 and 1 blocks
        options = {"compression": int4, "algorithm": "direct"}
        engine = engine_of(backend, {"a": (5, 7)}, strategy, **options)
        one_step(engine)
        before = sum(backend.sent)
        one_step(engine)
        assert sum(backend.sent) - before == engine.stats.bytes_sent

    run_on(CountingSim, body, world_size=4, shm="off")


def test_what_ranks_send_as_it_is_at_first_is_counted():
    def body(backend):
        options = {"compression": fc.Compression("int4", "int4"), "algorithm": "direct"}
        engine = engine_of(backend, {"a": (128, 256)}, "shard_grad_op", **options)
        for _ in range(2):
            before = sum(backend.sent)
            one_step(engine)
            assert 0 <= sum(backend.sent) - before - engine.stats.bytes_sent < 200  # to agree

    run_on(CountingSim, body, world_size=4, shm="off")


@pytest.mark.parametrize("compression", [None, fc.Compression(None, "int4")])
def test_an_outer_step_sends_what_it_says(compression):
    def body(backend):
        mesh = fc.Mesh(backend, {"group": 2, "shard": 2})
        engine = engine_of(mesh["shard"], {"a": (128, 256)}, "full_shard")
        outer = fc.OuterStep(engine, mesh["group"], every=1, compression=compression)
        before = sum(backend.sent)
        outer.step()
        assert 0 <= sum(backend.sent) - before - outer.sends < 200  # to agree

    run_on(CountingSim, body, world_size=4, shm="off")
