"""Spec and the initialisers."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpcore.core.errors import ArgumentError, ConfigError
from fsdpcore.fsdp.units import initializers
from fsdpcore.fsdp.units.initializers import BLOCK_ELEMENTS, Initializer
from fsdpcore.fsdp.units.spec import Spec

TOTAL = 2 * BLOCK_ELEMENTS + 1001
RANDOM = [initializers.normal(0.5, 2.0), initializers.uniform(-1.0, 3.0)]


def _filled(
    initializer: Initializer,
    size: int,
    dtype: Any = np.float32,
    *,
    start: int = 0,
    seed: int = 0,
    name: str = "w",
) -> np.ndarray[Any, Any]:
    out = np.full(size, 7, dtype)
    initializer.fill(out, start, seed=seed, name=name)
    return out


# Spec


def test_spec_normalises_its_arguments() -> None:
    spec = Spec([2, np.int64(3)], "float64", initializers.ones)
    assert spec.shape == (2, 3)
    assert all(type(extent) is int for extent in spec.shape)
    assert spec.dtype == np.dtype(np.float64)
    assert isinstance(spec.dtype, np.dtype)
    assert spec.init == initializers.Ones()
    assert spec == Spec((2, 3), np.float64, initializers.Ones())


def test_spec_defaults_to_float32_zeros() -> None:
    spec = Spec((4,))
    assert spec.dtype == np.float32
    assert spec.init == initializers.zeros
    assert hash(spec) == hash(Spec(4))


@pytest.mark.parametrize(("shape", "size"), [((), 1), (5, 5), ((3, 0), 0), ((2, 3, 4), 24)])
def test_spec_size(shape: Any, size: int) -> None:
    assert Spec(shape).size == size


def test_spec_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Spec((2,)).shape = (3,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, -3),), "extent 1 of the shape of a Spec must be at least 0, got -3"),
        (((2, 1.5),), "extent 1 of the shape of a Spec must be an integer, got 1.5"),
        ((None,), "shape of a Spec must be a tuple of integers"),
        (("12",), "shape of a Spec must be a tuple of integers"),
        (((2,), "floot"), "NumPy does not know"),
        (((2,), None), "needs a dtype"),
        (((2,), object), "only numbers and bools"),
        (((2,), ">f4"), "byte order"),
        (((2,), np.float32, initializers.normal), "call it first"),
        (((2,), np.float32, 0.0), r"must be an initialiser such as initializers\.zeros"),
        (((2,), np.int32, initializers.normal()), "cannot fill a int32 parameter"),
        (((2,), np.complex64, initializers.uniform()), "cannot fill a complex64 parameter"),
        (((2,), ml_dtypes.int4, initializers.uniform()), "cannot fill a int4 parameter"),
        (
            ((2,), np.int32, initializers.constant(1.5)),
            "int32 parameter cannot hold the constant 1.5",
        ),
        (
            ((2,), np.uint8, initializers.constant(256)),
            "uint8 parameter cannot hold the constant 256",
        ),
        (
            ((2,), ml_dtypes.int4, initializers.constant(8)),
            "int4 parameter cannot hold the constant 8",
        ),
        (((2,), np.int32, initializers.constant(math.nan)), "cannot hold the constant nan"),
        (((2,), np.bool_, initializers.constant(2)), "bool parameter cannot hold the constant 2"),
        (((2,), np.float16, initializers.constant(1e6)), "overflows float16"),
    ],
)
def test_spec_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Spec(*arguments)


# Initialisers that are not random


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.bool_, np.complex64],
)
def test_zeros_ones_and_constant(dtype: Any) -> None:
    np.testing.assert_array_equal(_filled(initializers.zeros, 5, dtype), np.zeros(5, dtype))
    np.testing.assert_array_equal(_filled(initializers.ones, 5, dtype), np.ones(5, dtype))
    np.testing.assert_array_equal(_filled(initializers.constant(1), 5, dtype), np.ones(5, dtype))


def test_constant_holds_infinities_and_big_integers_exactly() -> None:
    assert np.isneginf(_filled(initializers.constant(-math.inf), 3, np.float16)).all()
    np.testing.assert_array_equal(_filled(initializers.constant(2**62 + 1), 2, np.int64), 2**62 + 1)


# Random initialisers


@pytest.mark.parametrize("initializer", RANDOM)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_range_is_that_range_of_the_whole(
    initializer: Initializer, dtype: Any, data: st.DataObject
) -> None:
    edges = st.sampled_from([0, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, TOTAL])
    cuts = data.draw(st.lists(edges | st.integers(0, TOTAL), min_size=2, max_size=2).map(sorted))
    start, stop = cuts
    whole = _filled(initializer, TOTAL, dtype)
    piece = _filled(initializer, stop - start, dtype, start=start)
    assert piece.tobytes() == whole[start:stop].tobytes()


@pytest.mark.parametrize("initializer", RANDOM)
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_shards_of_any_world_size_join_to_the_same_parameter(
    initializer: Initializer, world_size: int
) -> None:
    shard = -(-TOTAL // world_size)
    joined = np.concatenate(
        [
            _filled(initializer, min(shard, TOTAL - rank * shard), start=rank * shard)
            for rank in range(world_size)
        ]
    )
    assert joined.tobytes() == _filled(initializer, TOTAL).tobytes()


@pytest.mark.parametrize("initializer", RANDOM)
def test_strided_out_gets_the_same_values(initializer: Initializer) -> None:
    spread = np.zeros((50, 2), np.float32)
    initializer.fill(spread[:, 1], 3, seed=0, name="w")
    np.testing.assert_array_equal(spread[:, 1], _filled(initializer, 50, start=3))
    np.testing.assert_array_equal(spread[:, 0], 0)


@pytest.mark.parametrize("initializer", RANDOM)
def test_seed_name_and_block_give_different_values(initializer: Initializer) -> None:
    base = _filled(initializer, 100)
    assert base.tobytes() == _filled(initializer, 100).tobytes()
    others = [
        _filled(initializer, 100, seed=1),
        _filled(initializer, 100, seed=-1),
        _filled(initializer, 100, name="v"),
        _filled(initializer, 100, seed=2**200),
        _filled(initializer, 100, start=BLOCK_ELEMENTS),
    ]
    for other in others:
        assert np.count_nonzero(other == base) < 10


def test_seed_and_name_are_not_run_together() -> None:
    first = _filled(initializers.normal(), 10, seed=1, name="2.w")
    second = _filled(initializers.normal(), 10, seed=12, name=".w")
    assert first.tobytes() != second.tobytes()


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("initializer", RANDOM)
def test_half_types_are_the_float32_values_rounded(initializer: Initializer, half: Any) -> None:
    single = _filled(initializer, 1000, np.float32)
    assert _filled(initializer, 1000, half).tobytes() == single.astype(half).tobytes()


@pytest.mark.parametrize("initializer", RANDOM)
def test_float64_has_more_than_float32_precision(initializer: Initializer) -> None:
    values = _filled(initializer, 1000, np.float64)
    assert np.count_nonzero(values != values.astype(np.float32)) > 990


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_normal_has_its_moments(dtype: Any) -> None:
    # Tolerances of more than six standard errors for this many draws; the seed is fixed.
    values = _filled(initializers.normal(0.5, 2.0), TOTAL, dtype).astype(np.float64)
    assert values.mean() == pytest.approx(0.5, abs=0.035)
    assert values.std() == pytest.approx(2.0, abs=0.025)
    within = np.mean(np.abs(values - 0.5) < 2.0)
    assert within == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.008)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_uniform_has_its_range_and_moments(dtype: Any) -> None:
    values = _filled(initializers.uniform(-1.0, 3.0), TOTAL, dtype).astype(np.float64)
    assert values.min() >= -1.0
    assert values.max() <= 3.0
    assert values.mean() == pytest.approx(1.0, abs=0.02)
    counts, _ = np.histogram(values, bins=8, range=(-1.0, 3.0))
    assert np.abs(counts / TOTAL - 1 / 8).max() < 0.006


def test_blocks_do_not_draw_from_overlapping_parts_of_one_stream() -> None:
    # Values of 53 bits: a single one in common would be a coincidence of 1 in two million.
    values = _filled(initializers.uniform(), 2 * BLOCK_ELEMENTS, np.float64)
    first, second = values[:BLOCK_ELEMENTS].tolist(), values[BLOCK_ELEMENTS:].tolist()
    assert set(first).isdisjoint(second)


def test_neighbouring_blocks_are_not_correlated() -> None:
    values = _filled(initializers.normal(), 2 * BLOCK_ELEMENTS, np.float64).reshape(2, -1)
    assert abs(np.corrcoef(values)[0, 1]) < 6 / math.sqrt(BLOCK_ELEMENTS)


def test_values_do_not_depend_on_the_process() -> None:
    code = (
        "import numpy as np; from fsdpcore.fsdp.units import initializers;"
        "out = np.empty(4, np.float32);"
        "initializers.normal().fill(out, 70000, seed=3, name='w'); print(out.tobytes().hex())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "77"},
    )
    here = _filled(initializers.normal(), 4, start=70000, seed=3)
    assert run.stdout.strip() == here.tobytes().hex()


@pytest.mark.parametrize(
    "initializer", [*RANDOM, initializers.zeros, initializers.ones, initializers.constant(3.0)]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_fill_allocates_no_more_than_a_block(initializer: Initializer, dtype: Any) -> None:
    out = np.empty(4_000_000, dtype)
    initializer.fill(out[:10], 0, seed=0, name="w")
    tracemalloc.start()
    try:
        initializer.fill(out, 12345, seed=0, name="w")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Python objects (the generator, views) get 64 KiB on top of a block of the dtype drawn.
    assert peak <= BLOCK_ELEMENTS * max(4, out.dtype.itemsize) + 64 * 1024


def test_a_range_far_out_costs_no_more_than_its_blocks() -> None:
    # Drawing everything in front of it would take thousands of years.
    far = 10**18 + 5
    values = _filled(initializers.normal(), 20, start=far)
    assert values[3:].tobytes() == _filled(initializers.normal(), 17, start=far + 3).tobytes()


def test_filling_nothing_is_allowed() -> None:
    for initializer in (*RANDOM, initializers.zeros, initializers.ones, initializers.constant(2.0)):
        assert _filled(initializer, 0, start=5).size == 0


def test_convenience_functions_make_the_classes() -> None:
    assert initializers.zeros == initializers.Zeros()
    assert initializers.ones == initializers.Ones()
    assert initializers.constant(2) == initializers.Constant(2.0)
    assert initializers.normal(std=0.02) == initializers.Normal(0.0, 0.02)
    assert initializers.uniform(-1, 1) == initializers.Uniform(-1.0, 1.0)
    assert hash(initializers.normal(std=np.float64(0.5))) == hash(initializers.Normal(0.0, 0.5))


def test_numpy_scalars_do_not_upcast_the_draw() -> None:
    plain = _filled(initializers.normal(0.1, 0.3), 1000)
    assert (
        _filled(initializers.normal(np.float64(0.1), np.float64(0.3)), 1000).tobytes()
        == plain.tobytes()
    )
    plain = _filled(initializers.uniform(0.1, 0.3), 1000)
    assert (
        _filled(initializers.uniform(np.float64(0.1), np.float64(0.3)), 1000).tobytes()
        == plain.tobytes()
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: initializers.normal(std=-1.0), "std of Normal must be at least 0, got -1"),
        (lambda: initializers.normal(mean=math.nan), "mean of Normal must be finite"),
        (lambda: initializers.normal(std="1"), "std of Normal must be a real number, got '1'"),  # type: ignore[arg-type]
        (lambda: initializers.uniform(2.0, 1.0), "low <= high, got low=2 and high=1"),
        (lambda: initializers.uniform(high=math.inf), "high of Uniform must be finite"),
        (lambda: initializers.uniform(-1.7e308, 1.7e308), "high - low of Uniform must be finite"),
        (lambda: initializers.constant("x"), "value of Constant must be a real number, got 'x'"),  # type: ignore[arg-type]
        (lambda: initializers.constant(10**400), "beyond the range of float64"),
    ],
)
def test_initialisers_refuse_bad_numbers(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "initializer",
    [
        initializers.zeros,
        initializers.ones,
        initializers.constant(1.0),
        initializers.normal(),
        initializers.uniform(),
    ],
)
def test_fill_refuses_bad_arguments(initializer: Initializer) -> None:
    good = np.zeros(3, np.float32)
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    cases: list[tuple[Any, Any, str]] = [
        ([1.0], 0, "out must be a NumPy array, got list"),
        (np.zeros((2, 2), np.float32), 0, "out must be 1-D"),
        (np.zeros((), np.float32), 0, "out must be 1-D"),
        (np.zeros(3, object), 0, "object"),
        (frozen, 0, "read-only"),
        (good, -1, "start must be at least 0"),
        (good, 1.5, "start must be an integer"),
    ]
    for out, start, message in cases:
        with pytest.raises(ArgumentError, match=message):
            initializer.fill(out, start, seed=0, name="w")


def test_random_fill_refuses_a_seed_that_is_no_integer() -> None:
    with pytest.raises(ArgumentError, match="seed must be an integer"):
        initializers.normal().fill(np.zeros(3, np.float32), 0, seed=0.5, name="w")  # type: ignore[arg-type]
