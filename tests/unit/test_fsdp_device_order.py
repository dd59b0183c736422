"""What a step enqueues on a GPU, in which order, and that its host does not wait for any of it."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.fsdp_device import (
    STRATEGIES,
    Way,
    bits,
    engine_of,
    needs_compiler,
    on_host,
    one_pass,
    run,
    trained,
)
from support.fsdp_programs import Player, everything
from support.zmq_ranks import PATIENCE

import fsdpcore as fc
from fsdpcore.fsdp.step.executor import StepExecutor

pytestmark = needs_compiler


def waits_of(machine: Any) -> int:
    """How often this thread has waited for a GPU so far."""
    me = threading.current_thread().name
    return sum(entry.thread == me for entry in machine.host_waits())


# The host.


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [*((strategy, "") for strategy in STRATEGIES), (STRATEGIES[0], "all"), (STRATEGIES[3], "all")],
    ids=str,
)
def test_the_host_does_not_wait_before_the_update_and_once_in_it(
    machine: Any, strategy: fc.Strategy, offload: str
) -> None:
    way = Way(2, strategy, offload=offload, precision="bf16", clip=1.0, parts=2)

    def body(backend: fc.Backend) -> list[int]:
        engine = engine_of(backend, way)
        counts = []
        for number in range(2):
            # With a GPU that does nothing, a host that waits for it would wait for ever.
            machine.freeze(0)
            with engine.step() as step:
                for part in range(way.parts):
                    one_pass(engine, step, np.random.default_rng((number, part)))
                machine.thaw(0)
                before = waits_of(machine)
                step.update(clip=way.clip, skip_nonfinite=True)
                counts.append(waits_of(machine) - before)
        return counts

    assert run(body, 2) == [[1, 1]] * 2


def test_without_clipping_it_waits_once_too(machine: Any) -> None:
    def body(backend: fc.Backend) -> int:
        engine = engine_of(backend, Way(2))
        with engine.step() as step:
            one_pass(engine, step, np.random.default_rng(0))
            before = waits_of(machine)
            step.update()
            return waits_of(machine) - before

    assert run(body, 2) == [1, 1]


# The background.


def reached(device: Any) -> bool:
    """Wait until the GPU has come to what this thread has enqueued; False if it does not."""
    event = device.xp.cuda.Event()
    event.record()
    end = time.monotonic() + PATIENCE
    while not event.done and time.monotonic() < end:
        time.sleep(1e-3)
    return bool(event.done)


def test_a_unit_computes_while_the_next_is_gathered(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = StepExecutor._fetch
    ahead: list[fc.Unit] = []

    def held(self: StepExecutor, following: list[fc.Unit], phase: Any) -> None:
        device = self._units[0].device
        device.synchronize()
        machine.freeze(device.stream)  # type: ignore[attr-defined]
        ahead.extend(following)
        fetch(self, following, phase)

    def body(backend: fc.Backend) -> bool:
        device = backend.device
        engine = engine_of(backend, Way(2, prefetch=1))
        fine = True
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit) as params:
                    for array in params.values():
                        array * 2
                    fine = fine and reached(device)
                    machine.thaw(device.stream)  # type: ignore[attr-defined]
            for unit in reversed(engine.units):
                with step.backward(unit) as (params, grads):
                    for name in grads:
                        grads[name] = params[name]
                    fine = fine and reached(device)
                    machine.thaw(device.stream)  # type: ignore[attr-defined]
            step.update()
        return fine

    monkeypatch.setattr(StepExecutor, "_fetch", held)
    assert run(body, 2) == [True, True]
    assert ahead, "nothing was to be gathered ahead"


def test_a_unit_computes_while_the_gradients_of_the_last_are_reduced(machine: Any) -> None:
    def body(backend: fc.Backend) -> list[bool]:
        device = backend.device
        engine = engine_of(backend, Way(2, prefetch=1))
        fine = []
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit):
                    pass
            for number, unit in enumerate(reversed(engine.units)):
                with step.backward(unit) as (params, grads):
                    for name in grads:
                        grads[name] = params[name]
                    fine.append(reached(device))
                    if number:
                        machine.thaw(device.stream)  # type: ignore[attr-defined]
                    device.synchronize()
                    machine.freeze(device.stream)  # type: ignore[attr-defined]
            machine.thaw(device.stream)  # type: ignore[attr-defined]
            step.update()
        return fine

    assert run(body, 2) == [[True, True, True]] * 2


def test_collectives_of_a_step_are_all_on_one_stream(machine: Any) -> None:
    """So groups of ranks cannot wait for each other in two orders."""

    def body(backend: fc.Backend) -> tuple[str, int]:
        engine = engine_of(backend, Way(4, fc.Strategy("hybrid_shard", shard_group_size=2)))
        for number in range(2):
            with engine.step() as step:
                one_pass(engine, step, np.random.default_rng(number))
                step.update()
        stream: Any = backend.device
        return threading.current_thread().name, stream.stream.ptr

    names = ("nccl.allGather", "nccl.reduceScatter", "nccl.allReduce", "nccl.send", "nccl.recv")
    for thread, stream in run(body, 4):
        calls = [entry for entry in machine.log if entry.name in names and entry.thread == thread]
        assert len(calls) > 10
        assert {entry.stream for entry in calls} == {stream}


def test_an_engine_may_live_on_any_stream(machine: Any) -> None:
    """One that waits for the default stream no more than that for it."""
    way = Way(2, optimizer="adafactor", parts=2, offload="all", clip=0.5)

    def body(backend: fc.Backend) -> tuple[Any, list[Any]]:
        stream = backend.device.xp.cuda.Stream(non_blocking=True)
        with stream:
            state, norms, _ = trained(backend, way)
        stream.synchronize()
        return bits(state), norms

    state, norms, _ = on_host(trained, 2, dataclasses.replace(way, offload=""))[0]
    assert run(body, 2) == [(bits(state), norms)] * 2


# Whatever the order.


class DevicePlayer(Player):
    """A rank that computes on a GPU."""

    def look(self, unit: fc.Unit) -> None:
        for _ in range(2):
            self.dawdle()
            found = self.engine.device.to_host(everything(unit))
            np.testing.assert_array_equal(found, self.version[unit.name])


@pytest.mark.parametrize(
    ("seed", "strategy"), [(seed % 2, each) for seed, each in enumerate(STRATEGIES)], ids=str
)
def test_programs_of_verbs_see_what_they_must(
    machine: Any, strategy: fc.Strategy, seed: int
) -> None:
    def body(backend: fc.Backend) -> None:
        player = DevicePlayer(backend, seed, strategy=strategy, offload=offload)
        program = random.Random(seed)
        moves = ["read", "read_in_the_background", "fetch_in_vain", "read_two", "write", "train"]
        for _ in range(15):
            move = program.choice([*moves, "reduce", "reduce_early"])
            getattr(player, move)(program.choice(player.engine.units))
        for unit in player.engine.units:
            player.read(unit)

    offload = fc.Offload(what="all") if seed else None
    run(body, 3)
