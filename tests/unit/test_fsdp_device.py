"""Training on GPUs gives the bits of training on the host, whatever the engine is told to do.

The GPUs are the stand-in's. It delays work at random, hands memory out again at once, and finds
every pair of accesses that nothing orders; at the end of a job it raises for them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from support.fsdp_device import (
    Way,
    bits,
    engine_of,
    needs_compiler,
    on_gpus,
    on_host,
    one_pass,
    trained,
)

import fsdpcore as fc

pytestmark = needs_compiler

FULL = fc.Strategy("full_shard")
STAYS = fc.Strategy("full_shard", reshard_after_forward=False)
NEAR = fc.Strategy("full_shard", reshard_after_forward=2)
GRADS = fc.Strategy("shard_grad_op")
NONE = fc.Strategy("no_shard")
HYBRID = fc.Strategy("hybrid_shard", shard_group_size=2)
HYBRID_STAYS = fc.Strategy("hybrid_shard", reshard_after_forward=False, shard_group_size=2)
ALONE = fc.Strategy("hybrid_shard", shard_group_size=1)

WAYS = [
    Way(1, FULL, clip=0.5),
    Way(2, FULL, precision="fp16", parts=2),
    Way(2, STAYS, prefetch=2, optimizer="sgd", clip_value=0.01),
    Way(2, GRADS, prefetch=0, optimizer="adafactor"),
    Way(2, GRADS, precision="bf16 reduced", parts=2, deferred=True),
    Way(2, NONE, window=False, optimizer="two", divisor=3.0),
    Way(3, GRADS, clip=0.5, optimizer="muon"),
    Way(4, FULL, prefetch=fc.Prefetch(1, reductions=0), offload="all", parts=2),
    Way(4, NEAR, prefetch=2, optimizer="adafactor"),
    Way(4, HYBRID, parts=2, offload="all", clip=0.5, optimizer="muon"),
    Way(2, FULL, precision="fp16", parts=2, offload="all", whole=True),
    Way(4, HYBRID, parts=2, deferred=True, prefetch=2, whole=True),
    Way(2, FULL, prefetch=2, clip=0.5, compression=fc.Compression("int8", "int4", keep=True)),
    Way(3, GRADS, parts=2, compression=fc.Compression("int4", "int4", error_feedback=True)),
    Way(4, HYBRID, parts=2, compression=fc.Compression("int4", "int8", exact=(), block=8)),
    Way(3, NONE, parts=2, compression=fc.Compression("int8", "int4", error_feedback=True)),
]
# What adds no choice that is not in one of those.
OTHERS = [
    Way(1, NONE, precision="bf16", offload="all"),
    Way(2, FULL, precision="bf16", offload="parameters"),
    Way(3, FULL, parts=2, prefetch=fc.Prefetch(2, max_bytes=700)),
    Way(3, STAYS, parts=2, deferred=True, precision="bf16"),
    Way(3, NONE, precision="fp16", clip=0.5),
    Way(4, HYBRID_STAYS, precision="bf16 reduced"),
    Way(4, ALONE, optimizer="sgd", parts=2, deferred=True),
]


def looked_at(backend: fc.Backend, offload: str) -> Any:
    engine = engine_of(backend, Way(offload=offload))
    with engine.step() as step:
        one_pass(engine, step, np.random.default_rng(backend.rank))
        norms = [step.clip_grad_norm(0.5)]
        with step.gradients(full=True, write=True) as grads:
            whole = {name: engine.device.to_host(array.copy()) for name, array in grads.items()}
            grads["third.w"][1] = 0.25
        with step.gradients(write=True) as shards:
            for piece in shards["first.w"].pieces:
                piece.array[...] *= 2
        norms.append(step.grad_norm(norm_type=math.inf))
        step.update()
    params = engine.release()
    assert all(type(array) is np.ndarray for array in params.values())
    assert engine.held().total == 0
    return norms, bits(whole), bits(params)


def test_gradients_are_seen_changed_and_clipped_as_on_the_host() -> None:
    expected = on_host(looked_at, 2, "")
    for offload in ("", "all"):
        assert on_gpus(looked_at, 2, offload) == expected


every_way = [*WAYS, *(pytest.param(way, marks=pytest.mark.campaign) for way in OTHERS)]


@pytest.mark.parametrize("way", every_way, ids=str)
def test_the_bits_are_those_of_the_host(way: Way) -> None:
    found = on_gpus(trained, way.ranks, way)
    expected, norms, _ = on_host(trained, way.ranks, dataclasses.replace(way, offload=""))[0]
    for state, found_norms, (report, held) in found:
        assert bits(state) == bits(expected)
        assert found_norms == norms
        rows = ("peak_bytes", "gathers", "bytes_sent", *["reductions"] * (way.ranks > 1))
        for row in rows:  # what the plan says
            assert report[row]["measured"] == report[row]["predicted"], row
        assert held.on_device + held.pinned == held.total
        moved = held.parameters
        if way.offload == "all":
            moved += held.gradients + held.optimizer
        assert held.pinned == (moved if way.offload else 0)


@pytest.mark.parametrize(
    "way",
    [
        Way(3, FULL, algorithm="nccl", clip=0.5),
        Way(3, GRADS, algorithm="auto", precision="bf16", parts=2, clip=1e6),
        Way(4, NONE, algorithm="auto", offload="parameters", clip=1e6),
    ],
    ids=str,
)
def test_nccls_own_sums_differ_by_roundings(way: Way) -> None:
    found = on_gpus(trained, way.ranks, way)
    plain = dataclasses.replace(way, offload="", algorithm="direct")
    expected, norms, _ = on_host(trained, way.ranks, plain)[0]
    rtol = 1e-4 if way.precision == "" else 2e-2
    for state, found_norms, _ in found:
        assert bits(state) == bits(found[0][0])
        assert found_norms == pytest.approx(norms, rel=rtol)
        for name, theirs in expected.items():
            mine, theirs = (np.asarray(array, np.float64) for array in (state[name], theirs))
            np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=rtol, err_msg=name)


def one_element(backend: fc.Backend) -> dict[str, np.ndarray]:
    """Train a unit of which all ranks but one have nothing."""
    unit = fc.Unit("one", {"w": np.ones(1, np.float32)})
    engine = fc.FSDP([unit], backend, optimizer=fc.optim.Adafactor(lr=0.1, beta1=0.9))
    for _ in range(2):
        with engine.step() as step:
            with step.forward(unit):
                pass
            with step.backward(unit) as (params, grads):
                grads["w"] = params["w"]
            step.update()
    return dict(engine.state_dict(full=True))


def test_ranks_that_have_nothing_of_a_unit_update_it_together() -> None:
    expected = on_host(one_element, 3)[0]
    for state in on_gpus(one_element, 3):
        assert bits(state) == bits(expected)
