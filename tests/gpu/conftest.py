"""What runs on a GPU only: marked ``gpu``, and skipped with the reason where there is none."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import gpu_ranks

_HERE = Path(__file__).parent
_reason = pytest.StashKey[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("gpu")


def _missing() -> str:
    """What it takes to run here and is not there; empty if all is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns of what it does not find
            cupy: Any = importlib.import_module("cupy")
            nccl: Any = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        return (
            f"no CuPy ({error}): on a machine with a GPU, pip install -e '.[cuda13,test]', or "
            "cuda12 for a driver of CUDA 12"
        )
    runtime: Any = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"no GPU that CuPy can use: {error}"
    if not count:
        return "no GPU: CUDA sees none"
    return "" if nccl.available else "no NCCL: CuPy finds no library; install nvidia-nccl-cu13"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Not a fixture, whose skips would fill a line of the summary for every test.
    stash = item.config.stash
    if _reason not in stash:
        stash[_reason] = _missing()
    if stash[_reason]:
        pytest.skip(stash[_reason])


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
