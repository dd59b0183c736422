"""Run a tensor-parallel layer on the ranks of a job, and join what they have to whole arrays."""

from __future__ import annotations

import numpy as np
from support.spmd import run

import fsdpcore as fc

SEED = 3


def own_values(initial, whole):
    """This rank's parts of whole parameters, read-only as an engine's are."""
    found = {}
    for name, value in initial.items():
        part = whole[name][value.box.slices] if isinstance(value, fc.BoxShard) else whole[name]
        found[name] = np.ascontiguousarray(part)
        found[name].flags.writeable = False
    return found


def own_part(array, backend, axis):
    """This rank's part of an array that is cut along ``axis``, or not; in memory of its own."""
    if axis is None:
        return array.copy()
    return np.array_split(array, backend.world_size, axis=axis)[backend.rank].copy()


def _passes(backend, build, whole, x, dy, x_axis, y_axis):
    layer = build(backend)
    initial = layer.init(np.random.default_rng(SEED))
    params = own_values(initial, whole)
    grads = {name: np.zeros_like(value) for name, value in params.items()}
    x, dy = own_part(x, backend, x_axis), own_part(dy, backend, y_axis)
    given = x.copy(), dy.copy()
    before = backend.order.issued
    y, saved = layer.forward(params, x)
    between = backend.order.issued
    y = y.copy()
    dx = layer.backward(params, saved, dy, grads)
    issued = between - before, backend.order.issued - between
    assert np.array_equal(x, given[0]), "the input was changed"
    assert np.array_equal(dy, given[1]), "the gradient of the output was changed"
    return y, dx, {name: _shard(initial[name], grads[name]) for name in grads}, issued


def _shard(initial, array):
    if isinstance(initial, fc.BoxShard):
        return fc.BoxShard(initial.shape, initial.start, array)
    return array


def _initial(backend, build):
    return dict(build(backend).init(np.random.default_rng(SEED)))


def joined(parts):
    """Whole arrays by name, from every rank's: boxes side by side, the others equal."""
    whole = {}
    for name, first in parts[0].items():
        if not isinstance(first, fc.BoxShard):
            assert all(np.array_equal(part[name], first) for part in parts), name
            whole[name] = first
            continue
        seen = np.zeros(first.shape, int)
        array = whole[name] = np.zeros(first.shape, first.array.dtype)
        for part in parts:
            array[part[name].box.slices] = part[name].array
            seen[part[name].box.slices] += 1
        assert (seen == 1).all(), f"{name}: the boxes of the ranks do not tile the whole"
    return whole


def initial_values(build, world_size):
    """Initial values of all ranks, as whole arrays."""
    return joined(run(_initial, transport="sim", world_size=world_size, args=(build,)))


def passes_cut(build, whole, x, dy, world_size, x_axis, y_axis):
    """Output, gradient of the input, gradients of the parameters; collectives of the two passes.

    The layer is made by ``build(group)``. Every rank gets its part of ``x`` along ``x_axis`` and of
    ``dy`` along ``y_axis``, and returns such parts; None if it is the same on all ranks. All arrays
    returned are whole.
    """
    args = (build, whole, x, dy, x_axis, y_axis)
    ranks = run(_passes, transport="sim", world_size=world_size, args=args)
    y, dx = (_whole([rank[i] for rank in ranks], axis) for i, axis in enumerate((y_axis, x_axis)))
    (issued,) = {rank[3] for rank in ranks}
    return y, dx, joined([rank[2] for rank in ranks]), issued


def passes(build, whole, x, dy, world_size, *, along_sequence=False):
    """The arrays of ``passes_cut``, with input and output cut along the sequence or not at all."""
    axis = -2 if along_sequence else None
    return passes_cut(build, whole, x, dy, world_size, axis, axis)[:3]


def _whole(arrays, axis):
    if axis is not None:
        return np.concatenate(arrays, axis)
    assert all(np.array_equal(array, arrays[0]) for array in arrays), "not the same on all ranks"
    return arrays[0]


def random_values(shapes, rng, dtype=np.float64):
    """Values of order one everywhere, so that no term of a gradient hides behind a zero."""
    return {
        name: (0.5 * rng.standard_normal(shape) + name.endswith("gain")).astype(dtype)
        for name, shape in shapes.items()
    }


def assert_close(got, wanted, dtype, what=""):
    """Equal to the rounding of ``dtype``, relative to the largest value.

    A value is a chain of a few sums of up to a hundred terms, each rounded, and divided by spreads
    that may be small: 1000 units in the last place leave room.
    """
    wanted = np.asarray(wanted)
    assert got.shape == wanted.shape, what
    assert got.dtype == dtype, what
    limit = 1000 * np.finfo(dtype).eps * max(1.0, float(np.abs(wanted).max(initial=0.0)))
    assert float(np.abs(got - wanted).max(initial=0.0)) <= limit, what


def assert_passes_equal(got, wanted, dtype):
    """Compare what ``passes`` of this module and of the oracle return."""
    assert_close(got[0], wanted[0], dtype, "output")
    assert_close(got[1], wanted[1], dtype, "gradient of the input")
    assert got[2].keys() == wanted[2].keys()
    for name, gradient in wanted[2].items():
        assert_close(got[2][name], gradient, dtype, f"gradient of {name}")
