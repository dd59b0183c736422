"""A checkpoint of any engine, loaded into any other: the bits are those of whole arrays."""

from __future__ import annotations

import tempfile

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fsdp_random import OPTIMIZERS, layouts, made, models, take_a_step
from support.spmd import run

import fsdpcore as fc

QUICK = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


def save(backend, path, model, layout, optimizer, dtype):
    engine = made(backend, model, layout, optimizer, dtype, 0)
    take_a_step(engine)
    fc.checkpoint.save(path, engine, backend, extra={"position": [1, 2]})
    return engine.state_dict(full=True)  # gathered by collectives: nothing of checkpoints in it


def load(backend, path, model, layout, optimizer, dtype, cast):
    engine = made(backend, model, layout, optimizer, dtype, 1)
    loaded = fc.checkpoint.load(path, engine, backend, cast=cast)
    assert (loaded.step, loaded.extra, engine.steps) == (1, {"position": [1, 2]}, 1)
    assert (loaded.missing, loaded.unexpected, loaded.uncovered) == ((), (), ())
    assert not engine.partially_updated
    with engine.full_params() as params:  # and what is gathered has the new values, too
        for name, array in params.items():
            whole = engine.state_dict().arrays[name]
            assert array.shape == whole.shape
    return engine.state_dict(full=True), loaded.bytes_read, loaded.bytes_needed


def run_on_threads(body, layout, args):
    return run(body, transport="sim", world_size=layout.world_size, args=args)


@QUICK
@given(
    model=models(),
    one=layouts(),
    other=layouts(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_what_any_engine_saves_any_other_loads(model, one, other, optimizer, dtype):
    with tempfile.TemporaryDirectory() as path:
        states = run_on_threads(save, one, (path, model, one, optimizer, dtype))
        # Frozen parameters have the dtype of the computation.
        cast = one.half != other.half
        results = run_on_threads(load, other, (path, model, other, optimizer, dtype, cast))
        arrays = fc.checkpoint.read(path)
    expected = states[0]
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].tobytes() == array.tobytes(), name
    for state, _, _ in results:
        assert state.keys() == expected.keys()
        for name, array in expected.items():
            assert state[name].shape == array.shape
            assert cast or state[name].dtype == array.dtype
            assert state[name].tobytes() == array.astype(state[name].dtype).tobytes(), name
    read, needed = (sum(result[place] for result in results) for place in (1, 2))
    assert read <= 1.02 * needed
