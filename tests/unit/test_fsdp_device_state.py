"""What goes into engines on GPUs and comes out of them: NumPy's arrays, or those of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import nccl_ranks
from support.fsdp_device import Way, bits, engine_of, needs_compiler, on_host, one_pass, run

import fsdpcore as fc

pytestmark = needs_compiler

FULL = fc.Strategy("full_shard")
GRADS = fc.Strategy("shard_grad_op")
NONE = fc.Strategy("no_shard")
HYBRID = fc.Strategy("hybrid_shard", shard_group_size=2)
Array = Any


def errors(body: Callable[[fc.Backend], Any], ranks: int) -> list[tuple[str, str]]:
    """What each rank raises. A rank that left by it would break the others before they are there.

    These errors are agreed on and leave the backend usable, so the ranks wait for each other then.
    """

    def caught(backend: fc.Backend) -> tuple[str, str]:
        with pytest.raises(fc.FsdpcoreError) as raised:
            body(backend)
        backend.barrier()
        return type(raised.value).__name__, str(raised.value)

    return nccl_ranks.results_of(caught, ranks)


def stepped(engine: fc.FSDP, seed: int) -> None:
    with engine.step() as step:
        one_pass(engine, step, np.random.default_rng((seed, engine.backend.rank)))
        step.update()


def numbers(array: Array) -> Array:
    """Other values, on the host."""
    return np.arange(array.size).reshape(array.shape).astype(array.dtype)


def one_unit(backend: fc.Backend, params: dict[str, Any], **options: Any) -> fc.FSDP:
    unit = fc.Unit(
        "u", params, **{k: options.pop(k) for k in ("frozen", "ignored") & options.keys()}
    )
    return fc.FSDP([unit], backend, optimizer=fc.optim.SGD(lr=0.5), **options)


# Making an engine.


def test_an_engine_says_where_its_arrays_are(machine: Any) -> None:
    def body(backend: fc.Backend) -> tuple[str, bool]:
        engine = engine_of(backend, Way())
        engine.units[0].unshard()
        owned = [
            *engine.units[0].params.values(),
            engine.units[0].shard,
            *engine.units[0].optimizer_state.values(),
            engine.units[1].ignored["mask"],
        ]
        return engine.device.name, all(isinstance(array, engine.xp.ndarray) for array in owned)

    assert run(body, 2) == [("cuda:0", True), ("cuda:1", True)]
    assert on_host(lambda backend: engine_of(backend, Way(1)).xp is np, 1) == [True]


def test_initial_values_may_be_on_the_gpu(machine: Any) -> None:
    """Given twice, an array is one parameter there as well; a copy of it is another."""
    w = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)

    def body(backend: fc.Backend, place: Callable[[Array], Array]) -> tuple[Any, Any]:
        here = place(w)
        units = [
            fc.Unit("a", {"w": here, "b": np.ones(3, np.float32)}),
            fc.Unit("b", {"again": here, "copy": place(w), "turned": place(w.T)}),
        ]
        engine = fc.FSDP(units, backend)
        return bits(engine.state_dict(full=True)), units[1].ties

    expected = on_host(lambda backend: body(backend, np.array), 2)[0]
    for found in run(lambda backend: body(backend, backend.device.xp.asarray), 2):
        assert found == expected
        assert found[1] == {"again": fc.Tied("a", "w")}


def test_initial_values_on_gpus_must_agree(machine: Any) -> None:
    def body(backend: fc.Backend) -> None:
        one_unit(backend, {"w": backend.device.xp.full(3, backend.rank, np.float32)})

    for error, text in errors(body, 2):
        assert (error, "unit 'u' differs" in text) == ("MismatchError", True)


REFUSED: dict[str, Callable[[fc.Backend, Array], Any]] = {
    "u.w": lambda backend, array: one_unit(backend, {"w": array}),
    "u.mask": lambda backend, array: one_unit(backend, {"mask": array}, ignored="mask"),
    "gradient of u.w": lambda backend, array: (
        engine_with(backend).units[0].reduce_gradients({"w": array})
    ),
    "u.w to load": lambda backend, array: engine_with(backend).units[0].load({"w": array}),
    "shard of unit 'u'": lambda backend, array: engine_with(backend).update_shards({"u": array}),
    "u.w is an array": lambda backend, array: engine_with(backend).load_full({"u.w": array}),
}


def engine_with(backend: fc.Backend) -> fc.FSDP:
    return one_unit(backend, {"w": np.zeros(3, np.float32)})


@pytest.mark.parametrize("what", list(REFUSED))
def test_an_engine_on_the_host_refuses_arrays_of_a_gpu(machine: Any, what: str) -> None:
    def body(backend: fc.Backend) -> str:
        import cupy

        with pytest.raises(fc.ArgumentError) as caught:
            REFUSED[what](backend, cupy.ones(3, np.float32))
        return str(caught.value)

    (text,) = on_host(body, 1)
    assert what in text
    assert "this rank computes on cpu" in text
    assert ".get()" in text


def test_algorithms_are_those_of_the_gpus(machine: Any) -> None:
    def body(backend: fc.Backend) -> None:
        one_unit(backend, {"w": np.zeros(3, np.float32)}, algorithm="ring")

    for error, text in errors(body, 2):
        assert error == "ArgumentError"
        assert (
            "an engine has no algorithm 'ring'; it has 'auto', 'canonical', 'direct', 'nccl'"
            in text
        )


def test_a_gpu_has_no_files_to_offload_to(machine: Any, tmp_path: Any) -> None:
    def body(backend: fc.Backend) -> None:
        one_unit(backend, {"w": np.zeros(3, np.float32)}, offload=fc.Offload(tmp_path))

    for error, text in errors(body, 2):
        assert error == "ConfigError"
        assert "leave out the directory, Offload()" in text


def test_what_is_ignored_is_where_the_model_computes_if_it_can_be(machine: Any) -> None:
    odd = np.arange(3).astype(ml_dtypes.float8_e4m3fn)

    def body(backend: fc.Backend) -> Any:
        device = backend.device
        params = {
            "w": np.zeros(3, np.float32),
            "mask": np.arange(4),
            "there": device.xp.arange(2),
            "odd": odd,
            "wide": np.arange(2) * 1j,
        }
        engine = one_unit(backend, params, ignored=("mask", "there", "odd", "wide"))
        (unit,) = engine.units
        before = unit.ignored["mask"]
        with engine.step() as step, step.forward(unit) as shown:
            owned = [name for name in shown if device.owns(shown[name])]
        state = {"u.w": np.ones(3, np.float32), "u.mask": np.arange(4), "u.odd": odd + odd}
        engine.load_full(state)
        kept = unit.ignored["mask"] is before  # as its values are the same
        wide = device.xp.asarray(np.arange(2) + 1j)
        engine.load_full({**state, "u.mask": device.xp.arange(4)[::-1], "u.wide": wide})
        return owned, kept, bits(engine.state_dict(full=True))

    for owned, kept, found in run(body, 2):
        assert owned == ["w", "mask", "there", "wide"]  # all but "odd", which CuPy has not
        assert kept
        expected = {
            "u.w": np.ones(3, np.float32),
            "u.mask": np.arange(4)[::-1],
            "u.there": np.arange(2),
            "u.odd": odd + odd,
            "u.wide": np.arange(2) + 1j,
        }
        assert found == bits(expected)


# State.


def test_a_state_is_of_the_gpu_in_parts_and_of_the_host_as_a_whole(machine: Any) -> None:
    def body(backend: fc.Backend) -> Any:
        engine = engine_of(backend, Way(3))
        stepped(engine, 0)
        parts = engine.state_dict()
        for array in parts.values():
            pieces = array.pieces if isinstance(array, fc.ShardedArray) else ()
            for piece in pieces:
                assert engine.device.owns(piece.array)
        alone = engine.state_dict(full=True, to=1)
        return bits(engine.state_dict(full=True)), bits(alone)

    found = run(body, 3)
    for rank, (everywhere, alone) in enumerate(found):
        assert everywhere == found[0][0]
        assert alone == (everywhere if rank == 1 else {})


@pytest.mark.parametrize(
    ("ranks", "strategy", "offload", "precision"),
    [
        (2, FULL, "", ""),
        (3, NONE, "all", ""),
        (4, HYBRID, "", "bf16"),
    ],
    ids=str,
)
def test_a_state_is_loaded_from_wherever_it_is(
    machine: Any, ranks: int, strategy: fc.Strategy, offload: str, precision: str
) -> None:
    """Whole arrays of the host, of GPUs, on one rank only; and a rank's own parts."""
    first = Way(4, FULL, precision=precision, optimizer="adafactor")
    way = Way(ranks, strategy, offload=offload, precision=precision, optimizer="adafactor")

    def trained(backend: fc.Backend) -> tuple[dict[str, Array], dict[str, Any]]:
        engine = engine_of(backend, first)
        stepped(engine, 0)
        state = engine.state_dict(full=True)
        return dict(state), state.info

    def body(backend: fc.Backend) -> list[Any]:
        device, found = backend.device, []
        state = fc.EngineState(*expected)
        there = {name: device.xp.asarray(array) for name, array in state.items()}

        def check(engine: fc.FSDP) -> None:
            found.append(bits(engine.state_dict(full=True)))

        engine = engine_of(backend, way)
        engine.load_state_dict(state)
        check(engine)
        own = engine.state_dict()
        copies = {
            name: fc.ShardedArray(
                array.shape,
                array.dtype,
                tuple(piece._replace(array=move(piece.array)) for piece in array.pieces),
                array.replica,
                array.replicas,
            )
            if isinstance(array, fc.ShardedArray)
            else array
            for number, (name, array) in enumerate(own.items())
            for move in [device.to_host if number % 2 else (lambda piece: piece.copy())]
        }
        stepped(engine, 1)
        engine.load_state_dict(fc.EngineState(copies, own.info))
        check(engine)
        stepped(engine, 1)
        engine.load_state_dict(fc.EngineState(there, state.info))
        check(engine)
        for src, given in ((0, state), (ranks - 1, fc.EngineState(there, state.info))):
            stepped(engine, 1)
            engine.load_state_dict(given if backend.rank == src else None, src=src)
            check(engine)
        return found

    expected = on_host(trained, 4)[0]
    for found in run(body, ranks):
        for each in found:
            assert each == bits(expected[0])


