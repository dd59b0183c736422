"""Matrices cut by columns and by rows compute what the whole matrix does, forward and backward."""

from __future__ import annotations

import functools

import autograd.numpy as anp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parallel_cases import Case, check, check_ranks
from support.spmd import run
from support.tensor_parallel import initial_values

import fsdpcore as fc
from fsdpcore.parallel import ColumnParallelLinear, RowParallelLinear, local_part
from fsdpcore.parallel.arrays import matmul, row_sum

RANKS = [1, 2, 3, 4]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def linear(params, x):
    y = anp.dot(x, params["w"])
    return y + params["b"] if "b" in params else y


def column(shape, outputs, **options):
    def build(group, dtype):
        return ColumnParallelLinear(shape[-1], outputs, group, dtype=dtype, **options)

    x_axis = -2 if options.get("sequence_parallel") else None
    y_axis = None if options.get("gather_output") else -1
    return Case(build, linear, shape, x_axis, y_axis)


def row(shape, outputs, **options):
    def build(group, dtype):
        return RowParallelLinear(shape[-1], outputs, group, dtype=dtype, **options)

    x_axis = -1 if options.get("input_is_split", True) else None
    y_axis = -2 if options.get("sequence_parallel") else None
    return Case(build, linear, shape, x_axis, y_axis)


