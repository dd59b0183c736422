from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.simulated.backend import SimBackend
from support import oracle
from support.arrays import Array, arrays_of, check_same
from support.spmd import run_on

import fsdpcore as fc
from fsdpcore.collectives.shared.reducing import prepare
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.reductions import BLOCK, ReduceOp, Reduction


@pytest.mark.parametrize(
    ("dtype", "op"), oracle.COMBINATIONS, ids=[f"{d}-{o}" for d, o in oracle.COMBINATIONS]
)
def test_reduction_of_parts(dtype: np.dtype[Any], op: str) -> None:
    for count in (1, 2, 3, 5, 8, 13):
        parts = arrays_of(count, (37,), dtype)
        kept = [part.copy() for part in parts]
        out = np.empty(37, dtype)
        Reduction.of(op, dtype).reduce(parts, out)
        check_same(out, oracle.reduced(kept, op), f"{op} of {count} parts of {dtype}")
        for part, before in zip(parts, kept, strict=True):
            check_same(part, before, "an input")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.complex64, np.int16], ids=str)
@pytest.mark.parametrize("place", [0, 1, 4])
def test_result_may_replace_an_input(dtype: Any, place: int) -> None:
    parts = arrays_of(5, (BLOCK + 11,), dtype)
    expected = oracle.reduced(parts, "prod")
    Reduction.of("prod", np.dtype(dtype)).reduce(parts, parts[place])
    check_same(parts[place], expected, f"into part {place}")


