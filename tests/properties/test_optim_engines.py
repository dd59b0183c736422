"""Every optimizer in an engine, with any strategy, against formulas told for whole arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fsdp_steps import launch
from support.optimizers import ELEMENTWISE, muon_reference, reference
from support.spmd import run

import fsdpcore as fc
from fsdpcore.fsdp.optim import Muon

SHAPES = {
    "a.w": (3, 5),
    "a.v": (4, 2),
    "a.none": (0, 3),
    "a.x": (2, 7),
    "a.y": (3, 3),
    "b.w": (1, 6),
    "b.u": (4, 4),
}
MUON = [
    Muon(0.1),
    Muon(0.1, weight_decay=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    Muon(0.1, momentum=0.5, ns_coefficients=(1.5, -0.5, 0.0), ns_steps=3),
]
STEPS = 3
SCHEDULE = fc.optim.schedules.Cosine(0.1, warmup=1, total=5)
STRATEGIES = ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "hybrid_shard"]


def values(step):
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def expected(optimizer):
    """Whole parameters after all steps."""
    rates = [optimizer.learning_rate(step) for step in range(1, STEPS + 1)]
    grads = [values(step) for step in range(1, STEPS + 1)]
    found = {}
    for name, param in values(0).items():
        given = [each[name] for each in grads]
        if name == "b.u":  # plain SGD's
            found[name] = param - 0.1 * sum(given)
        elif isinstance(optimizer, Muon):
            found[name], _ = muon_reference(optimizer, param, given, rates)
        else:
            scalar = reference(optimizer)
            flat = [
                scalar(float(value), [float(grad.flat[i]) for grad in given], rates)[0]
                for i, value in enumerate(param.flat)
            ]
            found[name] = np.reshape(flat, param.shape)
    return found


def body(backend, strategy, window, optimizer):
    units = [
        fc.Unit(u, {n.split(".")[1]: a for n, a in values(0).items() if n.startswith(u)})
        for u in "ab"
    ]
    if strategy == "hybrid_shard":
        strategy = fc.Strategy(strategy, shard_group_size=2)
    optimizers = {"b.u": fc.optim.SGD(0.1), "*": optimizer}
    engine = fc.FSDP(units, backend, strategy=strategy, window=window, optimizer=optimizers)
    share = 2 * (backend.rank + 1) / (backend.world_size + 1)  # 1 in the mean
    for number in range(1, STEPS + 1):
        grads = values(number)
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit):
                    pass
            for unit in reversed(engine.units):
                with step.backward(unit) as (_, target):
                    for name in target:
                        target[name] = grads[f"{unit.name}.{name}"] * share
            step.update()
    assert engine.plan().bytes_sent == engine.stats.bytes_sent
    assert engine.held().optimizer == engine.plan().persistent.optimizer
    return engine.state_dict(full=True, optimizer=False).arrays


DECOUPLED = fc.optim.NAdam(0.02, weight_decay=0.1, decoupled_weight_decay=True)
OPTIMIZERS = [*{type(each): each for each in ELEMENTWISE}.values(), DECOUPLED, *MUON]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_engines_take_the_steps_of_whole_arrays(optimizer, data):
    ranks = data.draw(st.integers(1, 4), label="ranks")
    strategies = STRATEGIES if ranks % 2 == 0 else STRATEGIES[:-1]
    one, other = (data.draw(st.sampled_from(strategies), label="strategy") for _ in range(2))
    optimizer = dataclasses.replace(optimizer, lr=SCHEDULE)
    results = launch(body, ranks, args=(one, data.draw(st.booleans()), optimizer))
    if other != one:  # the same bits
        results += launch(body, ranks, args=(other, data.draw(st.booleans()), optimizer))
    for name, array in expected(optimizer).items():
        np.testing.assert_allclose(results[0][name], array, 1e-9, 1e-11, err_msg=name)
        assert len({found[name].tobytes() for found in results}) == 1, name


@pytest.mark.parametrize(
    ("transport", "options"), [("zmq", {}), ("zmq", {"shm": "off"}), ("mpi", {})]
)
def test_matrices_come_back_alike_between_processes(transport, options):
    args = ("full_shard", False, MUON[0])
    found = run(body, transport=transport, world_size=3, args=args, deterministic=True, **options)
    (first, *_) = launch(body, 3, args=args)
    for name, array in first.items():
        assert {each[name].tobytes() for each in found} == {array.tobytes()}, name
