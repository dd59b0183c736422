"""Groups of ranks that train apart and meet once in many steps."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_device import needs_compiler, on_gpus, on_host
from support.fsdp_steps import cause_of, launch, train

import fsdpcore as fc
from fsdpcore.core.buffers import Array

LR, OUTER_LR, MOMENTUM = 2.0**-6, 0.5, 0.75
SHAPES = {"a": {"w": (6, 5), "b": (5,)}, "c": {"w": (5, 3)}, "d": {"w": (4, 4)}}
INT4 = fc.Compression(None, "int4", block=8, error_feedback=True)


def values() -> dict[str, Array]:
    rng = np.random.default_rng(7)
    return {
        f"{unit}.{name}": rng.normal(size=shape).astype(np.float32)
        for unit, params in SHAPES.items()
        for name, shape in params.items()
    }


def gradient(name: str, group: int, number: int) -> Array:
    unit, param = name.split(".")
    rng = np.random.default_rng([ord(unit), len(param), group, number])
    return rng.normal(size=SHAPES[unit][param]).astype(np.float32)


def make(
    backend: fc.Backend, strategy: str = "full_shard", seed: int = 0, **options: Any
) -> tuple[fc.FSDP, fc.OuterStep]:
    mesh = fc.Mesh(backend, {"group": 2, "shard": 2})
    found = values()
    found["a.b"] += seed * mesh.coordinates["group"]
    units = [
        fc.Unit(name, {param: found[f"{name}.{param}"] for param in params})
        for name, params in SHAPES.items()
    ]
    engine = fc.FSDP(units, mesh["shard"], strategy=strategy, optimizer=fc.optim.SGD(lr=LR))
    sgd = fc.optim.SGD(lr=OUTER_LR, momentum=MOMENTUM, nesterov=True)
    options = {"every": 4, "optimizer": sgd, **options}
    return engine, fc.OuterStep(engine, mesh["group"], **options)


def take_steps(engine: fc.FSDP, outer: fc.OuterStep, count: int) -> list[bool]:
    met = []
    for _ in range(count):
        group, number = outer.groups.rank, engine.steps

        def give(unit: fc.Unit, params: Mapping[str, Any], grads: Any, at: Any = (group, number)):
            for param in params:
                grads[param] = gradient(f"{unit.name}.{param}", *at)

        train(engine, give)
        met.append(outer.step())
    return met


def expected(
    steps: int, every: int, at: Mapping[str, int], delay: int
) -> tuple[list[dict[str, Array]], list[int]]:
    """What both groups have, by the formulas of DiLoCo, unit by unit; and in which steps they met.

    With a delay, what groups have changed since they sent something is added to what comes of it.
    """
    anchors = values()
    groups = [values(), values()]
    buffers = {name: np.zeros_like(array) for name, array in anchors.items()}
    sent: dict[str, list[Array]] = {}
    met = set()
    for step in range(1, steps + 1):
        for name, anchor in anchors.items():
            for group, params in enumerate(groups):
                params[name] -= np.float32(LR) * gradient(name, group, step - 1)
            if step % every == at[name[0]]:
                sent[name] = [params[name].copy() for params in groups]
            if step > delay and (step - delay) % every == at[name[0]]:
                met.add(step)
                change = ((anchor - sent[name][0]) + (anchor - sent[name][1])) / np.float32(2)
                buffers[name] = np.float32(MOMENTUM) * buffers[name] + change
                direction = change + np.float32(MOMENTUM) * buffers[name]
                anchors[name] = anchor - np.float32(OUTER_LR) * direction
                for params, before in zip(groups, sent[name], strict=True):
                    since = params[name] + (anchors[name] - before)
                    params[name] = since if delay else anchors[name].copy()
    return groups, sorted(met)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("delay", [0, 3])
def test_groups_meet_as_the_formulas_say(strategy: str, fragments: int, delay: int) -> None:
    at = dict.fromkeys("acd", 0) if fragments == 1 else {"a": 0, "c": 2, "d": 4}

    def body(backend: fc.Backend) -> None:
        engine, outer = make(backend, strategy, every=6, fragments=fragments, delay=delay)
        groups, steps = expected(13, 6, at, delay)
        met = take_steps(engine, outer, 13)
        assert [number for number, each in enumerate(met, 1) if each] == steps
        found = engine.state_dict(full=True)
        for name, array in groups[outer.groups.rank].items():
            assert_array_equal(found[name], array)
        rounds = 2
        assert outer.bytes_sent == rounds * outer.sends
        # Of this rank's half of 66 values, or all: parameters, momentum, and two on their way.
        kept = 4 * (2 + 2 * bool(delay))
        assert outer.held in ([kept * 66] if strategy == "no_shard" else [kept * 34, kept * 32])

    launch(body)


@pytest.mark.parametrize("delay", [0, 3])
def test_differences_travel_quantised_and_resume_with_the_same_bits(
    tmp_path: Path, delay: int
) -> None:
    def body(backend: fc.Backend) -> tuple[bytes, int, int]:
        engine, outer = make(backend, compression=INT4, delay=delay)
        plain = make(backend)[1]
        take_steps(engine, outer, 6)
        folder = str(tmp_path / f"group{outer.groups.rank}")
        fc.checkpoint.save(folder, {"model": engine, "outer": outer}, engine.backend)
        take_steps(engine, outer, 6)
        again = make(backend, compression=INT4, delay=delay)
        fc.checkpoint.load(
            folder, dict(zip(("model", "outer"), again, strict=True)), engine.backend
        )
        take_steps(*again, 6)
        bits = [
            b"".join(np.asarray(a).tobytes() for a in e.state_dict(full=True).values())
            for e in (engine, again[0])
        ]
        assert bits[0] == bits[1]
        assert (again[1].calls, again[1].rounds) == (outer.calls, outer.rounds)
        return bits[0], outer.sends, plain.sends

    found = launch(body)
    assert len({bits for bits, _, _ in found}) == (2 if delay else 1)  # groups have gone on
    assert all(sent < plain for _, sent, plain in found)


@needs_compiler
@pytest.mark.parametrize("delay", [0, 3])
def test_the_bits_on_gpus_are_those_of_the_host(delay: int) -> None:
    def body(backend: fc.Backend) -> tuple[bytes, bytes]:
        engine, outer = make(backend, compression=INT4, delay=delay, fragments=2)
        take_steps(engine, outer, 9)
        params = engine.state_dict(full=True).values()
        kept = [p.array for a in outer.state_dict().values() for p in a.pieces]
        host = engine.device.to_host
        return tuple(b"".join(host(a).tobytes() for a in arrays) for arrays in (params, kept))

    assert on_gpus(body, 4) == on_host(body, 4)


def test_what_was_on_its_way_is_dropped_where_other_units_would_be_due(tmp_path: Path) -> None:
    def body(backend: fc.Backend) -> None:
        engine, outer = make(backend, delay=3, fragments=2)
        take_steps(engine, outer, 5)  # a difference of the first step of four is on its way
        folder = str(tmp_path / f"group{outer.groups.rank}")
        fc.checkpoint.save(folder, {"model": engine, "outer": outer}, engine.backend)
        engine, outer = make(backend, delay=3, fragments=1)
        fc.checkpoint.load(folder, {"model": engine, "outer": outer}, engine.backend)
        assert take_steps(engine, outer, 7) == [False, False, False, False, False, True, False]

    launch(body)


def test_groups_that_load_different_steps_are_told(tmp_path: Path) -> None:
    def body(backend: fc.Backend) -> None:
        engine, outer = make(backend)
        for _ in range(2):
            take_steps(engine, outer, 4)
            folder = str(tmp_path / f"group{outer.groups.rank}")
            fc.checkpoint.save(folder, {"model": engine, "outer": outer}, engine.backend)
        step = 4 if outer.groups.rank else 8
        fc.checkpoint.load(folder, {"model": engine, "outer": outer}, engine.backend, step=step)
        with pytest.raises(fc.MismatchError, match="checkpoints of different steps"):
            outer.step()

    launch(body)


def test_closing_ends_the_thread() -> None:
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if "outer-steps" in each.name]

    def body(backend: fc.Backend) -> None:
        engine, outer = make(backend, delay=3)
        take_steps(engine, outer, 5)
        backend.barrier()
        assert len(threads()) == 4
        backend.barrier()
        outer.close()
        outer.close()
        with pytest.raises(fc.StateError, match="closed"):
            outer.step()
        backend.barrier()
        assert not threads()

    launch(body)


def test_one_checkpoint_of_several_groups_is_refused(tmp_path: Path) -> None:
    def body(backend: fc.Backend) -> None:
        engine, outer = make(backend)
        for act in (fc.checkpoint.save, fc.checkpoint.load):
            act(str(tmp_path), {"model": engine, "outer": outer}, backend)

    assert re.search(r"group of ranks \[\d, \d\].*train apart", str(cause_of(body, 4)))
    assert not list(tmp_path.iterdir())


def test_what_makes_no_sense_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"every": 0}, "every of OuterStep"),
        ({"delay": 4}, "a delay below it, got 4"),
        ({"fragments": 5}, "at most, got 5"),
        ({"compression": fc.Compression("int4", exact=("x.*",))}, "matches no trained parameter"),
        ({"optimizer": fc.optim.Muon(lr=0.1)}, "elementwise"),
        ({"compression": fc.Compression("int8", None)}, "needs reduce"),
        ({"seed": 1}, "groups differ"),
    ]
    for options, words in cases:
        error = cause_of(lambda backend, o=options: make(backend, **o), 4)
        assert words in str(error)

    def apart(backend: fc.Backend) -> None:
        make(backend, every=4 + backend.rank % 2)

    assert "ranks of one group differ in options" in str(cause_of(apart, 4))

    def inside(backend: fc.Backend) -> None:
        engine, _ = make(backend)
        fc.OuterStep(engine, engine.backend, every=2)

    assert "counterparts" in str(cause_of(inside, 4))


def test_exact_parameters_of_every_shard_travel_as_they_are() -> None:
    def body(backend: fc.Backend) -> None:
        found = []
        for compression in (None, fc.Compression(None, "int4", block=8)):
            engine, outer = make(backend, compression=compression)
            take_steps(engine, outer, 4)
            found.append(engine.state_dict(full=True))
        for name in values():
            same = np.array_equal(found[0][name], found[1][name])
            assert same == (name == "a.b"), name

    launch(body)


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("delay", [0, 3])
def test_an_optimizer_counts_the_meetings_of_each_unit(
    monkeypatch: pytest.MonkeyPatch, fragments: int, delay: int
) -> None:
    seen: list[int] = []
    update = fc.optim.AdamW.update

    def note(self: Any, *arguments: Any, step: int, **options: Any) -> None:
        seen.append(step)
        update(self, *arguments, step=step, **options)

    monkeypatch.setattr(fc.optim.AdamW, "update", note)
    adam = fc.optim.AdamW(lr=0.1)
    options = {"every": 6, "fragments": fragments, "delay": delay, "optimizer": adam}
    launch(lambda backend: take_steps(*make(backend, **options), 13 + delay))
    assert sorted(seen) == [1] * 12 + [2] * 12  # three units of four ranks


@pytest.mark.parametrize("compression", [None, INT4])
def test_what_is_not_finite_is_found_by_all(compression: fc.Compression | None) -> None:
    def body(backend: fc.Backend) -> None:
        engine, outer = make(backend, compression=compression, every=1)
        with engine["d"].writing() as shard:
            shard[0] = np.nan if backend.rank == 3 else shard[0]
        before = [unit.shard.tobytes() for unit in engine.units]
        with pytest.raises(fc.NonFiniteGradientError, match="no parameter was changed"):
            outer.step()
        assert [unit.shard.tobytes() for unit in engine.units] == before
        assert outer.rounds == 0

    launch(body)


def test_state_waits_for_what_is_on_its_way() -> None:
    def body(backend: fc.Backend) -> None:
        engine, outer = make(backend, delay=3)
        add_up = outer._add_up

        def late(*arguments: Any) -> None:
            time.sleep(0.2)
            add_up(*arguments)

        outer._add_up = late  # type: ignore[method-assign]
        take_steps(engine, outer, 4)
        (total,) = outer.state_dict().arrays["outer/total/d.w"].pieces
        at = slice(total.start, total.stop)
        change = sum(
            np.float32(LR) * gradient("d.w", group, number)
            for group in (0, 1)
            for number in range(4)
        )
        assert_allclose(total.array, change.reshape(-1)[at], atol=1e-5)

    launch(body)


@pytest.mark.parametrize("option", ["every", "delay", "fragments"])
def test_groups_that_differ_in_options_are_found(option: str) -> None:
    def body(backend: fc.Backend) -> None:
        make(backend, **{option: 2 + backend.rank // 2})

    assert "groups differ" in str(cause_of(body, 4))


def test_what_is_left_out_of_differences_comes_later() -> None:
    def body(backend: fc.Backend) -> None:
        sgd = fc.optim.SGD(lr=1.0)
        engine, outer = make(backend, every=1, compression=INT4, optimizer=sgd)
        group = outer.groups.rank

        def give(unit: fc.Unit, params: Mapping[str, Any], grads: Any) -> None:
            for param in params:
                grads[param] = gradient(f"{unit.name}.{param}", group, 0)

        for _ in range(50):
            train(engine, give)
            outer.step()
        found = engine.state_dict(full=True)
        for name, before in values().items():
            mean = (gradient(name, 0, 0) + gradient(name, 1, 0)) / 2
            assert_allclose((before - found[name]) / (50 * LR), mean, atol=0.03)

    launch(body)