def test_blocks_are_seamless() -> None:
    for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5):
        for dtype in (np.float32, oracle.HALVES[1]):
            parts = arrays_of(3, (size,), dtype)
            out = np.empty(size, dtype)
            Reduction.of("mean", np.dtype(dtype)).reduce(parts, out)
            check_same(out, oracle.reduced(parts, "mean"), f"{size} elements")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_scan(count: int) -> None:
    """Of all parts up to each one, or before each one; into new arrays, or in place."""
    for dtype, op in oracle.COMBINATIONS:
        reduction = Reduction.of(op, dtype)
        for size in (0, 37, 4 * BLOCK // count + 3):
            parts = arrays_of(count, (size,), dtype)
            expected = [oracle.reduced(parts[: end + 1], op) for end in range(count)]
            for before in (0, 1) if op != "mean" else (0,):
                new = [np.empty(size, dtype) for _ in range(count + before)]
                in_place = [part.copy() for part in [*parts, *parts[:before]]]
                for outs, sources in ((new, parts), (in_place, in_place[:count])):
                    reduction.scan(sources, outs)
                    for end, (out, value) in enumerate(zip(outs[before:], expected, strict=True)):
                        check_same(out, value, f"{op} of {dtype}, {size} of {end + 1} parts")
                    if before:
                        assert (outs[0] == np.full((), reduction.identity, dtype)).all()


@pytest.mark.parametrize("count", [2, 3, 5, 8, 13])
def test_scan_by_a_function_combines_as_reduce_does(count: int) -> None:
    """In the order of the parts, and in the tree: of differences both can be told."""
    op = ReduceOp.create("difference", lambda left, right: left - right)
    for dtype in (np.int64, np.float16):
        reduction, parts = Reduction.of(op, np.dtype(dtype)), arrays_of(count, (37,), dtype)
        outs = [np.empty(37, dtype) for _ in parts]
        reduction.scan(parts, outs)
        for end, out in enumerate(outs):
            alone = np.empty(37, dtype)
            reduction.reduce(parts[: end + 1], alone)
            check_same(out, alone, f"{end + 1} of {count} parts of {np.dtype(dtype)}")


def test_scan_of_nothing() -> None:
    """What the only rank of a group gets of those before it."""
    out = np.ones(3, np.int32)
    Reduction.of("min", out.dtype).scan([], [out])
    assert (out == np.iinfo(np.int32).max).all()


class _Scratch:
    """What a prepared reduction needs of a context."""

    def scratch(self, size: int, dtype: np.dtype[Any]) -> Array:
        return np.empty(size, dtype)


@pytest.mark.parametrize("count", range(2, 10))
def test_a_prepared_reduction_has_the_same_bits_each_time(count: int) -> None:
    context: Any = _Scratch()
    for dtype, op in oracle.COMBINATIONS:
        parts, reduction = arrays_of(count, (33,), dtype), Reduction.of(op, dtype)
        expected, found = np.empty(33, dtype), np.empty(33, dtype)
        reduce = prepare(context, reduction, parts)
        for turn in range(2):
            for part in parts:
                np.copyto(part, np.roll(part, turn))
            reduction.reduce(parts, expected)
            reduce(found)
            check_same(found, expected, f"{op} of {dtype}")


def test_order_is_the_tree_of_six() -> None:
    """((0 1)(2 3))(4 5), with numbers for which every other order gives another sum."""
    parts = [np.array([x], np.float32) for x in (1e8, 3.0, -1e8, 5.0, 7.0, 2.0**-20)]
    a, b, c, d, e, f = (part[0] for part in parts)
    out = np.empty(1, np.float32)
    Reduction.of("sum", np.dtype(np.float32)).reduce(parts, out)
    assert out[0] == ((a + b) + (c + d)) + (e + f)
    assert out[0] != ((((a + b) + c) + d) + e) + f


def test_halves_are_rounded_once() -> None:
    """In float16 itself, adding 1 to 2048 changes nothing."""
    parts = [np.array([x], np.float16) for x in (2048, 1, 1, 1, 1, 1, 1, 1)]
    out = np.empty(1, np.float16)
    Reduction.of("sum", np.dtype(np.float16)).reduce(parts, out)
    assert out[0] == 2056  # 2055, rounded to a multiple of two
    Reduction.of("mean", np.dtype(np.float16)).reduce([np.full(1, 6e4, np.float16)] * 4, out)
    assert out[0] == np.float16(6e4)


def test_no_warning_whatever_the_values_and_settings() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 0.0], np.float32)
    with np.errstate(all="ignore"):
        cast = {dtype: values.astype(dtype) for dtype in (*oracle.FLOATS, *oracle.COMPLEXES)}
    for dtype, some in cast.items():
        for op in oracle.OPS:
            if oracle.allowed(op, dtype):
                with np.errstate(all="raise"):
                    reduction = Reduction.of(op, dtype)
                    out = np.empty_like(some)
                    reduction.reduce([some, some[::-1].copy(), some], out)
                    total = reduction.load(some)
                    reduction.combine(total, total, total)
                    reduction.store(total, out, 3)


def test_infinite_parts_of_complex_numbers_stay_apart() -> None:
    part = np.array([complex(3, np.inf)], np.complex64)
    out = np.empty(1, np.complex64)
    Reduction.of("mean", np.dtype(np.complex64)).reduce([part] * 3, out)
    assert (out[0].real, out[0].imag) == (3.0, np.inf)


def test_product_of_complex_numbers_is_the_same_in_every_position() -> None:
    left, right = arrays_of(2, (64,), np.complex64)
    reduction = Reduction.of("prod", np.dtype(np.complex64))
    whole = np.empty(64, np.complex64)
    reduction.combine(left, right, whole)
    for start in range(64):
        for size in (1, 2, 3, 5):
            piece: Array = left[start : start + size].copy()
            reduction.combine(piece, right[start : start + size], piece)
            check_same(piece, whole[start : start + size], f"{size} from {start}")


@pytest.mark.parametrize("name", oracle.OPS)
def test_names(name: str) -> None:
    dtype = np.dtype(np.bool_ if name in oracle.LOGICAL else np.int64)
    if name == "mean":
        dtype = np.dtype(np.float64)
    assert Reduction.of(name, dtype) == Reduction.of(ReduceOp(name), dtype)
    assert Reduction.of(name, dtype).name == name


@pytest.mark.parametrize("op", ["median", "SUM", "", None, 3, ["sum"]])
def test_unknown_ops(op: Any) -> None:
    with pytest.raises(ArgumentError, match="known are 'sum', 'mean'"):
        Reduction.of(op, np.dtype(np.float32))