def test_parts_that_an_update_has_changed_are_not_loaded(machine: Any) -> None:
    def body(backend: fc.Backend) -> None:
        engine = engine_of(backend, Way())
        state = engine.state_dict()
        stepped(engine, 0)
        engine.load_state_dict(state)

    for error, text in errors(body, 2):
        assert error == "ArgumentError"
        assert "is a view of what the engine has now" in text


@pytest.mark.parametrize("offload", ["", "parameters"])
def test_a_state_is_written_in_place(machine: Any, offload: str) -> None:
    def body(backend: fc.Backend) -> None:
        engine = engine_of(backend, Way(2, offload=offload, precision="bf16"))
        with engine.writing_state() as state:
            for array in state.values():
                if isinstance(array, fc.ShardedArray):
                    for piece in array.pieces:
                        assert engine.device.owns(piece.array)
                        values = np.full(piece.array.shape, 3, piece.array.dtype)
                        engine.device.write(piece.array, values)
                else:
                    array[...] = 3
        for array in engine.state_dict(full=True).values():
            assert (np.asarray(array) == 3).all()
        with engine.evaluation() as step:
            for unit in engine.units:
                with step.forward(unit) as params:
                    for array in params.values():
                        assert (engine.device.to_host(array) == 3).all()

    run(body, 2)


