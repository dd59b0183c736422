"""A tensor-parallel block on arrays of GPUs, played by ``fake_cuda``, against that of the host."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest
from support import fake_cuda, nccl_ranks
from support.spmd import run
from support.tensor_parallel import own_values, random_values
from support.transformer_oracle import block_shapes

from fsdpcore.parallel import ParallelBlock

SIZES = (10, 5, 13)  # width, heads, hidden
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ to compile the kernels with"
)


def block(backend, along, activation, dtype, xp=np):
    """Output and all gradients, of the array library that was asked for."""
    layer = ParallelBlock(*SIZES, backend, sequence_parallel=along, activation=activation)
    initial = layer.init(np.random.default_rng(0))
    rng = np.random.default_rng(5)
    params = own_values(initial, random_values(block_shapes(*SIZES), rng, dtype))
    x, dy = (xp.asarray(a) for a in rng.standard_normal((2, 2, 6, SIZES[0])).astype(dtype))
    if along:
        part = slice(*(np.array([0, 1]) + backend.rank) * (6 // backend.world_size))
        x, dy = x[:, part].copy(), dy[:, part].copy()
    params = {name: xp.asarray(value) for name, value in params.items()}
    grads = {name: xp.zeros(value.shape, np.float32) for name, value in params.items()}
    y, saved = layer.forward(params, x)
    dx = layer.backward(params, saved, dy, grads)
    return {"y": y, "dx": dx, **grads}


@pytest.mark.parametrize(
    ("ranks", "along", "activation", "dtype", "tolerance"),
    [
        (1, False, "gelu", np.float32, 1e-5),
        (2, False, "relu", np.float32, 1e-5),
        (2, True, "silu", np.float32, 1e-5),
        (3, True, "gelu", ml_dtypes.bfloat16, 1e-1),
    ],
    ids=str,
)
def test_gpus_compute_what_the_host_does(ranks, along, activation, dtype, tolerance):
    dtype = np.dtype(dtype)
    here = run(block, transport="sim", world_size=ranks, args=(along, activation, dtype))

    def body(backend):
        import cupy

        found = block(backend, along, activation, dtype, cupy)
        assert not machine.calls("get"), "the host waited for the GPU during the passes"
        backend.barrier()
        return {name: array.get() for name, array in found.items()}

    with fake_cuda.installed(ranks) as machine:
        there = nccl_ranks.results_of(body, ranks)
    for mine, theirs in zip(there, here, strict=True):
        for name, array in theirs.items():
            assert mine[name].dtype == array.dtype
            right = array.astype(np.float64)
            error = np.linalg.norm(mine[name].astype(np.float64) - right)
            assert error <= tolerance * max(np.linalg.norm(right), 1e-2), name
