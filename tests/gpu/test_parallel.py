"""Tensor-parallel layers on GPUs against those of the host, in all types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import parallel_chain
from support.gpu_ranks import Together, alone

TYPES = pytest.mark.parametrize(("dtype", "tolerance"), parallel_chain.DEVICE_TOLERANCES, ids=str)


@TYPES
def test_a_gpu_computes_what_the_host_does(dtype: np.dtype[Any], tolerance: float) -> None:
    found = alone(parallel_chain.on_device, dtype, False)
    parallel_chain.check_device([found], dtype, False, tolerance)


@TYPES
def test_two_gpus_compute_what_the_host_does(
    two_ranks: Together, dtype: np.dtype[Any], tolerance: float
) -> None:
    for along in (False, True):
        found = two_ranks.run(parallel_chain.on_device, 2, dtype, along)
        parallel_chain.check_device(found, dtype, along, tolerance)
