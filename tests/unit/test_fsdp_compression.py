"""Engines whose parameters and gradients travel quantised."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from support.fsdp_steps import STRATEGIES, by_strategy, cause_of, launch, one_pass, train, values_of
from support.quantised import travelled, tree_sum

import fsdpcore as fc
from fsdpcore.core.geometry.layout import ParamRange

BLOCK = 16
INT4 = fc.Compression("int4", "int4", block=BLOCK)
FEEDBACK = fc.Compression("int4", "int4", block=BLOCK, error_feedback=True)
KEPT = fc.Compression("int4", "int4", block=BLOCK, keep=True)
SHAPES = {"a": {"w": (7, 9), "bias": (9,), "v": (3, 5, 2)}, "b": {"w": (9, 31)}, "c": {"gain": ()}}


def units() -> list[fc.Unit]:
    rng = np.random.default_rng(0)
    return [
        fc.Unit(name, {p: rng.normal(size=s).astype(np.float32) for p, s in params.items()})
        for name, params in SHAPES.items()
    ]


def gradient(unit: str, param: str, rank: int, step: int) -> NDArray[np.float32]:
    seed = [ord(unit), len(param), rank, step]
    return np.random.default_rng(seed).normal(size=SHAPES[unit][param]).astype(np.float32)


def take_step(engine: fc.FSDP, **update: Any) -> Any:
    rank, number = engine.backend.rank, engine.steps

    def give(unit: fc.Unit, params: Mapping[str, Any], grads: Any) -> None:
        for param in params:
            grads[param] = gradient(unit.name, param, rank, number)

    return train(engine, give, **update)[1]


def engine_of(
    backend: fc.Backend, strategy: fc.Strategy, compression: fc.Compression | None, **options: Any
) -> fc.FSDP:
    options.setdefault("optimizer", fc.optim.AdamW(lr=0.01))
    return fc.FSDP(units(), backend, strategy=strategy, compression=compression, **options)


def bits_of(engine: fc.FSDP) -> bytes:
    """What is computed with, and the masters."""
    seen = values_of(engine)
    state = engine.state_dict(full=True)
    arrays = [
        *(a for unit in seen.values() for a in unit.values()),
        *map(np.asarray, state.values()),
    ]
    return b"".join(array.tobytes() for array in arrays)


# Bits, and bytes.


def _trained(
    backend: fc.Backend,
    strategy: fc.Strategy,
    prefetch: int,
    compression: fc.Compression | None = INT4,
) -> tuple[bytes, int]:
    engine = engine_of(backend, strategy, compression, prefetch=prefetch, window=False)
    for _ in range(3):
        take_step(engine, clip=1.0)
    report = engine.report()
    assert report.measured.bytes_sent == report.plan.bytes_sent
    assert report.measured.peak_bytes == report.plan.peak_bytes
    return bits_of(engine), engine.stats.bytes_sent


@by_strategy
def test_all_ranks_have_the_same_bits_and_send_what_the_plan_says(strategy: fc.Strategy) -> None:
    found = [launch(_trained, args=(strategy, prefetch)) for prefetch in (0, 1)]
    assert len({bits for job in found for bits, _ in job}) == 1
    launch(_trained, args=(strategy, 1, FEEDBACK))
    plain = launch(_trained, args=(strategy, 0, None))
    assert sum(sent for _, sent in found[0]) < sum(sent for _, sent in plain)


def _looked_at(
    backend: fc.Backend, strategy: fc.Strategy, compression: fc.Compression
) -> tuple[list[bytes], list[int]]:
    """What is seen, and what is sent, wherever parameters change or are gathered again."""
    engine = engine_of(backend, strategy, compression, window=False)
    seen, sent = [bits_of(engine)], []
    for _ in range(2):
        take_step(engine)
        sent.append(engine.stats.bytes_sent)
        seen += [bits_of(engine), bits_of(engine)]
    with engine.units[0].writing() as shard:
        shard[:] = backend.rank
    seen.append(bits_of(engine))
    for number in range(2):
        with engine.step() as step:
            for unit in (*engine.units, *engine.units):
                with step.forward(unit):
                    pass
            if number:
                take = gradient("a", "w", backend.rank, 9)
                for unit in (*engine.units[::-1], *engine.units[::-1]):
                    with step.backward(unit) as (params, grads):
                        seen += [array.tobytes() for array in params.values()]
                        for param in params:
                            grads[param] = np.resize(take, params[param].shape)
                step.update()
        seen.append(bits_of(engine))
    engine.load_state_dict(engine.state_dict(full=True))
    seen.append(bits_of(engine))
    return seen, sent


def _after_a_failure(backend: fc.Backend, strategy: str, ahead: int) -> None:
    engine = engine_of(backend, fc.Strategy(strategy), KEPT, window=False, prefetch=ahead)

    def fail(*arguments: Any, **options: Any) -> None:
        raise MemoryError("none left")

    exchange: Any = engine._model.wire and engine._model.wire.gathering
    exchange.all_gather = fail
    with pytest.raises((MemoryError, fc.CommunicationError), match="none left"):
        _forward(engine)
    del exchange.all_gather
    with pytest.raises(fc.CommunicationError, match="MemoryError: none left"):
        _forward(engine)


def _forward(engine: fc.FSDP) -> list[bytes]:
    seen: list[bytes] = []
    with engine.step() as step:
        for unit in engine.units:
            with step.forward(unit) as params:
                seen += [array.tobytes() for array in params.values()]
    return seen


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_what_fails_in_the_background_breaks_the_job(strategy: str, ahead: int) -> None:
    launch(_after_a_failure, world_size=2, args=(strategy, ahead))


@by_strategy
def test_what_ranks_keep_packed_is_what_they_would_gather_again(strategy: fc.Strategy) -> None:
    again, kept = (launch(_looked_at, args=(strategy, each)) for each in (INT4, KEPT))
    assert [seen for seen, _ in kept] == [seen for seen, _ in again]
    launch(_trained, args=(strategy, 1, KEPT))
    place = strategy.place(4)
    keeps = place.gathers and not place.whole_parameters and not place.keeps_part
    for (_, less), (_, more) in zip(kept, again, strict=True):
        assert less < more if keeps else less == more


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_kept_for_quantising_is_counted(keep: bool) -> None:
    def body(backend: fc.Backend) -> None:
        unit = fc.Unit("a", {"w": np.zeros((8, 16), np.float32), "b": np.zeros(3, np.float32)})
        smaller = fc.Unit("s", {"w": np.zeros((2, 8), np.float32)})
        compression = fc.Compression(
            "int4", "int4", exact=("a.b",), error_feedback=True, block=16, keep=keep
        )
        estimate = functools.partial(fc.memory_estimate, [unit, smaller], 2, optimizer_states=0)
        engine = fc.FSDP(
            [unit, smaller], backend, optimizer=fc.optim.SGD(lr=0.1), compression=compression
        )
        train(engine, lambda unit, params, grads: None)
        # 131 values in two chunks: rank 0 has 66 of w, rank 1 has 62, b, and one of padding.
        large, small = 5 * 12, 4 * 12 + 3 * 4
        own = large if backend.rank == 0 else small
        gathers, scatters = own + large + small, large + small + 2 * own
        gathers += 2 * 12 if keep else 0  # the other unit's
        errors = 4 * (132 + 16)
        assert engine.held().quantising == gathers + scatters + errors
        more = estimate(compression=compression, rank=backend.rank)
        assert more.total - estimate(rank=backend.rank).total == gathers + scatters + errors
        engine.release()
        assert engine.held().total == 0

    launch(body, 2)


def _flat(name: str, of: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """A unit's arrays one behind the other, and which elements are quantised."""
    arrays = {param: np.asarray(of(param)) for param in SHAPES[name]}
    flat = np.concatenate([array.reshape(-1) for array in arrays.values()])
    coded = np.concatenate([np.full(a.size, a.ndim > 1) for a in arrays.values()])
    return flat, coded