# Parameters.


@pytest.mark.parametrize("strategy", [FULL, GRADS, NONE], ids=str)
@pytest.mark.parametrize("offload", ["", "all"])
def test_whole_parameters_are_read_and_written(
    machine: Any, strategy: fc.Strategy, offload: str
) -> None:
    way = Way(2, strategy, offload=offload)

    def body(backend: fc.Backend) -> None:
        engine = engine_of(backend, way)
        device = engine.device
        with engine.full_params() as params:
            assert all(device.owns(array) for array in params.values())
            before = {name: device.to_host(array) for name, array in params.items()}
            with pytest.raises(fc.StateError, match=r"first\.w is read-only"):
                params["first.w"] = before["first.w"]  # type: ignore[index]
        with engine.full_params(write=True) as params:
            given: Any = params
            given["first.w"] = numbers(before["first.w"])
            given["third.w"] = device.from_host(numbers(before["third.w"]))
            given["first.b"][...] += 1
            with pytest.raises(fc.StateError, match=r"second\.mask is read-only"):
                given["second.mask"] = before["second.mask"]
            with pytest.raises(fc.ArgumentError, match="has shape"):
                given["second.e"] = np.zeros(1)
        after = {**before, "first.b": before["first.b"] + 1, "third.tied": before["first.b"] + 1}
        for name in ("first.w", "third.w"):
            after[name] = numbers(before[name])
        with engine.full_params() as params:
            assert bits({name: device.to_host(a) for name, a in params.items()}) == bits(after)

    run(body, 2)


