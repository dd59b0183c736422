"""Boxes of parameters on GPUs, by the stand-in: what the host computes, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.fsdp_device import bits, needs_compiler, on_gpus, on_host
from support.fsdp_tensor import Grid, Model, engine_on, train

import fsdpcore as fc

pytestmark = needs_compiler

CUBE = Grid(tensor=2, shard=2, replicate=1)
OPTIMIZERS = {"adamw": fc.optim.AdamW(lr=0.05), "adafactor": fc.optim.Adafactor(beta1=0.5)}


def body(backend, optimizer):
    model = Model(dtype=np.float32)
    engine = engine_on(CUBE, backend, model, optimizer=OPTIMIZERS[optimizer])
    norms = train(engine, model, range(2), clip=1.0)
    one = engine.state_dict(full=True, to=1)
    fresh = engine_on(CUBE, backend, model, optimizer=OPTIMIZERS[optimizer])
    fresh.load_state_dict(one if one else None, src=1)
    with fresh.full_params(write=True, names="a.*") as params:
        assert all(fresh.device.owns(array) for array in params.values())
        params["a.w"][...] *= 2
    with fresh.full_params() as params:
        shapes = {name: array.shape for name, array in params.items()}
    assert shapes == {name: array.shape for name, array in model.params.items()}
    report = engine.report()
    assert report.plan.bytes_sent == report.measured.bytes_sent
    state = fresh.state_dict(full=True)
    assert all(type(array) is np.ndarray for array in state.values())
    return norms, bits(state), bits(one)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_training_and_states_are_those_of_the_host(optimizer):
    here, there = on_host(body, CUBE.ranks, optimizer), on_gpus(body, CUBE.ranks, optimizer)
    for found, expected in zip(there, here, strict=True):
        (norms, state, one), (host_norms, host_state, host_one) = found, expected
        np.testing.assert_allclose(norms, host_norms, rtol=1e-6)
        assert state == host_state
        assert one == host_one