def _bounds(size: int, ranks: int) -> list[int]:
    """Of shards."""
    return [min(size, -(-size // ranks) * rank) for rank in range(ranks + 1)]


def _mean(backend: fc.Backend, strategy: fc.Strategy) -> None:
    """One step of SGD shows the mean of the gradients, and the norm is that of what is applied."""
    compression = fc.Compression("int8", "int8", block=BLOCK)
    optimizer = fc.optim.SGD(lr=1.0)
    engine = engine_of(backend, strategy, compression, optimizer=optimizer)
    before = {name: array.copy() for name, array in engine.state_dict(full=True).items()}
    _check_seen(engine, strategy, before)
    norm = take_step(engine, clip=1e9)
    after = engine.state_dict(full=True)
    squares = 0.0
    for name in SHAPES:
        parts = [_flat(name, lambda p, r=r, n=name: gradient(n, p, r, 0)) for r in range(4)]
        flats, coded = [flat for flat, _ in parts], parts[0][1]
        size = coded.size
        if strategy.name == "hybrid_shard":
            bounds = _bounds(size, 2)
            come = [travelled(flat, bounds, coded, 8, BLOCK) for flat in flats]
            halves = [come[0] + come[1], come[2] + come[3]]
            padded = -(-size // 2)
            inner = sorted({min(size, b) for s in (0, padded) for b in (s, s - (-padded // 2))})
            total = sum(travelled(half, [*inner, size], coded, 8, BLOCK) for half in halves)
            total = travelled(total, [*inner, size], coded, 8, BLOCK)
        elif strategy.name in ("no_shard", "shard_optimizer"):
            padded = size if strategy.name == "no_shard" else -(-size // 4) * 4
            bounds = [
                min(size, b) for b in np.cumsum([0, *map(len, np.array_split(range(padded), 4))])
            ]
            total = tree_sum([travelled(flat, bounds, coded, 8, BLOCK) for flat in flats])
            total = travelled(total, bounds, coded, 8, BLOCK)
        else:
            bounds = _bounds(size, 4)
            total = tree_sum([travelled(flat, bounds, coded, 8, BLOCK) for flat in flats])
        mean = total / np.float32(4)
        squares += float((mean.astype(np.float64) ** 2).sum())
        old, new = (_flat(name, lambda p, s=s, n=name: s[f"{n}.{p}"])[0] for s in (before, after))
        assert_array_equal(new, old - mean)
    assert_allclose(norm, squares**0.5, rtol=1e-6)


def _check_seen(engine: fc.FSDP, strategy: fc.Strategy, masters: Mapping[str, Any]) -> None:
    """What ranks compute with are the masters as they travel, or exactly these at first."""
    shards = {"full_shard": 4, "hybrid_shard": 2}.get(strategy.name)
    for name, arrays in values_of(engine).items():
        seen, coded = _flat(name, arrays.__getitem__)
        flat, _ = _flat(name, lambda p, n=name: masters[f"{n}.{p}"])
        if shards is not None:
            flat = travelled(flat, _bounds(flat.size, shards), coded, 8, BLOCK)
        assert_array_equal(seen, flat)


@by_strategy
def test_gradients_are_quantised_once_in_each_hop(strategy: fc.Strategy) -> None:
    launch(_mean, args=(strategy,))


# State.


def _resumed(backend: fc.Backend, folder: str) -> None:
    for number, (name, strategy) in enumerate(STRATEGIES.items()):
        whole = engine_of(backend, strategy, FEEDBACK)
        for _ in range(2):
            take_step(whole)
        path = f"{folder}/{name}"
        fc.checkpoint.save(path, whole, backend)
        state = whole.state_dict(full=True, to=number % 4)
        again = engine_of(backend, strategy, FEEDBACK), engine_of(backend, strategy, FEEDBACK)
        fc.checkpoint.load(path, again[0], backend)
        again[1].load_state_dict(state, src=number % 4)
        for engine in (whole, *again):
            for _ in range(2):
                take_step(engine)
        bits = [bits_of(engine) for engine in (whole, *again)]
        assert bits[0] == bits[1] == bits[2], name


def test_a_job_that_resumes_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    launch(_resumed, args=(str(tmp_path),))


def test_parameters_go_to_and_from_an_engine_without_compression() -> None:
    def body(backend: fc.Backend) -> None:
        strategy = fc.Strategy("shard_grad_op")
        engine, other = (engine_of(backend, strategy, each) for each in (FEEDBACK, None))
        take_step(engine)
        report = other.load_state_dict(engine.state_dict())
        states = {name.split("/")[1].rstrip("0123456789") for name in report.unexpected}
        assert states == {"received", "residual_of_4_ranks_"}
        take_step(engine)
        engine.load_state_dict(other.state_dict())
        masters = other.state_dict(full=True)
        for name, arrays in values_of(engine).items():
            for param, array in arrays.items():
                assert_array_equal(array, masters[f"{name}.{param}"])

    launch(body)


def _residual(engine: fc.FSDP) -> float:
    """The sum of what quantising the gradients of this rank has left out."""
    state = engine.state_dict()
    arrays = [state[name] for name in state if "residual" in name]
    return sum(float(np.abs(each.array).sum()) for a in arrays for each in a.pieces)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_checkpoint_loads_on_any_number_of_ranks_with_compression_or_without(
    strategy: str, tmp_path: Path
) -> None:
    def saving(backend: fc.Backend) -> dict[str, Any]:
        engine = engine_of(backend, fc.Strategy(strategy), FEEDBACK)
        take_step(engine)
        assert _residual(engine)
        fc.checkpoint.save(str(tmp_path), engine, backend)
        return engine.state_dict(full=True)

    def loading(backend: fc.Backend) -> list[dict[str, Any]]:
        found = []
        for other, compression in ((strategy, FEEDBACK), ("full_shard", None), ("no_shard", INT4)):
            engine = engine_of(backend, fc.Strategy(other), compression)
            take_step(engine)
            fc.checkpoint.load(str(tmp_path), engine, backend)
            assert _residual(engine) == 0
            assert not engine.partially_updated
            found.append(engine.state_dict(full=True))
        return found

    saved, *_ = launch(saving)
    for state in launch(loading, world_size=2)[0]:
        for name in ("a.w", "b.w"):
            assert_array_equal(state[name], saved[name])


def _goes_on(backend: fc.Backend, strategy: fc.Strategy, folder: str) -> None:
    """Nothing that is looked at, or loaded as it is, changes a bit of what comes."""
    optimizer = fc.optim.Average(fc.optim.AdamW(lr=0.01), ema=0.5)

    def averaged(engine: fc.FSDP) -> None:
        with engine.averaged():
            values_of(engine)

    def saved(engine: fc.FSDP) -> None:
        fc.checkpoint.save(folder, engine, backend)
        fc.checkpoint.load(folder, engine, backend)

    def loaded(engine: fc.FSDP) -> None:
        engine.load_state_dict(engine.state_dict())

    found = []
    for act in (None, averaged, saved, loaded):
        engine = engine_of(backend, strategy, FEEDBACK, optimizer=optimizer)
        for _ in range(3):
            take_step(engine)
            if act is not None:
                act(engine)
        found.append(bits_of(engine))
    assert found[1:] == found[:1] * 3


@by_strategy
def test_looking_and_loading_change_no_bit_of_what_comes(
    strategy: fc.Strategy, tmp_path: Path
) -> None:
    launch(_goes_on, args=(strategy, str(tmp_path)))


# Error feedback.


def _given(
    engine: fc.FSDP, scale: float, divisor: float | None = None, bad: int = -1, **update: Any
) -> None:
    """A step of gradients that are larger; a number of rank ``bad`` is inf."""
    rank, number = engine.backend.rank, engine.steps

    def give(unit: fc.Unit, params: Mapping[str, Any], grads: Any) -> None:
        for param in params:
            grads[param] = gradient(unit.name, param, rank, number) * np.float32(scale)
        if unit.name == "b" and rank == bad:
            grads["w"][0, 0] = np.inf

    with engine.step(divisor=divisor) as step:
        one_pass(step, engine.units, give)
        if update.pop("leave", False):
            raise ZeroDivisionError
        step.update(**update)


@by_strategy
def test_what_is_left_out_comes_later_and_counts_as_much_as_then(strategy: fc.Strategy) -> None:
    """So all steps together are off by no more than what the last one has left out."""

    def body(backend: fc.Backend) -> None:
        sgd = fc.optim.SGD(lr=1.0)
        engines = [
            engine_of(backend, strategy, each, optimizer=sgd, window=False)
            for each in (FEEDBACK, None)
        ]
        steps: list[tuple[float, dict[str, Any]]] = [
            *[(1.0, {})] * 6,
            (1e4, {"divisor": 4e4}),
            (1.0, {}),
            (1e6, {"clip": 3.0}),
            *[(1.0, {})] * 6,
        ]
        for scale, options in steps:
            for engine in engines:
                _given(engine, scale, **options)
            ours, exact = (engine.state_dict(full=True) for engine in engines)
            for name, array in exact.items():
                if "w" in name or "v" in name:
                    assert np.abs(ours[name] - array).max() < 0.6, name

    launch(body)


@pytest.mark.parametrize("how", ["skip", "raise", "leave"])
@by_strategy
def test_nothing_is_left_of_gradients_that_were_not_applied(
    strategy: fc.Strategy, how: str
) -> None:
    def body(backend: fc.Backend) -> None:
        engine = engine_of(backend, strategy, FEEDBACK, window=False)
        take_step(engine)
        assert _residual(engine)
        if how == "skip":
            _given(engine, 1.0, bad=1, skip_nonfinite=True)
        elif how == "raise":
            with pytest.raises(fc.NonFiniteGradientError):
                _given(engine, 1.0, bad=1)
        else:
            with pytest.raises(ZeroDivisionError):
                _given(engine, 1.0, leave=True)
        assert _residual(engine) == 0

    launch(body)


# What is found, and what is refused.


def test_nan_of_one_rank_is_found_and_leaves_nothing_behind() -> None:
    def body(backend: fc.Backend) -> None:
        engine = engine_of(backend, fc.Strategy("full_shard"), FEEDBACK)

        def give(unit: fc.Unit, params: Mapping[str, Any], grads: Any) -> None:
            for param in params:
                grads[param] = np.ones(SHAPES[unit.name][param], np.float32)
            if unit.name == "b" and backend.rank == 2:
                grads["w"][3, 4] = np.nan

        with pytest.raises(fc.NonFiniteGradientError, match=r"b\.w"):
            train(engine, give, clip=1.0)
        assert np.isfinite(take_step(engine, clip=1.0))

    launch(body)


def test_ranks_of_one_host_move_float32_if_so_chosen() -> None:
    def body(backend: fc.Backend) -> tuple[bytes, int]:
        near = fc.Compression("int4", "int4", block=BLOCK, hosts_only=True)
        strategy = fc.Strategy("hybrid_shard", shard_group_size=2)
        engine = engine_of(backend, strategy, near)
        take_step(engine)
        assert engine.windowed
        assert engine.report().measured.bytes_sent == engine.report().plan.bytes_sent
        return bits_of(engine), engine.stats.bytes_sent

    two = fc.launch(body, world_size=4, transport="sim://?hosts=2", timeout=30)
    one = launch(body)
    assert len({bits for bits, _ in two}) == len({bits for bits, _ in one}) == 1
    assert two[0][0] != one[0][0]
    assert two[0][1] < one[0][1]


def test_ranks_agree_on_what_is_quantised_where_some_groups_span_hosts() -> None:
    def body(backend: fc.Backend) -> tuple[list[int], bytes]:
        strategy = fc.Strategy("hybrid_shard", shard_group_size=2)
        found = []
        for near in (True, False):
            how = fc.Compression("int4", "int4", error_feedback=True, hosts_only=near)
            engine = engine_of(backend, strategy, how)
            for _ in range(2):
                take_step(engine)
            found.append(bits_of(engine))
        assert found[0] == found[1]
        return list(backend.hosts), found[0]

    found = fc.launch(body, world_size=6, transport="sim://?hosts=2", timeout=30)
    assert found[0][0] == [0, 0, 0, 1, 1, 1]
    assert len({bits for _, bits in found}) == 1


def test_ranks_with_different_divisors_are_told() -> None:
    def body(backend: fc.Backend) -> None:
        engine = engine_of(backend, fc.Strategy("full_shard"), INT4)
        unit = engine.units[1]
        grads = {"w": np.ones(SHAPES["b"]["w"], np.float32)}
        unit.reduce_gradients(grads, divisor=4.0 + backend.rank % 2)

    assert isinstance(cause_of(body, 4), fc.MismatchError)


def test_reductions_in_the_background_and_others_have_groups_of_their_own() -> None:
    def body(backend: fc.Backend) -> None:
        strategy = fc.Strategy("hybrid_shard", shard_group_size=2)
        engine = engine_of(backend, strategy, None)
        rounds = 20
        for late in range(rounds):  # while one is under way, others are waited for
            for number, unit in enumerate(engine.units):
                ones = {p: np.ones(s, np.float32) for p, s in SHAPES[unit.name].items()}
                scaled = {p: a * np.float32(1 + backend.rank) for p, a in ones.items()}
                unit.reduce_gradients(scaled, async_op=number == late % 2)
        for unit in engine.units:
            assert set(unit.grad_shard[: unit.valid_size].tolist()) <= {2.5 * rounds}

    launch(body)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"virtual_ranks": 2}, "virtual_ranks, which promise the same bits"),
        ({"offload": fc.Offload()}, "offload"),
        ({"precision": fc.Precision("bfloat16", "float32")}, "computed in bfloat16"),
        ({"compression": "int8"}, r"must be a fc.Compression"),
        (
            {"compression": fc.Compression(exact=("*.w", "x.*"))},
            r"'x\.\*' of Compression matches no",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    def body(backend: fc.Backend) -> None:
        engine_of(backend, fc.Strategy("full_shard"), **{"compression": INT4, **options})

    error = cause_of(body)
    assert isinstance(error, fc.ArgumentError)
    assert re.search(words, str(error))


@pytest.mark.parametrize(
    "options",
    [
        {"gather": "int2"},
        {"block": 48},
        {"gather": None, "reduce": None},
        {"exact": (1,)},
        {"gather": None, "keep": True},
    ],
)
def test_a_compression_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(fc.ArgumentError, match="Compression"):
        fc.Compression(**options)


@pytest.mark.parametrize(
    ("words", "compression"),
    [
        ("int4", fc.Compression("int4", "int4")),
        ("int8, int4", fc.Compression("int8", "int4")),
        ("int8,int4,keep", fc.Compression("int8", "int4", keep=True)),
        ("int4,keep", fc.Compression("int4", "int4", keep=True)),
    ],
)
def test_a_compression_in_words(words: str, compression: fc.Compression) -> None:
    assert fc.Compression.parse(words) == compression


@pytest.mark.parametrize(
    "words", ["", "keep", "int7", "int8,int4,int4", "int8,,keep", "int8,keeps"]
)
def test_words_that_are_no_compression_are_refused(words: str) -> None:
    with pytest.raises(fc.ArgumentError, match=r"such as 'int8' or 'int8,int4,keep'; got"):
        fc.Compression.parse(words)


@by_strategy
def test_what_is_left_out_comes_with_later_gradients(strategy: fc.Strategy) -> None:
    def body(backend: fc.Backend) -> None:
        engine = engine_of(backend, strategy, FEEDBACK, optimizer=fc.optim.SGD(lr=1.0))
        before = {name: array.copy() for name, array in engine.state_dict(full=True).items()}
        for _ in range(50):
            train(
                engine,
                lambda unit, params, grads: grads.update(
                    {p: gradient(unit.name, p, backend.rank, 0) for p in params}
                ),
            )
        after = engine.state_dict(full=True)
        for unit, param in ((unit, param) for unit, params in SHAPES.items() for param in params):
            mean = sum(gradient(unit, param, rank, 0) for rank in range(4)) / 4
            moved = before[f"{unit}.{param}"] - after[f"{unit}.{param}"]
            assert_allclose(moved / 50, mean, atol=0.02)

    launch(body)


@by_strategy
def test_what_is_computed_with_stays_near_the_masters(strategy: fc.Strategy) -> None:
    def body(backend: fc.Backend) -> None:
        compression = fc.Compression("int8", "int8", block=BLOCK)
        engine = engine_of(backend, strategy, compression, optimizer=fc.optim.SGD(lr=1.0))
        for _ in range(5):
            take_step(engine)
        masters = engine.state_dict(full=True)
        for unit, arrays in values_of(engine).items():
            for param, array in arrays.items():
                assert_allclose(array, masters[f"{unit}.{param}"], atol=0.03)

    launch(body)


@pytest.mark.parametrize("name", ["full_shard", "hybrid_shard", "no_shard"])
def test_hosts_only_quantises_in_groups_of_several_hosts(name: str) -> None:
    def body(backend: fc.Backend) -> list[Any]:
        near = fc.Compression("int4", "int4", block=BLOCK, hosts_only=True)
        each = fc.Compression("int4", "int4", block=BLOCK)
        return [
            {
                op.kind: sum(o.nbytes for o in plan.operations if o.kind == op.kind)
                for plan in [engine_of(backend, STRATEGIES[name], chosen, window=False).plan()]
                for op in plan.operations
            }
            for chosen in (near, each, None)
        ]

    for near, each, plain in fc.launch(body, world_size=4, transport="sim://?hosts=2", timeout=30):
        local = {"all_gather", "reduce_scatter"} if name == "hybrid_shard" else set()
        for kind, nbytes in near.items():
            assert nbytes == (plain if kind in local else each)[kind]


def test_no_patterns_leave_nothing_exact() -> None:
    bias = ParamRange("b", (5,), 0)
    assert fc.Compression(exact=()).exact_spans("a", [bias]) == ()
    assert fc.Compression().exact_spans("a", [bias]) == ((0, 5),)


def test_what_is_kept_is_counted_where_halves_of_a_shard_differ() -> None:
    def body(backend: fc.Backend) -> None:
        unit = fc.Unit("a", {"w": np.zeros((8, 16), np.float32), "b": np.zeros(40, np.float32)})
        strategy = fc.Strategy("hybrid_shard", shard_group_size=2)
        engine = fc.FSDP(
            [unit], backend, strategy=strategy, optimizer=fc.optim.SGD(lr=0.1), compression=INT4
        )
        train(engine)
        assert engine.held().quantising == engine.plan().quantising

    launch(body)