def test_ops_without_a_meaning() -> None:
    for dtype in oracle.DTYPES:
        for op in oracle.OPS:
            if not oracle.allowed(op, dtype):
                with pytest.raises(ArgumentError, match=str(dtype)):
                    Reduction.of(op, dtype)


# Reductions of the user's own.


def _longer(left: Any, right: Any) -> Any:
    """Associative, but not commutative: the last one that is not zero."""
    return np.where(right != 0, right, left)


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float16, np.complex128], ids=str)
def test_an_own_reduction_combines_in_the_order_of_ranks(dtype: Any) -> None:
    op = ReduceOp.create("latest", _longer)
    parts = [np.array([n, n % 2, 0], dtype) for n in range(5)]
    out = np.empty(3, dtype)
    Reduction.of(op, np.dtype(dtype)).reduce(parts, out)
    assert out.tolist() == [4, 1, 0]
    assert Reduction.of(op, np.dtype(dtype)).name == "latest"
    assert "latest" not in [known.value for known in ReduceOp]


@pytest.mark.parametrize("name", ["sum", "", "a b", 3, None])
def test_names_that_an_own_reduction_cannot_have(name: Any) -> None:
    with pytest.raises(ArgumentError, match="reduction"):
        ReduceOp.create(name, _longer)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda left, right: left.sum(), "has to keep shape and dtype"),
        (lambda left, right: (left + right) * 1j, "has to keep shape and dtype"),
        (lambda left: left, "failed"),
    ],
)
def test_own_functions_that_do_not_fit(function: Any, words: str) -> None:
    op = ReduceOp.create("mine", function)
    with pytest.raises(ArgumentError, match=words):
        Reduction.of(op, np.dtype(np.float32))
    with pytest.raises(ArgumentError, match="no function"):
        ReduceOp.create("mine", 3)  # type: ignore[arg-type]


def _reduce_by_own(backend: fc.Backend) -> None:
    """Every algorithm keeps the order of ranks, and the ranks compare the name."""
    op = ReduceOp.create("latest", _longer)
    mine = np.zeros((40, 3), np.int64)
    mine[backend.rank :: 2] = backend.rank + 1
    parts = fc.all_gather(mine[None], backend)
    expected = np.zeros_like(mine)
    for part in parts:
        expected = _longer(expected, part)
    for name in ("auto", "doubling", "direct", "rabenseifner", "hierarchical", "star"):
        np.testing.assert_array_equal(fc.all_reduce(mine, backend, op=op, algorithm=name), expected)
    found = fc.reduce(mine, backend, op=op, root=backend.world_size - 1, algorithm="tree")
    if found is not None:
        np.testing.assert_array_equal(found, expected)
    with fc.coalesce(backend) as batch:
        both = [batch.all_reduce(mine, op=op), batch.all_reduce(mine[:2], op="max")]
    np.testing.assert_array_equal(both[0].result(), expected)
    np.testing.assert_array_equal(both[1].result(), parts[:, :2].max(axis=0))
    with pytest.raises(ArgumentError, match="ring"):
        fc.all_reduce(mine, backend, op=op, algorithm="ring")
    other = ReduceOp.create(f"own{backend.rank}", _longer)
    with pytest.raises(fc.MismatchError, match="own1"):
        fc.all_reduce(mine, backend, op=other)


@pytest.mark.parametrize("world_size", [2, 5])
def test_all_algorithms_keep_the_order_of_ranks(world_size: int) -> None:
    run_on(SimBackend, _reduce_by_own, world_size=world_size)


def test_ranks_that_want_means_of_different_dtypes_are_refused() -> None:
    def body(backend: fc.Backend) -> str:
        op = fc.ReduceOp.mean_as((np.float32, np.float64)[backend.rank])
        with pytest.raises(fc.MismatchError) as caught:
            fc.all_reduce(np.arange(3), backend, op=op)
        return str(caught.value)

    for text in run_on(SimBackend, body, world_size=2):
        assert "mean_as(float32)" in text
        assert "mean_as(float64)" in text


