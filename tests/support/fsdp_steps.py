"""Engines of a few small units under every strategy, and steps whose results are known exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

import fsdpcore as fc
from fsdpcore.core.buffers import Array

WORLD = 4

# What four ranks can do, by name.
STRATEGIES: dict[str, fc.Strategy] = {
    "full_shard": fc.Strategy("full_shard"),
    "until_backward": fc.Strategy("full_shard", reshard_after_forward=False),
    "near": fc.Strategy("full_shard", reshard_after_forward=2),
    "shard_grad_op": fc.Strategy("shard_grad_op"),
    "shard_optimizer": fc.Strategy("shard_optimizer"),
    "hybrid_shard": fc.Strategy("hybrid_shard", shard_group_size=2),
    "no_shard": fc.Strategy("no_shard"),
}

by_strategy = pytest.mark.parametrize("strategy", list(STRATEGIES.values()), ids=list(STRATEGIES))


def in_turn(
    name: str, values: Iterable[Any], of: Callable[[Any], str] = str
) -> pytest.MarkDecorator:
    """Each value with every second strategy, in a window and apart in turn.

    The next value has the other strategies. So each strategy meets half of the values, and each
    value has both kinds of memory.
    """
    cases = [
        pytest.param(value, strategy, (i + j) // 2 % 2 == 0, id=f"{of(value)}-{known}")
        for i, value in enumerate(values)
        for j, (known, strategy) in enumerate(STRATEGIES.items())
        if (i + j) % 2 == 0
    ]
    return pytest.mark.parametrize((name, "strategy", "window"), cases)


def strategies_in_turn(
    first: int,
    strategies: Mapping[str, Any] = STRATEGIES,
    values: Sequence[Any] = (True, False),
    name: str = "window",
) -> pytest.MarkDecorator:
    """Each strategy, in a window and apart in turn, or with other ``values`` of another ``name``.

    ``first`` is the place of the value that the first strategy has. One test and the next take
    different ones, so that half of the tests run any given pair.
    """
    cases = [
        pytest.param(strategy, values[(first + j) % len(values)], id=known)
        for j, (known, strategy) in enumerate(strategies.items())
    ]
    return pytest.mark.parametrize(("strategy", name), cases)


# Called in a backward pass, with the unit, its parameters and the gradients to be written.
Give = Callable[[fc.Unit, Mapping[str, Array], Any], None]


def launch(body: Callable[..., Any], world_size: int = WORLD, **options: Any) -> list[Any]:
    """Run ``body(backend)`` on threads."""
    options.setdefault("timeout", 30)
    return fc.launch(body, world_size=world_size, transport="sim", **options)


def cause_of(body: Callable[..., Any], world_size: int = 1, **options: Any) -> BaseException:
    """Return what ``body`` raises on one of its ranks."""
    with pytest.raises(fc.RankFailedError) as caught:
        launch(body, world_size, **options)
    assert caught.value.__cause__ is not None
    return caught.value.__cause__


def nothing(unit: fc.Unit, params: Mapping[str, Array], grads: Any) -> None:
    """Leave all gradients zero."""


def one_pass(step: Any, units: Iterable[fc.Unit | str], give: Give = nothing) -> None:
    """Go forward through the units, and back."""
    order = [step._model[unit].declaration for unit in units]
    for unit in order:
        with step.forward(unit):
            pass
    for unit in reversed(order):
        with step.backward(unit) as (params, grads):
            give(unit, params, grads)


def train(engine: fc.FSDP, give: Give = nothing, **update: Any) -> Any:
    """Take one whole step; returns it, and the norm."""
    with engine.step() as step:
        one_pass(step, engine.units, give)
        norm = step.update(**update)
    return step, norm


def values_of(engine: fc.FSDP) -> dict[str, dict[str, Array]]:
    """Copy all parameters as they are gathered, by unit and name."""
    with engine.gathered():
        return {
            unit.name: {name: array.copy() for name, array in unit.params.items()}
            for unit in engine.units
        }


def state_bytes(engine: fc.FSDP) -> bytes:
    """All that an update may change on this rank."""
    parts = [engine.steps.to_bytes(4, "little")]
    for unit in engine.units:
        parts.append(unit.shard.tobytes())
        parts.extend(array.tobytes() for array in unit.optimizer_state.values())
    return b"".join(parts)


def is_clean(engine: fc.FSDP) -> bool:
    """Whether nothing is gathered, on its way, or waits to be reduced."""
    return (
        engine.held().buffers == 0
        and not engine.has_pending_prefetch
        and all(
            unit.state.value == "sharded" and unit.grad_state.value == "none"
            for unit in engine.units
        )
    )
