"""Tensor-parallel layers on arrays of GPUs, played by ``fake_cuda``, against those of the host."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest
from support import fake_cuda, nccl_ranks, parallel_chain

from fsdpcore import parallel
from fsdpcore.parallel.arrays import column_dot, sum_by_index

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ to compile the kernels with"
)


FLOAT64, FLOAT32, FLOAT16 = (np.dtype(name) for name in ("float64", "float32", "float16"))


# Every type where parts are uneven and cut along the sequence, and one of each other way.
@pytest.mark.parametrize(
    ("ranks", "along", "dtype"),
    [
        (3, True, FLOAT64),
        (3, True, FLOAT16),
        (1, False, FLOAT32),
        (2, True, BFLOAT16),
        (3, False, FLOAT16),
    ],
    ids=str,
)
def test_gpus_compute_what_the_host_does(ranks, along, dtype):
    tolerance = dict(parallel_chain.DEVICE_TOLERANCES)[dtype]
    with fake_cuda.installed(ranks) as machine:

        def body(backend):
            parallel_chain.passed(backend, dtype, along, backend.device.xp)
            assert not machine.calls("get"), "the host waited for the GPU during the passes"
            backend.barrier()
            return parallel_chain.on_device(backend, dtype, along)

        there = nccl_ranks.results_of(body, ranks)
    parallel_chain.check_device(there, dtype, along, tolerance)


def test_what_is_no_row_is_no_number_on_a_gpu():
    """The host does not wait for a look at the indices; a loss that is NaN is found in any case."""

    def body(backend):
        import cupy

        layer = parallel.VocabParallelEmbedding(5, 3, backend)
        initial = layer.init(np.random.default_rng(0))["w"].array
        y, _ = layer.forward({"w": cupy.asarray(initial)}, cupy.asarray([[0, 5, -1, 4]]))
        logits = cupy.zeros((3, len(initial)), np.float32)
        losses = [
            parallel.cross_entropy(logits, cupy.asarray(targets), backend, vocab=5)[0]
            for targets in ([0, 4, 1], [0, 5, 1], [0, -1, 1], [0, 4, backend.rank])
        ]
        return np.isnan(y.get()).any(axis=-1).tolist(), [float(loss) for loss in losses]

    for lost, losses in nccl_ranks.results(body, 2):
        assert lost == [[False, True, True, False]]
        assert losses[0] == pytest.approx(np.log(5))
        assert np.isnan(losses[1:]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
def test_rows_of_one_index_are_added_up_on_a_gpu(dtype):
    rng = np.random.default_rng(0)
    index = np.concatenate([rng.integers(-4, 9, 40), np.full(30, 3)])
    for count in (0, 1, 2, 40, 70):
        rows = rng.integers(-9, 9, (count, 2)).astype(dtype)
        wanted = np.empty((6, 2), np.float32)
        sum_by_index(index[:count], rows, wanted)
        with fake_cuda.installed(1):
            import cupy

            out = cupy.full((6, 2), np.nan, np.float32)
            sum_by_index(cupy.asarray(index[:count]), cupy.asarray(rows), out)
            np.testing.assert_array_equal(out.get(), wanted)


def test_products_of_columns_are_added_up_in_32_bits_on_a_gpu():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((50, 3)).astype(np.float16) for _ in range(2))
    with fake_cuda.installed(1):
        import cupy

        out = cupy.empty(3, np.float32)
        column_dot(cupy.asarray(a), cupy.asarray(b), out)
        wanted = (a.astype(np.float64) * b).sum(axis=0)
        np.testing.assert_allclose(out.get(), wanted, rtol=1e-5, atol=1e-5)