def test_the_refusal_of_a_mean_says_how_to_have_it() -> None:
    with pytest.raises(ArgumentError, match=r"ReduceOp\.mean_as\(np\.float64\)"):
        Reduction.of("mean", np.dtype(np.int32))
    with pytest.raises(ArgumentError, match="take 'mean'"):
        Reduction.of(ReduceOp.mean_as("float16"), np.dtype(np.float32))
    assert ReduceOp.mean_as("float16") is ReduceOp.mean_as(np.float16)


# Two functions of one name.


def _make(larger: bool) -> Any:
    """Functions that differ in one name, and in what they are called."""
    if larger:
        return lambda left, right: np.maximum(left, right)
    return lambda left, right: np.minimum(left, right)


def _through(inner: Any) -> Any:
    return lambda left, right: inner(left, right)


def _apply(inner: Any, left: Any, right: Any) -> Any:
    return inner(left, right)


def _with_default(inner: Any) -> Any:
    def combine(left: Any, right: Any, inner: Any = inner) -> Any:
        return inner(left, right)

    return combine


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_make(True), _make(False)),
        (lambda left, right: left + right, lambda left, right: left - right),
        (lambda left, right: left + 2 * right, lambda left, right: left + 3 * right),
        (np.maximum, np.minimum),
        (np.maximum, _make(True)),
        (_through(np.maximum), _through(np.minimum)),
        (functools.partial(np.add), functools.partial(np.multiply)),
        (functools.partial(_apply, np.add), functools.partial(_apply, np.multiply)),
        (_with_default(np.add), _with_default(np.multiply)),
        (np.vectorize(lambda a, b: a + b), np.vectorize(lambda a, b: a - b)),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_two_functions_of_one_name_are_told_apart(one: Any, other: Any, batched: bool) -> None:
    def body(backend: fc.Backend) -> str:
        op = ReduceOp.create("mine", (one, other)[backend.rank])
        with pytest.raises(fc.MismatchError) as caught:
            if batched:
                with fc.coalesce(backend) as batch:
                    batch.all_reduce(np.ones(3), op=op)
            else:
                fc.all_reduce(np.ones(3), backend, op=op)
        return str(caught.value)

    first, second = run_on(SimBackend, body, world_size=2)
    assert first == second
    assert first.count("mine (function ") == 2


class _Latest:
    """As ``_longer``, of objects that differ from rank to rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, left: Any, right: Any) -> Any:
        return _longer(left, right)

    def combine(self, left: Any, right: Any) -> Any:
        return _longer(left, right)


def _called(function: Any, times: int) -> Any:
    for _ in range(times):
        function(1.0, 2.0)
    return function


def _own_functions(rank: int) -> list[Any]:
    """Equal on all ranks, but for what stands around them."""

    def itself(left: Any, right: Any) -> Any:
        assert callable(itself), rank
        return np.where(right != 0, right, left)

    return [
        np.maximum,
        _longer,
        _make(True),
        _through(_longer),
        _Latest(rank),
        _Latest(rank).combine,
        functools.partial(_longer),
        _called(np.vectorize(lambda left, right: right if right else left), rank),
        lambda left, right: _longer(left, right) if {"a", "b", "c"} else rank,
        itself,
    ]


def _use_own_functions(backend: fc.Backend) -> None:
    mine = np.full(2, backend.rank + 1.0)
    for function in _own_functions(backend.rank):
        op = ReduceOp.create("mine", function)
        assert fc.all_reduce(mine, backend, op=op).tolist() == [2.0, 2.0]
    op = ReduceOp.create("mine", (np.maximum, np.minimum)[backend.rank])
    with pytest.raises(fc.MismatchError, match="mine"):
        fc.all_reduce(mine, backend, op=op)


def test_equal_functions_are_one_in_every_process() -> None:
    fc.launch(_use_own_functions, world_size=2, transport="zmq")
