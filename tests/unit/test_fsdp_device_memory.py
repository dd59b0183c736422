"""Memory of GPUs, and what goes wrong on them, in an engine: nothing is lost, or used too early."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest
from support import nccl_ranks
from support.fsdp_device import (
    STRATEGIES,
    Way,
    bits,
    engine_of,
    needs_compiler,
    on_host,
    one_pass,
    run,
)
from support.zmq_ranks import PATIENCE

import fsdpcore as fc

pytestmark = needs_compiler


# Memory.


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [*((strategy, "") for strategy in STRATEGIES), (STRATEGIES[0], "all"), (STRATEGIES[3], "all")],
    ids=str,
)
def test_a_gpu_holds_what_the_engine_says(
    machine: Any, strategy: fc.Strategy, offload: str
) -> None:
    size = 100_000

    def body(backend: fc.Backend) -> tuple[int, int]:
        def used() -> int:
            return int(machine.memories.used(backend.rank))

        before = used()
        engine = fc.FSDP(
            [fc.Unit(f"u{i}", {"w": fc.Spec(size)}) for i in range(3)],
            backend,
            strategy=strategy,
            optimizer=fc.optim.AdamW(lr=0.1),
            offload=fc.Offload(what=offload) if offload else None,  # type: ignore[arg-type]
        )
        for _ in range(2):
            with engine.step() as step:
                for unit in engine.units:
                    with step.forward(unit):
                        pass
                for unit in reversed(engine.units):
                    with step.backward(unit) as (params, grads):
                        grads["w"] = params["w"]
                        del params, grads
                step.update()
        backend.device.synchronize()
        expected = before + engine.held().on_device
        end = time.monotonic() + PATIENCE  # the arrays of calls go once somebody has looked
        while used() > 1.02 * expected and time.monotonic() < end:
            time.sleep(1e-2)
        return used(), expected

    for held, expected in run(body, 2):
        assert 0.98 * expected <= held <= 1.02 * expected + 65536


def test_nccl_is_given_memory_of_its_gpu_only(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is offloaded is copied to the GPU before it is sent, and from there when it came."""
    from cupy.cuda.nccl import NcclCommunicator

    given: list[bool] = []

    def watched(name: str) -> None:
        function = getattr(NcclCommunicator, name)

        def call(self: Any, *args: Any) -> Any:
            places = args[:1] if name in ("send", "recv", "bcast") else args[:2]
            given.extend(machine.memories.is_pinned(place) for place in places)
            return function(self, *args)

        monkeypatch.setattr(NcclCommunicator, name, call)

    for name in ("allGather", "reduceScatter", "allReduce", "broadcast", "reduce", "send", "recv"):
        watched(name)

    def body(backend: fc.Backend) -> None:
        for strategy in (*STRATEGIES, fc.Strategy("hybrid_shard", shard_group_size=1)):
            engine = engine_of(backend, Way(2, strategy, offload="all", optimizer="adafactor"))
            with engine.step() as step:
                one_pass(engine, step, np.random.default_rng(0))
                one_pass(engine, step, np.random.default_rng(1))
                step.update()
            with engine.full_params(write=True) as params:
                params["first.w"][...] *= 2
            state = engine.state_dict(full=True, to=1)
            engine.load_state_dict(state if backend.rank == 1 else None, src=1)
            held = engine.held()
            assert held.pinned == held.parameters + held.gradients + held.optimizer
            engine.close()

    run(body, 2)
    assert len(given) > 200
    assert not any(given)


def test_memory_that_the_background_still_uses_is_not_written(machine: Any) -> None:
    """Nobody asks for what it does any more: the stand-in would find a race."""

    def body(backend: fc.Backend) -> None:
        engine = engine_of(backend, Way(2))
        unit = engine.units[0]
        unit.unshard(async_op=True)
        unit.reshard()
        with unit.writing() as shard:
            shard[:] = 1
        unit.unshard(async_op=True)
        unit.reshard()
        for number in range(2):
            grads = unit.begin_gradients()  # in the buffer of what was gathered, or reduced
            grads["w"][...] = number
            unit.reduce_gradients(async_op=True)
            unit.drop_gradients()
        with unit.writing() as shard:
            shard[:] = 2

    run(body, 2)


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[3]], ids=str)
@pytest.mark.parametrize("offload", ["", "all"])
def test_an_engine_may_go_while_the_background_uses_its_arrays(
    machine: Any, strategy: fc.Strategy, offload: str
) -> None:
    """Its memory is handed out again when that has ended."""

    def body(backend: fc.Backend) -> None:
        device: Any = backend.device
        engine = engine_of(backend, Way(2, strategy, offload=offload, window=False))
        one, other, _ = engine.units
        sizes = {array.nbytes for array in (one.shard, other.shard)}
        sizes |= {
            part.layout.padded_size * 4
            for unit in engine._model.units
            for part in unit.flat_parameters
        }

        def begin(one: fc.Unit, other: fc.Unit) -> None:
            one.begin_gradients()["w"][...] = 1
            one.reduce_gradients(async_op=True)
            other.unshard(async_op=True)

        begin(one, other)  # the ranks agree on the kinds of calls
        one.drop_gradients()
        other.reshard()
        device.synchronize()
        with machine.frozen(device.stream):
            begin(one, other)
            del engine, one, other, _
            gc.collect()
            made = [device.xp.ones(size, np.uint8) for size in sizes for _ in range(5)]
        device.synchronize()
        assert all((device.to_host(array) == 1).all() for array in made)

    run(body, 2)


