"""What a step enqueues on a GPU, in which order, and that its host does not wait for any of it."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import fake_cuda, nccl_ranks
from support.fsdp_device import Way, bits, engine_of, on_host, one_pass
from support.fsdp_programs import Player, everything

import fsdpcore as fc
from fsdpcore.fsdp.passes import Passes

# For what must happen.
FOR_SURE = 60.0
STRATEGIES = [
    fc.Strategy("full_shard"),
    fc.Strategy("full_shard", reshard_after_forward=False),
    fc.Strategy("shard_grad_op"),
    fc.Strategy("no_shard"),
]


@pytest.fixture
def machine() -> Iterator[Any]:
    with fake_cuda.installed(4) as made:
        yield made


def run(body: Callable[[fc.Backend], Any], ranks: int) -> list[Any]:
    outcomes = nccl_ranks.run_ranks(body, ranks)
    assert not any(o.error for o in outcomes), [f"{o.error}: {o.text}" for o in outcomes]
    return [outcome.result for outcome in outcomes]


def waits_of(machine: Any) -> int:
    """How often this thread has waited for a GPU so far."""
    me = threading.current_thread().name
    return sum(entry.thread == me for entry in machine.host_waits())


# The host.


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("offload", ["", "all"])
def test_the_host_does_not_wait_before_the_update_and_once_in_it(
    machine: Any, strategy: fc.Strategy, offload: str
) -> None:
    way = Way(2, strategy, offload=offload, precision="bf16", clip=1.0, parts=2)

    def body(backend: fc.Backend) -> list[int]:
        engine = engine_of(backend, way)
        counts = []
        for number in range(3):
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

    assert run(body, 2) == [[1, 1, 1]] * 2


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


def reached(device: Any, array: Any) -> bool:
    """Wait until the GPU has come to what this thread has enqueued; False if it does not."""
    event = device.xp.cuda.Event()
    event.record()
    end = time.monotonic() + FOR_SURE
    while not event.done and time.monotonic() < end:
        time.sleep(1e-3)
    return bool(event.done)


def test_a_unit_computes_while_the_next_is_gathered(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Passes._fetch

    def held(self: Passes, following: list[fc.Unit]) -> None:
        device = self._units[0].device
        device.synchronize()
        machine.freeze(device.stream)  # type: ignore[attr-defined]
        fetch(self, following)

    def body(backend: fc.Backend) -> bool:
        device = backend.device
        engine = engine_of(backend, Way(2, prefetch=1))
        fine = True
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit) as params:
                    made = [2 * array for array in params.values()]
                    fine = fine and reached(device, made)
                    machine.thaw(device.stream)  # type: ignore[attr-defined]
            for unit in reversed(engine.units):
                with step.backward(unit) as (params, grads):
                    for name in grads:
                        grads[name] = params[name]
                    fine = fine and reached(device, grads)
                    machine.thaw(device.stream)  # type: ignore[attr-defined]
            step.update()
        return fine

    monkeypatch.setattr(Passes, "_fetch", held)
    assert run(body, 2) == [True, True]


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
                    fine.append(reached(device, grads))
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


# Whatever the order.


class DevicePlayer(Player):
    """A rank that computes on a GPU."""

    def look(self, unit: fc.Unit) -> None:
        for _ in range(2):
            self.dawdle()
            found = self.engine.device.to_host(everything(unit))
            np.testing.assert_array_equal(found, self.version[unit.name])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("seed", range(2))
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
        sizes |= {part.layout.padded_size * 4 for unit in engine.units for part in unit.parts}

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
