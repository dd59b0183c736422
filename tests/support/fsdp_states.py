"""A model with every kind of parameter, and what it looks like under many engines."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.testing import assert_array_equal

import fsdpcore as fc
from fsdpcore.fsdp.state.state import EngineState, ShardedArray

TRAINED = {
    "embed.table": (7, 5),
    "embed.pos": (3, 5),
    "block.w": (5, 7),
    "block.b": (3,),
    "block.scale": (),
    "block.none": (0, 2),
    "head.bias": (1,),
}
FROZEN = {"block.base": (4, 3), "block.mask": (11,)}
IGNORED = {"head.places": (6,)}
TIED = {"head.w": "embed.table"}
OWN = (*TRAINED, *FROZEN)

OPTIMIZERS: dict[str, Any] = {
    "adamw": fc.optim.AdamW(lr=0.01),
    "sgd": fc.optim.SGD(lr=0.1),
    "momentum": fc.optim.SGD(lr=0.1, momentum=0.9),
    "adafactor": fc.optim.Adafactor(beta1=0.9),
    "groups": {
        "*.b": fc.optim.SGD(lr=0.1, momentum=0.9),
        "embed.pos": fc.optim.Muon(lr=0.1),
        "embed.*": fc.optim.Adafactor(),
        "block.w": fc.optim.SGD(lr=0.1),
        "*": fc.optim.AdamW(lr=0.01, amsgrad=True),
    },
}
# What each of them keeps, by parameter; written out, since the engine has its own list.
STATES = {
    "adamw": dict.fromkeys(TRAINED, ("exp_avg", "exp_avg_sq")),
    "sgd": {},
    "momentum": dict.fromkeys(TRAINED, ("momentum_buffer",)),
    "adafactor": {
        **dict.fromkeys(TRAINED, ("variance", "exp_avg")),
        **dict.fromkeys(("embed.table", "embed.pos", "block.w"), ("row_var", "col_var", "exp_avg")),
    },
    "groups": {
        **dict.fromkeys(
            ("block.scale", "block.none", "head.bias"),
            ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        ),
        **dict.fromkeys(("block.b", "embed.pos"), ("momentum_buffer",)),
        "embed.table": ("row_var", "col_var"),
    },
}


class Layout(NamedTuple):
    """How an engine is made."""

    world_size: int
    strategy: fc.Strategy | str = "full_shard"
    window: bool = True
    half: bool = False


LAYOUTS = [
    Layout(1),
    Layout(2, "no_shard"),
    Layout(2, window=False),
    Layout(3),
    Layout(3, "shard_grad_op", window=False, half=True),
    Layout(4, fc.Strategy("hybrid_shard", shard_group_size=2), window=False),
    Layout(4, fc.Strategy(reshard_after_forward=2), half=True),
    Layout(3, "shard_optimizer", window=False),
    Layout(5, fc.Strategy(reshard_after_forward=False), window=False),
]


PAIR = Layout(2, window=False)
HYBRID = LAYOUTS[5]


def values(seed):
    rng = np.random.default_rng(seed)
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in TRAINED.items()}
    # Such as bfloat16 can hold: frozen parameters are kept as they are computed with.
    made["block.base"] = np.round(4 * rng.normal(size=(4, 3))).astype(np.float32)
    made["block.mask"] = rng.integers(-(2**31), 2**31, size=11).astype(np.int32)
    made["head.places"] = rng.integers(0, 99, size=6)
    return made


def engine_of(backend, layout, optimizer="adamw", seed=0, **options):
    """Keywords are those of the engine, but the ``layout`` says most of it."""
    given = values(seed)

    def of(unit):
        return {n.split(".")[1]: a for n, a in given.items() if n.startswith(f"{unit}.")}

    units = [
        fc.Unit("embed", of("embed")),
        fc.Unit("block", of("block"), frozen=["base", "mask"]),
        fc.Unit("head", {**of("head"), "w": fc.Tied("embed", "table")}, ignored="places"),
    ]
    if layout.half:
        options["precision"] = fc.Precision(ml_dtypes.bfloat16, np.float32)
    return fc.FSDP(
        units,
        backend,
        strategy=layout.strategy,
        optimizer=OPTIMIZERS[optimizer],
        window=layout.window,
        algorithm="direct",
        **options,
    )


def train(engine, steps):
    """Gradients follow from parameters and step, the same on all ranks."""
    for _ in range(steps):
        rng = np.random.default_rng(engine.steps)
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit):
                    pass
            for unit in reversed(engine.units):
                with step.backward(unit) as (params, grads):
                    for name in grads:
                        noise = rng.normal(size=params[name].shape)
                        grads[name] = (params[name] + noise).astype(params[name].dtype)
            step.update()


def run(layout, body, *args, **options):
    return fc.launch(
        body,
        world_size=layout.world_size,
        transport="sim",
        args=(layout, *args),
        timeout=30,
        **options,
    )


def copied(state):
    """A state that stays as it is when the engine goes on."""
    arrays = {}
    for name, value in state.items():
        if isinstance(value, ShardedArray):
            pieces = [(start, stop, array.copy()) for start, stop, array in value.pieces]
            arrays[name] = ShardedArray(
                value.shape, value.dtype, tuple(pieces), value.replica, value.replicas
            )
        else:
            arrays[name] = value.copy()
    return EngineState(arrays, state.info)


def assembled(states):
    """Whole arrays from those of all ranks; fails unless each replica has each element once."""
    whole = {}
    for name, first in states[0].items():
        if not isinstance(first, ShardedArray):
            whole[name] = first
            continue
        copies = np.zeros((first.replicas, first.size), first.dtype)
        counts = np.zeros((first.replicas, first.size), int)
        for state in states:
            part = state[name]
            assert (part.shape, part.dtype) == (first.shape, first.dtype)
            for start, stop, array in part.pieces:
                copies[part.replica, start:stop] = array
                counts[part.replica, start:stop] += 1
        assert (counts == 1).all(), name
        assert (copies == copies[0]).all(), name
        whole[name] = copies[0].reshape(first.shape)
    return whole


def expected_names(optimizer):
    """Of all arrays of the state."""
    kept = {f"optimizer/{s}/{n}" for n, states in STATES[optimizer].items() for s in states}
    return {*OWN, *IGNORED} | kept


def same(one, other):
    assert set(one) == set(other)
    for name, array in one.items():
        assert_array_equal(wide(name, array), wide(name, other[name]), strict=True, err_msg=name)


def wide(name, array):
    """A frozen parameter is kept in the dtype in which it is computed with; others are not."""
    return array.astype(np.float32) if name == "block.base" else array


def entered(context):
    with context:
        pass


def only_parameters(state):
    return {name: array for name, array in state.items() if not name.startswith("optimizer/")}


def without(state, *names):
    return EngineState({n: a for n, a in state.items() if n not in names}, state.info)
