"""An error of inf or nan names the parameters, and the rank whose own gradient had it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpcore as fc

UNITS = "abcd"
Bad = dict[tuple[int, str, str], float]  # by rank, unit and parameter: a value of its gradient


def _engine(backend: fc.Backend, **options: Any) -> fc.FSDP:
    units = [
        fc.Unit(name, {"w": np.ones((5, 3), np.float32), "b": np.ones(7, np.float32)})
        for name in UNITS
    ]
    return fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=0.1), **options)


def _passes(step: fc.Step, bad: Bad, rank: int, units: str = UNITS) -> None:
    for name in units:
        with step.forward(name):
            pass
    for name in reversed(units):
        with step.backward(name) as (_, grads):
            for param in ("w", "b"):
                # The last element: it is in another rank's shard than the first.
                grads[param].fill(1)
                grads[param].reshape(-1)[-1] = bad.get((rank, name, param), 1)


def _update(engine: fc.FSDP, bad: Bad, rounds: int = 1, **options: Any) -> None:
    with engine.step(**options) as step:
        for _ in range(rounds):
            _passes(step, bad, engine.backend.rank)
        step.update()


def _error(*args: Any, **options: Any) -> tuple[str, dict[str, tuple[int, ...]]]:
    with pytest.raises(fc.NonFiniteGradientError) as caught:
        _update(*args, **options)
    return str(caught.value), caught.value.parameters


# From rank 2, where b's pass went wrong, into a, whose pass came after it.
SPREAD: Bad = {(2, "b", "w"): np.nan, (2, "a", "w"): np.inf, (2, "a", "b"): -np.inf}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": False},
        {"window": False, "prefetch": fc.Prefetch(2, reductions=1)},
        {"strategy": fc.Strategy("full_shard", reshard_after_forward=False)},
        {"strategy": "shard_grad_op"},
        {"strategy": "shard_optimizer"},
        {"strategy": "no_shard"},
        {"strategy": fc.Strategy("hybrid_shard", shard_group_size=2), "window": False},
        {"precision": fc.Precision(np.float16)},
    ],
    ids=str,
)
def test_what_spreads_is_traced_to_its_rank_at_once(options: dict[str, Any]) -> None:
    def main(backend: fc.Backend) -> None:
        engine = _engine(backend, **options)
        _update(engine, {})
        words, parameters = _error(engine, SPREAD)
        assert list(parameters) == ["b.w", "a.w", "a.b"]  # as the backward pass came to them
        assert {rank for ranks in parameters.values() for rank in ranks} == {2}
        assert parameters["a.w"] == parameters["a.b"] == (2,)
        assert "gradients of 'b.w', 'a.w', 'a.b' are inf or nan; those of rank 2 were so" in words
        # What was found before is not told again, nor is what still lies in memory.
        assert _error(engine, {(1, "a", "w"): np.nan})[1] == {"a.w": (1,)}
        with pytest.raises(fc.NonFiniteGradientError) as caught, engine.step() as step:
            _passes(step, {(3, "a", "w"): np.nan}, backend.rank, "a")
            step.update()
        assert caught.value.parameters == {"a.w": (3,)}
        _update(engine, {})
        assert engine.steps == 2

    fc.launch(main, world_size=4, transport="sim")


@pytest.mark.parametrize(
    ("options", "rounds"), [({"window": False}, 1), ({"strategy": "no_shard"}, 2)], ids=str
)
def test_what_is_not_known_any_more_is_found_in_the_next_step(
    options: dict[str, Any], rounds: int
) -> None:
    """One unit alone, whose memory was used again; or gradients that were reduced twice."""
    bad: Bad = {(1, "c", "b"): np.inf, (2, "c", "b"): np.nan}

    def main(backend: fc.Backend) -> None:
        engine = _engine(backend, prefetch=0, **options)
        words, parameters = _error(engine, bad, rounds)
        assert parameters == {"c.b": ()}
        assert "'c.b' are inf or nan; from which rank is not known any more" in words
        words, parameters = _error(engine, bad, rounds)
        assert parameters == {"c.b": (1, 2)}
        assert "those of ranks 1, 2 were so" in words
        assert _error(engine, bad, rounds)[1] == {"c.b": ()}
        _update(engine, {}, rounds)  # which ends the search
        assert all(unit.gradients.watch is None for unit in engine._model.units)

    fc.launch(main, world_size=3, transport="sim")


def test_a_sum_that_overflows_is_told_from_gradients_that_do() -> None:
    def main(backend: fc.Backend) -> None:
        engine = _engine(backend)
        large: Bad = {(rank, "a", "w"): 3e38 for rank in range(2)}
        assert "not known" in _error(engine, large, divisor=1.0)[0]
        words, parameters = _error(engine, large, divisor=1.0)
        assert parameters == {"a.w": ()}
        assert "each rank's own gradients were finite, so the sum" in words

    fc.launch(main, world_size=2, transport="sim")


def test_a_skipped_update_says_it_when_it_is_asked() -> None:
    def main(backend: fc.Backend) -> None:
        scaled = fc.Precision(loss_scale=fc.LossScale(4.0))
        group = backend.sub([2, 1, 0])  # whose rank 2 is rank 0 of the job
        engine = _engine(group, precision=scaled)
        with engine.step() as step:
            with pytest.raises(fc.StateError, match=r"says why update\(\) was skipped"):
                step.nonfinite()
            _passes(step, SPREAD, group.rank)
            before = group.order.issued
            step.update()
            assert group.order.issued == before + 1  # the agreement on the update, as always
            assert step.skipped
            assert all(unit.gradients.watch is None for unit in engine._model.units)
            assert step.nonfinite()["a.w"] == (0,)
        with pytest.raises(fc.StateError):
            step.nonfinite()

    fc.launch(main, world_size=3, transport="sim")


def test_gradients_that_were_kept_and_those_of_files(tmp_path: Path) -> None:
    def main(backend: fc.Backend) -> None:
        engine = _engine(backend, offload=fc.Offload(tmp_path, "all"), window=False)
        with pytest.raises(fc.NonFiniteGradientError) as caught, engine.step() as step:
            with step.no_sync():
                _passes(step, {(1, "a", "b"): np.nan}, backend.rank)
            _passes(step, {}, backend.rank)
            step.update()
        assert caught.value.parameters == {"a.b": (1,)}

    fc.launch(main, world_size=2, transport="sim")
