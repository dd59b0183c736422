"""Whatever the dtypes, sizes and strategy: the bits of a loop without ranks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support import oracle
from support.fsdp_steps import is_clean, launch, one_pass, values_of

import fsdpcore as fc

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16, FLOAT32, FLOAT64 = map(np.dtype, (np.float16, np.float32, np.float64))
LR = 2.0**-5  # so that gradients times it are exact
SCALE = 8.0

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
units = st.lists(st.lists(shapes, min_size=1, max_size=3), min_size=1, max_size=3)


@st.composite
def programs(draw):
    master = draw(st.sampled_from([FLOAT32, FLOAT64]))
    param = draw(st.sampled_from([FLOAT16, BFLOAT16, FLOAT32, master]))
    reduce = draw(st.sampled_from([FLOAT16, BFLOAT16, FLOAT32, master]))
    world = draw(st.sampled_from([1, 2, 3, 4, 6]))
    strategies = [fc.Strategy(), fc.Strategy("full_shard", False), fc.Strategy("no_shard")]
    strategies += [fc.Strategy("shard_grad_op"), fc.Strategy("shard_optimizer")]
    if world % 2 == 0:
        strategies.append(fc.Strategy("full_shard", 2))
        if reduce.itemsize > 2:  # or else it rounds once for each group
            strategies.append(fc.Strategy("hybrid_shard", shard_group_size=2))
    return {
        "shapes": draw(units),
        "precision": fc.Precision(param, reduce, draw(st.sampled_from([None, SCALE]))),
        "master": master,
        "world": world,
        "strategy": draw(st.sampled_from(strategies)),
        "window": draw(st.booleans()),
        "prefetch": draw(st.sampled_from([0, 2, fc.Prefetch(1, reductions=1)])),
        "microbatches": draw(st.integers(1, 2)),
    }


def initial(program):
    rng = np.random.default_rng(0)
    return [
        {f"p{n}": rng.normal(size=shape).astype(program["master"]) for n, shape in enumerate(named)}
        for named in program["shapes"]
    ]


def noise(rank, step, part, shape):
    """Some factors that 16 bits have exactly."""
    return np.random.default_rng((rank, step, part)).integers(-3, 4, shape) / 4


def gradient(params, rank, step, part, scale, dtype):
    value = params.astype(FLOAT64) * noise(rank, step, part, params.shape) * scale
    return value.astype(dtype)


def by_engine(backend, program):
    made = [fc.Unit(f"u{i}", named) for i, named in enumerate(initial(program))]
    engine = fc.FSDP(
        made,
        backend,
        strategy=program["strategy"],
        precision=program["precision"],
        window=program["window"],
        prefetch=program["prefetch"],
        optimizer=fc.optim.SGD(lr=LR),
    )
    for number in range(2):
        with engine.step() as step:
            for part in range(program["microbatches"]):

                def give(unit, params, grads, number=number, part=part):
                    for name, array in params.items():
                        dtype = grads[name].dtype
                        scale = engine.loss_scale
                        grads[name] = gradient(array, backend.rank, number, part, scale, dtype)

                one_pass(step, engine.units, give)
            step.update()
        assert not step.skipped
    assert is_clean(engine)
    masters = [unit.shard[: unit.valid_size] for unit in engine.units]
    return values_of(engine), masters, engine.units[0].shard_rank


def by_loop(program):
    """Master parameters and what is gathered, in the end."""
    precision, master = program["precision"], initial(program)
    param, reduce = np.dtype(precision.param_dtype), np.dtype(precision.reduce_dtype)
    scale = SCALE if precision.loss_scale else 1.0
    for number in range(2):
        for named in master:
            for name, value in named.items():
                seen, total = value.astype(param), None
                for part in range(program["microbatches"]):
                    ranks = range(program["world"])
                    grads = [gradient(seen, r, number, part, scale, reduce) for r in ranks]
                    mean = oracle.reduced(grads, "mean")
                    total = mean if total is None else total + mean
                named[name] = value - total.astype(value.dtype) * value.dtype.type(LR / scale)
    return master, [{n: a.astype(param) for n, a in named.items()} for named in master]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_training_gives_the_bits_of_a_loop_without_ranks(program):
    precision = program["precision"]
    wider = max(np.dtype(d).itemsize for d in (precision.param_dtype, precision.reduce_dtype))
    assert wider <= program["master"].itemsize
    results = launch(lambda backend: by_engine(backend, program), program["world"])
    masters, gathered = by_loop(program)
    for values, _, _ in results:
        for number, named in enumerate(gathered):
            for name, array in named.items():
                got = values[f"u{number}"][name]
                assert got.dtype == array.dtype
                assert_array_equal(got, array)
    shards = {rank: shard for _, shard, rank in results}
    for number, named in enumerate(masters):
        whole = np.concatenate([shards[rank][number] for rank in sorted(shards)])
        assert_array_equal(whole, np.concatenate([a.reshape(-1) for a in named.values()]))
