"""The stand-in for GPUs, for the tests of several files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import fake_cuda


@pytest.fixture
def machine() -> Iterator[fake_cuda.Machine]:
    """A machine of four GPUs."""
    with fake_cuda.installed(4) as made:
        yield made


@pytest.fixture
def cupy(machine: fake_cuda.Machine) -> Any:
    """CuPy on the machine."""
    import cupy

    return cupy


@pytest.fixture
def nccl(machine: fake_cuda.Machine) -> Any:
    """CuPy's NCCL on the machine."""
    from cupy.cuda import nccl

    return nccl
