"""What runs on a GPU only: marked ``gpu``, and left out where there is none."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import gpu_ranks
from support.gpu_here import why_no_gpu

_HERE = Path(__file__).parent

# A file that the command line names is collected all the same, and its tests are deselected.
collect_ignore_glob = ["test_*.py"] if why_no_gpu() else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("gpu")


@pytest.fixture(scope="session", autouse=True)
def _processes() -> Iterator[None]:
    """End the processes that are kept between tests."""
    yield
    gpu_ranks.shut_down()


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many GPUs there are."""
    cupy: Any = importlib.import_module("cupy")
    return int(cupy.cuda.runtime.getDeviceCount())


@pytest.fixture(scope="session")
def two_ranks(gpus: int) -> gpu_ranks.Together:
    """Two ranks that are processes: with a GPU each, or with one GPU in common."""
    ranks = gpu_ranks.Together(share_gpu=gpus < 2)
    if ranks.share_gpu and (refusal := ranks.refusal()):
        pytest.skip(f"NCCL refuses two ranks on one GPU: {refusal}")
    return ranks


@pytest.fixture(scope="session")
def three_ranks(two_ranks: gpu_ranks.Together, gpus: int) -> gpu_ranks.Together:
    """Three such ranks."""
    return gpu_ranks.Together(share_gpu=gpus < 3)


@pytest.fixture(scope="session")
def own_gpus(gpus: int) -> gpu_ranks.Together:
    """Ranks with a GPU each."""
    if gpus < 2:
        pytest.skip(f"needs several GPUs, there is {gpus}")
    return gpu_ranks.Together(share_gpu=False)