# What goes wrong.


@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_a_rank_that_fails_in_a_step_ends_the_others(machine: Any, where: str) -> None:
    """They are far ahead of their GPUs by then, which wait for its data."""

    def body(backend: fc.Backend) -> None:
        engine = engine_of(backend, Way(2, prefetch=2))

        def come_to(place: str, unit: fc.Unit | None = None) -> None:
            if backend.rank and place == where and unit in (None, engine.units[1]):
                raise ZeroDivisionError("a mistake")

        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit):
                    come_to("forward", unit)
            for unit in reversed(engine.units):
                with step.backward(unit):
                    come_to("backward", unit)
            come_to("update")
            step.update()

    first, second = nccl_ranks.run_ranks(body, 2)
    assert (first.error, first.culprit) == ("PeerFailedError", 1)
    assert "a mistake" in first.text
    assert second.error == "ZeroDivisionError"


@pytest.mark.parametrize(
    "way", [Way(2), Way(2, STRATEGIES[3], precision="bf16", clip=1.0)], ids=str
)
def test_gradients_that_are_not_finite_change_nothing(machine: Any, way: Way) -> None:
    def body(backend: fc.Backend) -> list[bool]:
        engine = engine_of(backend, way)
        before = bits(engine.state_dict(full=True))
        found = []
        for bad in (np.inf, np.nan):
            with engine.step() as step:
                one_pass(engine, step, np.random.default_rng(0))
                with step.forward("third"):
                    pass
                with step.backward("third") as (_, grads):
                    if backend.rank:
                        grads["w"][3, 1] = bad
                with pytest.raises(fc.NonFiniteGradientError, match="no parameter was changed"):
                    step.update(clip=way.clip)
            with engine.step() as step:
                one_pass(engine, step, np.random.default_rng(0))
                with step.forward("first"):
                    pass
                with step.backward("first") as (_, grads):
                    grads["b"][...] = bad
                step.update(clip=way.clip, skip_nonfinite=True)
            found.append(step.skipped and bits(engine.state_dict(full=True)) == before)
        return found

    assert run(body, 2) == [[True, True]] * 2


def test_a_step_that_is_given_up_leaves_nothing_behind(machine: Any) -> None:
    way = Way(2, prefetch=2)

    class GivenUpError(Exception):
        pass

    def steps(backend: fc.Backend, trouble: bool) -> dict[str, Any]:
        engine = engine_of(backend, way)
        for number in range(6):
            noise = np.random.default_rng((number, backend.rank))
            try:
                with engine.step() as step:
                    if trouble and number % 2:
                        give_up(engine, step, number)
                    if not number % 2:
                        one_pass(engine, step, noise)
                        step.update()
            except GivenUpError:
                assert engine.held().buffers == 0
                assert not engine.has_pending_prefetch
            with engine.evaluation() as step:
                for unit in engine.units:
                    with step.forward(unit):
                        pass
        return dict(engine.state_dict(full=True))

    def give_up(engine: fc.FSDP, step: fc.Step, number: int) -> None:
        for unit in engine.units:
            with step.forward(unit):
                if number == 1:
                    raise GivenUpError
        for unit in reversed(engine.units):
            with step.backward(unit) as (_, grads):
                grads["b" if "b" in grads else "e"][...] = 7
                if number == 3 and unit is engine.units[1]:
                    raise GivenUpError  # while gradients of another are reduced
        raise GivenUpError

    expected = on_host(steps, 2, False)[0]
    for found in run(lambda backend: steps(backend, True), 2):
        assert bits(found) == bits(expected)