# By name: the case, and the collectives of a forward and of a backward pass. With a sequence that
# is joined in the forward pass, the ranks tell each other its parts before.
CASES = {
    "column": (column((3, 5, 7), 11), (0, 1)),
    "column, rows": (column((6, 7), 11), (0, 1)),
    "column, one row": (column((7,), 11), (0, 1)),
    "column, no bias": (column((2, 3, 5), 8, bias=False), (0, 1)),
    "column, joined": (column((3, 5, 7), 11, gather_output=True), (1, 1)),
    "column, joined, even": (column((3, 5, 7), 12, gather_output=True), (1, 1)),
    "column, sequence": (column((3, 5, 7), 11, sequence_parallel=True), (2, 1)),
    "column, sequence, one": (column((1, 9, 7), 11, sequence_parallel=True), (2, 1)),
    "column, sequence, joined": (
        column((2, 7, 5), 9, sequence_parallel=True, gather_output=True),
        (3, 1),
    ),
    "column, few outputs": (column((3, 5), 2), (0, 1)),
    "column, short sequence": (column((2, 1, 5), 3, sequence_parallel=True), (2, 1)),
    "row": (row((3, 5, 7), 11), (1, 0)),
    "row, rows": (row((6, 7), 11), (1, 0)),
    "row, one row": (row((7,), 11), (1, 0)),
    "row, no bias": (row((2, 3, 5), 8, bias=False), (1, 0)),
    "row, whole input": (row((3, 5, 7), 11, input_is_split=False), (1, 1)),
    "row, sequence": (row((3, 5, 7), 11, sequence_parallel=True), (1, 1)),
    "row, sequence, even": (row((3, 12, 7), 11, sequence_parallel=True), (1, 1)),
    "row, sequence, whole input": (
        row((2, 7, 5), 9, sequence_parallel=True, input_is_split=False),
        (1, 2),
    ),
    "row, few inputs": (row((3, 2), 5), (1, 0)),
    "row, short sequence": (row((2, 1, 5), 3, sequence_parallel=True), (1, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_whole_matrix_with_so_many_collectives(name):
    check_ranks(*CASES[name])


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    st.integers(1, 9),
    st.integers(2, 4),
    st.sampled_from([column, row]),
    st.booleans(),
    st.booleans(),
)
def test_it_is_the_whole_matrix_for_any_sizes(shape, outputs, ranks, kind, along, changed):
    options = {"sequence_parallel": along and len(shape) > 1}
    if kind is column:
        options["gather_output"] = changed
    else:
        options["input_is_split"] = not changed
    check(kind(shape, outputs, **options), (ranks,))


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_initial_values_do_not_depend_on_the_number_of_ranks(kind):
    build = functools.partial(kind, 7, 10, init=0.3)
    first = initial_values(build, 1)
    assert list(first) == ["w", "b"]
    assert first["w"].dtype == np.float32
    assert first["w"].shape == (7, 10)
    assert not first["b"].any()
    for ranks in RANKS[1:]:
        found = initial_values(build, ranks)
        for name, array in first.items():
            np.testing.assert_array_equal(found[name], array)
    wanted = np.random.default_rng(3).standard_normal((7, 10), dtype=np.float32)
    wanted *= 0.3
    np.testing.assert_array_equal(first["w"], wanted)


def _default_spread(backend):
    layer = ColumnParallelLinear(400, 300, backend)
    return layer.init(np.random.default_rng(0))["w"].std()


def test_weights_keep_the_variance_of_the_input_by_default():
    assert run(_default_spread, transport="sim", world_size=1)[0] == pytest.approx(0.05, rel=0.01)


def _boxes(backend):
    rng = np.random.default_rng(0)
    found = {}
    for layer in (ColumnParallelLinear(5, 7, backend), RowParallelLinear(7, 5, backend)):
        name = type(layer).__name__
        for key, value in layer.init(rng).items():
            boxed = isinstance(value, fc.BoxShard)
            found[name, key] = (value.start, value.array.shape) if boxed else value.shape
    return found


def test_only_what_is_cut_is_a_box():
    column_name, row_name = "ColumnParallelLinear", "RowParallelLinear"
    assert run(_boxes, transport="sim", world_size=3)[1] == {
        (column_name, "w"): ((0, 3), (5, 2)),
        (column_name, "b"): ((3,), (2,)),
        (row_name, "w"): ((3, 0), (2, 5)),
        (row_name, "b"): (5,),
    }
    alone = run(_boxes, transport="sim", world_size=1)[0]
    assert alone[column_name, "w"] == (5, 7)
    assert alone[row_name, "w"] == (7, 5)


def _memory(backend):
    layer = ColumnParallelLinear(64, 64, backend)
    part = layer.init(np.random.default_rng(0))["w"].array
    return part.nbytes, part.nbytes if part.base is None else part.base.nbytes


def test_a_part_does_not_keep_the_whole_matrix_in_memory():
    assert run(_memory, transport="sim", world_size=2) == [(64 * 32 * 4,) * 2] * 2


def _directional(backend, along):
    """The slope of a sum of outputs along a random direction, and what the gradients say of it."""
    rng = np.random.default_rng(4)
    up = ColumnParallelLinear(5, 7, backend, sequence_parallel=along, dtype=np.float64)
    down = RowParallelLinear(7, 3, backend, sequence_parallel=along, dtype=np.float64)
    params = {
        name: value.array if isinstance(value, fc.BoxShard) else value
        for prefix, layer in (("up.", up), ("down.", down))
        for name, value in fc.parallel.prefixed(prefix, layer.init(rng)).items()
    }
    x, weight = rng.standard_normal((2, 9, 5)), rng.standard_normal((2, 9, 3))
    if along:
        x, weight = local_part(x, backend, -2), local_part(weight, backend, -2)
    Scope = fc.parallel.Scope

    def run_forward(values, inputs):
        hidden, first = up.forward(Scope(values, "up."), inputs)
        y, second = down.forward(Scope(values, "down."), np.tanh(hidden))
        return y, (hidden, first, second)

    def total(values, inputs):
        """Of all ranks: every output counts once."""
        y, _ = run_forward(values, inputs)
        found = (y * weight).sum()
        return float(fc.all_reduce(found, backend)) if along else found

    _, (hidden, first, second) = run_forward(params, x)
    grads = {name: np.zeros_like(value) for name, value in params.items()}
    d = down.backward(Scope(params, "down."), second, weight, Scope(grads, "down."))
    d = d * (1 - np.tanh(hidden) ** 2)
    dx = up.backward(Scope(params, "up."), first, d, Scope(grads, "up."))

    # Each rank moves its boxes in a direction of its own, and what is the same everywhere alike.
    apart = np.random.default_rng([7, backend.rank])
    alike = np.random.default_rng(8)
    boxed = {"up.w", "up.b", "down.w"}
    moves = {
        name: (apart if name in boxed else alike).standard_normal(value.shape)
        for name, value in params.items()
    }
    dx_move = (apart if along else alike).standard_normal(x.shape)

    def moved(by):
        return {name: value + by * moves[name] for name, value in params.items()}, x + by * dx_move

    h = 1e-5
    numeric = (total(*moved(h)) - total(*moved(-h))) / (2 * h)
    own_slope = sum(float((grads[name] * moves[name]).sum()) for name in boxed)
    alike_slope = float((grads["down.b"] * moves["down.b"]).sum())
    x_slope = float((dx * dx_move).sum())
    own_slope, alike_slope = (
        (own_slope + x_slope, alike_slope) if along else (own_slope, alike_slope + x_slope)
    )
    return numeric, float(fc.all_reduce(np.float64(own_slope), backend)) + alike_slope


@pytest.mark.parametrize("along", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_are_the_slopes_of_finite_differences(ranks, along):
    for numeric, analytic in run(_directional, transport="sim", world_size=ranks, args=(along,)):
        assert analytic == pytest.approx(numeric, rel=1e-8)


def _two_passes(backend):
    """Two forward passes before their backward passes, as microbatches in flight have them."""
    layer = ColumnParallelLinear(4, 6, backend, sequence_parallel=True)
    rng = np.random.default_rng(0)
    params = {name: value.array for name, value in layer.init(rng).items()}
    inputs = [local_part(x, backend, -2) for x in rng.standard_normal((2, 2, 3, 4), np.float32)]
    dy = rng.standard_normal((2, 3, params["b"].size), dtype=np.float32)
    saved = [layer.forward(params, x)[1] for x in inputs]
    late = []
    for kept in saved:
        grads = {name: np.full_like(value, np.nan) for name, value in params.items()}
        late.append((layer.backward(params, kept, dy, grads), grads))
    for (dx, grads), x in zip(late, inputs, strict=True):
        again = {name: np.zeros_like(value) for name, value in params.items()}
        np.testing.assert_array_equal(
            dx, layer.backward(params, layer.forward(params, x)[1], dy, again)
        )
        for name, gradient in again.items():
            np.testing.assert_array_equal(grads[name], gradient)


def test_passes_do_not_disturb_each_other_and_gradients_are_written_not_added():
    run(_two_passes, transport="sim", world_size=2)


def _frozen(backend, kind):
    layer = kind(4, 6, backend)
    params = {
        name: value.array if isinstance(value, fc.BoxShard) else value
        for name, value in layer.init(np.random.default_rng(0)).items()
    }
    x = np.ones((3, params["w"].shape[0]), np.float32)
    y, saved = layer.forward(params, x)
    whole = {name: np.zeros_like(value) for name, value in params.items()}
    dx = layer.backward(params, saved, np.ones_like(y), whole)
    for left in ("w", "b"):
        grads = {left: np.zeros_like(params[left])}
        np.testing.assert_array_equal(layer.backward(params, saved, np.ones_like(y), grads), dx)
        np.testing.assert_array_equal(grads[left], whole[left])
    assert np.array_equal(layer.backward(params, saved, np.ones_like(y), {}), dx)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_frozen_parameters_have_no_gradients(kind):
    run(_frozen, transport="sim", world_size=2, args=(kind,))


def _sixteen_bits(backend, kind, dtype):
    """Relative errors of y, dx and the weights' gradient against float64."""
    layer = kind(24, 24, backend, dtype=dtype)
    rng = np.random.default_rng(1)
    initial = layer.init(rng)
    params = {n: v.array if isinstance(v, fc.BoxShard) else v for n, v in initial.items()}
    split_input = kind is RowParallelLinear
    x, dy = (rng.standard_normal((40, 24)).astype(dtype) for _ in range(2))
    mine_x, mine_dy = (
        local_part(a, backend, -1) if cut else a
        for a, cut in ((x, split_input), (dy, not split_input))
    )
    y, saved = layer.forward(params, mine_x)
    # The engine may take gradients in float32 from layers that compute with 16 bits.
    grads = {name: np.zeros(value.shape, np.float32) for name, value in params.items()}
    dx = layer.backward(params, saved, mine_dy.astype(np.float32), grads)
    assert y.dtype == dx.dtype == dtype

    def whole(array, cut):
        array = array.astype(np.float64)
        return fc.parallel.all_gather(np.ascontiguousarray(array), backend, -1) if cut else array

    y, dx = whole(y, not split_input), whole(dx, split_input)
    weight = fc.parallel.all_gather(
        params["w"].astype(np.float64), backend, 0 if split_input else 1
    )
    found = fc.parallel.all_gather(grads["w"], backend, 0 if split_input else 1)
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    return [
        np.linalg.norm(got - want) / np.linalg.norm(want)
        for got, want in ((y, x @ weight), (dx, dy @ weight.T), (found, x.T @ dy))
    ]


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_sixteen_bits_are_rounded_a_few_times(kind, dtype):
    eps = float(ml_dtypes.finfo(dtype).eps)
    for errors in run(_sixteen_bits, transport="sim", world_size=3, args=(kind, dtype)):
        assert max(errors) < 2 * eps


def _wrong(backend):
    up = ColumnParallelLinear(4, 6, backend)
    params = {name: value.array for name, value in up.init(np.random.default_rng(0)).items()}
    with pytest.raises(fc.ArgumentError, match=r"shape \(\.\.\., 4\) on rank . of 2, got \(3, 5\)"):
        up.forward(params, np.ones((3, 5), np.float32))
    down = RowParallelLinear(5, 6, backend)
    with pytest.raises(fc.ArgumentError, match=r"RowParallelLinear: the input has the shape"):
        down.forward({}, np.ones((3, 5), np.float32))
    along = ColumnParallelLinear(4, 6, backend, sequence_parallel=True)
    with pytest.raises(fc.ArgumentError, match=r"\(\.\.\., sequence, 4\)"):
        along.forward(params, np.ones(4, np.float32))
    with pytest.raises(fc.ArgumentError, match="inputs must be at least 1"):
        ColumnParallelLinear(0, 6, backend)
    with pytest.raises(fc.ArgumentError, match="outputs must be an integer"):
        RowParallelLinear(4, 6.5, backend)
    with pytest.raises(fc.ArgumentError, match="standard deviation must be at least 0"):
        ColumnParallelLinear(4, 6, backend, init=-1.0)
    with pytest.raises(fc.ArgumentError, match=r"got 'ones'; .* one of fsdpcore\.initializers"):
        RowParallelLinear(4, 6, backend, init="ones")
    with pytest.raises(fc.ArgumentError, match=r"mesh\['tensor'\], got 2"):
        ColumnParallelLinear(4, 6, 2)


def test_what_does_not_fit_is_refused_before_anything_is_sent():
    run(_wrong, transport="sim", world_size=2)


@pytest.mark.parametrize("product", [lambda x: matmul(x, np.ones((5, 1), x.dtype)), row_sum])
def test_products_do_not_warn_of_values_that_are_no_numbers(product):
    """BLAS looks at values beside the operands, too, and may warn of those."""
    x = np.full((7, 5), np.inf, np.float32)
    x[:, 1] = -np.inf
    assert np.isnan(product(x)).all()
