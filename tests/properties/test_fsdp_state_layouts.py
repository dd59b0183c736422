"""State from any engine into any other: strategies, numbers of ranks, dtypes, shapes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.fsdp_random import OPTIMIZERS, layouts, made, models, take_a_step
from support.fsdp_states import Layout, assembled, copied, engine_of, train
from support.spmd import run as run_anywhere

import fsdpcore as fc
from fsdpcore.fsdp.state.state import EngineState

QUICK = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


def save(backend, model, layout, optimizer, dtype, to):
    engine = made(backend, model, layout, optimizer, dtype, 0)
    take_a_step(engine)
    to = min(to, backend.world_size - 1)
    return (
        copied(engine.state_dict()),
        engine.state_dict(full=True),
        engine.state_dict(full=True, to=to),
    )


def load(backend, model, layout, optimizer, dtype, state, src):
    engine = made(backend, model, layout, optimizer, dtype, 1)
    src = None if src is None else min(src, backend.world_size - 1)
    engine.load_state_dict(state if src in (None, backend.rank) else None, src=src)
    with engine.full_params() as params:
        shown = {name: array.copy() for name, array in params.items()}
    return copied(engine.state_dict()), shown


@QUICK
@given(
    model=models(),
    before=layouts(),
    after=layouts(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([np.float32, np.float64]),
    to=st.integers(0, 4),
    src=st.none() | st.integers(0, 4),
)
def test_what_any_engine_saves_any_other_loads(model, before, after, optimizer, dtype, to, src):
    def run(body, layout, *more):
        args = (model, layout, optimizer, dtype, *more)
        return fc.launch(body, world_size=layout.world_size, transport="sim", args=args, timeout=30)

    shards, everywhere, there = zip(*run(save, before, to), strict=True)
    whole = assembled(shards)
    assert [len(state) for state in there] == [
        len(whole) if rank == min(to, before.world_size - 1) else 0
        for rank in range(before.world_size)
    ]
    for state in (*everywhere, there[min(to, before.world_size - 1)]):
        equal(state, whole)
    reloaded, shown = zip(*run(load, after, EngineState(whole, shards[0].info), src), strict=True)
    equal(assembled(reloaded), as_held(whole, before, after, dtype))
    for params in shown:
        names = [name for name in whole if not name.startswith("optimizer/")]
        equal(params, {name: assembled(reloaded)[name] for name in names})
    assert {state.info["step"] for state in reloaded} == {1}


def as_held(whole, before, after, dtype):
    """Frozen parameters of the trained ones' dtype are kept as they are computed with."""
    held = {}
    for name, array in whole.items():
        frozen = ".f" in name and not name.startswith("optimizer/")
        same = frozen and array.dtype in (dtype, ml_dtypes.bfloat16)
        held[name] = array
        if same and before.half != after.half and array.dtype != ml_dtypes.bfloat16:
            held[name] = array.astype(ml_dtypes.bfloat16)
    return held


def equal(one, other):
    assert set(one) == set(other)
    for name, array in one.items():
        assert array.shape == other[name].shape, name
        assert_array_equal(array.astype(np.float64), other[name].astype(np.float64), err_msg=name)


def body_anywhere(backend, optimizer):
    layout = Layout(backend.world_size, window=bool(backend.world_size % 2))
    engine = engine_of(backend, layout, optimizer)
    train(engine, 2)
    last = backend.world_size - 1
    state = engine.state_dict(full=True, to=last)
    other = engine_of(backend, layout._replace(strategy="no_shard"), optimizer, seed=1)
    other.load_state_dict(state, src=last)
    again = engine_of(backend, layout, optimizer, seed=2)
    again.load_state_dict(engine.state_dict())
    with other.full_params(write=True) as params:
        params["block.w"] += 0
    results = []
    for each in (engine, other, again):
        train(each, 1)
        results.append(each.state_dict(full=True))
    return [{name: array.tobytes() for name, array in result.items()} for result in results]


@pytest.mark.parametrize(
    ("transport", "options"),
    [("sim", {"hosts": 2}), ("zmq", {}), ("zmq", {"shm": "off"}), ("mpi", {})],
)
@pytest.mark.parametrize("world_size", [3])
def test_on_every_transport(transport, options, world_size):
    results = run_anywhere(
        body_anywhere, transport=transport, world_size=world_size, args=("adamw",), **options
    )
    first = results[0][0]
    assert all(each == first for result in results for each in result)