def test_whole_parameters_that_differ_are_not_kept(machine: Any) -> None:
    def body(backend: fc.Backend) -> bool:
        engine = engine_of(backend, Way())
        before = bits(engine.state_dict(full=True))
        differs = pytest.raises(fc.MismatchError, match=r"third\.w was written differently")
        with differs, engine.full_params(write=True) as params:
            params["third.w"][0, 0] = backend.rank
        return bits(engine.state_dict(full=True)) == before

    assert run(body, 2) == [True, True]


@pytest.mark.parametrize("strategy", [FULL, GRADS, NONE], ids=str)
@pytest.mark.parametrize("offload", ["", "parameters"])
def test_shards_and_arrays_are_loaded_from_host_and_gpu(
    machine: Any, strategy: fc.Strategy, offload: str
) -> None:
    w = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)

    def seen(engine: fc.FSDP) -> list[float]:
        with engine.evaluation() as step, step.forward("u") as params:
            found: list[float] = engine.device.to_host(params["w"]).reshape(-1).tolist()
        return found

    def body(backend: fc.Backend) -> None:
        device, xp = backend.device, backend.device.xp
        chosen = fc.Offload() if offload else None
        engine = one_unit(backend, {"w": w}, strategy=strategy, offload=chosen, algorithm="direct")
        (unit,) = engine.units
        unit.load({"w": xp.asarray(w.astype(np.float64)) * 2})
        assert seen(engine) == (2 * w).reshape(-1).tolist()
        unit.load({"w": (3 * w).tolist()})
        assert seen(engine) == (3 * w).reshape(-1).tolist()
        unit.unshard()
        unit.load({"w": unit.params["w"].reshape(7, 5).T})  # while it is changed
        expected = (3 * w).reshape(7, 5).T.reshape(-1).tolist()
        assert seen(engine) == expected
        own = device.to_host(unit.shard)
        engine.update_shards({"u": -own.astype(np.float64)})
        assert seen(engine) == [-value for value in expected]
        engine.update_shards({"u": xp.asarray(own[: unit.valid_size])})
        assert seen(engine) == expected
        with unit.writing() as shard:
            shard[...] = 5
        assert set(seen(engine)) == {5.0}
        for value in (w, xp.asarray(w)):
            unit.reduce_gradients({"w": value})
        assert unit.grad_shard is not None
        unit.update(step=1, lr=None, grad_scale=1.0)
        np.testing.assert_allclose(seen(engine), (5 - w).reshape(-1), rtol=1e-6)

    run(body, 2)
