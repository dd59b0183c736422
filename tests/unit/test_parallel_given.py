"""What a layer is given is looked at before anything is sent, alike in groups of any size."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.spmd import run

import fsdpcore as fc
from fsdpcore import parallel

# Layers of a group, and the shape of their input on any of its ranks; None for one of integers.
LAYERS = {
    "column": (lambda group: parallel.ColumnParallelLinear(8, 6, group), (2, 4, 8)),
    "column, gathered": (
        lambda group: parallel.ColumnParallelLinear(8, 5, group, gather_output=True),
        (2, 4, 8),
    ),
    "row": (
        lambda group: parallel.RowParallelLinear(8, 6, group, input_is_split=False),
        (2, 4, 8),
    ),
    "mlp": (lambda group: parallel.ParallelMLP(8, 6, group), (2, 4, 8)),
    "attention": (lambda group: parallel.ParallelAttention(8, 2, group), (2, 4, 8)),
    "block": (lambda group: parallel.ParallelBlock(8, 2, 6, group), (2, 4, 8)),
    "layer norm": (lambda group: parallel.LayerNorm(8, group), (2, 4, 8)),
    "rms norm": (lambda group: parallel.RMSNorm(8), (2, 4, 8)),
    "positions": (lambda group: parallel.PositionEmbedding(9, 8), (2, 4, 8)),
    "embedding": (lambda group: parallel.VocabParallelEmbedding(7, 8, group), None),
    "scatter": (parallel.ScatterSequence, (2, 4, 8)),
    "gather": (parallel.GatherSequence, (2, 4, 8)),
}
ALONG = {
    "column": lambda group: parallel.ColumnParallelLinear(8, 6, group, sequence_parallel=True),
    "mlp": lambda group: parallel.ParallelMLP(8, 6, group, sequence_parallel=True),
    "attention": lambda group: parallel.ParallelAttention(8, 2, group, sequence_parallel=True),
    "block": lambda group: parallel.ParallelBlock(8, 2, 6, group, sequence_parallel=True),
    "layer norm": lambda group: parallel.LayerNorm(8, group, sequence_parallel=True),
    "embedding": lambda group: parallel.VocabParallelEmbedding(7, 8, group, sequence_parallel=True),
}


def parameters(layer):
    initial = layer.init(np.random.default_rng(0))
    return {n: v.array if isinstance(v, fc.BoxShard) else v for n, v in initial.items()}


def refused(call, *args):
    with pytest.raises(fc.ArgumentError, match=r"^\w+: ") as caught:
        call(*args)
    return str(caught.value)


def layers(backend):
    for name, (build, shape) in LAYERS.items():
        x = np.ones(shape, np.float32) if shape else np.ones((2, 4), np.int64)
        yield name, build(backend), x
    for name, build in ALONG.items():
        whole = np.ones((2, 4), np.int64) if name == "embedding" else np.ones((2, 4, 8), np.float32)
        # The embedding has all integers and makes a part.
        x = whole if name == "embedding" else parallel.local_part(whole, backend, -2)
        yield f"{name}, along the sequence", build(backend), x


def _gradients(backend):
    for _, layer, x in layers(backend):
        params = parameters(layer)
        y, saved = layer.forward(params, x)
        grads = {name: np.zeros_like(value) for name, value in params.items()}
        before = backend.order.issued
        for wrong in (
            np.ones((1, *y.shape[1:]), y.dtype),  # those two NumPy would repeat
            np.ones((1, 1, y.shape[-1]), y.dtype),
            np.ones((*y.shape[:-2], y.shape[-2] + 1, y.shape[-1]), y.dtype),
            np.ones((*y.shape[:-1], y.shape[-1] + 1), y.dtype),
            np.ones(y.shape[-1], y.dtype),
            y.tolist(),
            y + 1j,
        ):
            assert "the gradient of the output" in refused(
                layer.backward, params, saved, wrong, grads
            )
        assert backend.order.issued == before
        assert layer.backward(params, saved, y, grads).shape == x.shape


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_of_another_shape_than_the_output_is_refused(ranks):
    run(_gradients, transport="sim", world_size=ranks)


def _inputs(backend):
    for name, layer, x in layers(backend):
        params = parameters(layer)
        before = backend.order.issued
        if not name.startswith("embedding"):
            for wrong in (x.tolist(), x + 1j, x.astype(str), None):
                message = refused(layer.forward, params, wrong)
                assert "the input must be an array of NumPy or CuPy of real numbers" in message
        assert backend.order.issued == before
        wanted, _ = layer.forward(params, x)
        for same in (x.astype(x.dtype.newbyteorder()), x.astype(np.int32)):
            np.testing.assert_array_equal(layer.forward(params, same)[0], wanted)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_input_is_an_array_of_real_numbers_in_any_byte_order(ranks):
    run(_inputs, transport="sim", world_size=ranks)


def _sent_for(backend, layer, x, dtype):
    """Operations and bytes of both passes for an input and a gradient of some dtype."""
    params = parameters(layer)
    before = len(backend.recorder.entries())
    y, saved = layer.forward(params, x if x.dtype.kind == "i" else x.astype(dtype))
    grads = {name: np.zeros_like(value) for name, value in params.items()}
    layer.backward(params, saved, y.astype(dtype), grads)
    calls = [entry.call for entry in backend.recorder.entries()[before:]]
    return [(call.label, call.operation, call.nbytes) for call in calls]


def _wider(backend):
    for name, layer, x in layers(backend):
        if parameters(layer):
            found, wanted = (_sent_for(backend, layer, x, t) for t in (np.float64, np.float32))
            assert found == wanted, name


def test_nothing_is_sent_in_a_wider_dtype_than_that_of_the_parameters():
    run(_wider, transport="sim", world_size=2)


def _logits(backend):
    logits = np.random.default_rng(backend.rank).standard_normal((3, 6 // backend.world_size))
    targets = np.array([0, 5, 2])

    def loss(given):
        return parallel.cross_entropy(given, targets, backend, vocab=6)

    before = backend.order.issued
    for wrong in (logits.astype(np.int64), logits + 0j, logits.tolist(), logits > 0, None):
        message = refused(loss, wrong)
        assert "cross_entropy: logits must be an array of NumPy or CuPy of floating" in message
    assert backend.order.issued == before
    for dtype in (np.float64, np.float32, np.float16):
        wanted = loss(logits.astype(dtype))
        found = loss(logits.astype(np.dtype(dtype).newbyteorder()))
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
            assert got.dtype == want.dtype
    assert loss(logits.astype(ml_dtypes.bfloat16))[1].dtype == np.float32


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_logits_are_a_floating_point_array_in_any_byte_order(ranks):
    run(_logits, transport="sim", world_size=ranks)


def _nothing(backend, shape, along):
    layer = parallel.ParallelBlock(8, 4, 6, backend, sequence_parallel=along)
    params = parameters(layer)
    y, saved = layer.forward(params, np.zeros(shape, np.float32))
    grads = {name: np.full_like(value, np.nan) for name, value in params.items()}
    assert y.shape == layer.backward(params, saved, y, grads).shape == shape
    for name, gradient in grads.items():
        assert not gradient.any(), name


@pytest.mark.parametrize("along", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 3, 8), (0, 0, 8)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_block_takes_no_positions_and_no_sequences(ranks, shape, along):
    if along:
        shape = (shape[0], shape[1] // ranks, shape[2])
    run(_nothing, transport="sim", world_size=ranks, args=(shape, along))
