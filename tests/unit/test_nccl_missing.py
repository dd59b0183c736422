"""What the ``nccl`` transport says where something is missing, and of what is there."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from support import fake_cuda

from fsdpcore.comm import registry
from fsdpcore.commands import doctor
from fsdpcore.core.errors import MissingDependencyError


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)

    class Finder:
        def find_spec(self, name: str, *rest: Any) -> None:
            if name.split(".")[0] == "cupy":
                raise ModuleNotFoundError("No module named 'cupy'", name="cupy")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


def driver(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    from fsdpcore.transports.nccl import missing as nccl_missing

    monkeypatch.setattr(nccl_missing, "driver_version", lambda: version)


def report() -> doctor.TransportReport:
    (point,) = entry_points(group=registry.GROUP, name="nccl")
    return doctor._examine_transport(point)


@pytest.mark.parametrize(
    ("version", "extra", "words"),
    [
        (12040, "cuda12", "supports CUDA 12.4"),
        (13000, "cuda13", "supports CUDA 13.0"),
    ],
)
@pytest.mark.usefixtures("no_cupy")
def test_no_cupy(monkeypatch: pytest.MonkeyPatch, version: int, extra: str, words: str) -> None:
    driver(monkeypatch, version)
    with pytest.raises(MissingDependencyError) as caught:
        registry.load("nccl")
    for word in ("CuPy is not installed", words, f'pip install "fsdpcore[{extra}]"'):
        assert word in str(caught.value)
    assert caught.value.__suppress_context__
    found = report()
    assert (found.usable, found.install) == (False, f'pip install "fsdpcore[{extra}]"')
    assert words in found.problem


@pytest.mark.usefixtures("no_cupy")
def test_no_driver_is_told_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, 0)
    found = report()
    assert (found.usable, found.install) == (False, "")
    first, _, then = found.problem.partition("there is no NVIDIA driver")
    assert "needs a GPU and its driver" in first
    assert "pip" not in first
    for word in ("CuPy is not installed", 'pip install "fsdpcore[cuda13]"', "'cuda12'"):
        assert word in then


@pytest.mark.parametrize("nccl_at", ["missing", "unavailable"])
def test_no_nccl(nccl_at: str) -> None:
    with fake_cuda.installed(1, nccl_at=nccl_at):
        with pytest.raises(MissingDependencyError, match=r"no NCCL .*pip install nvidia-nccl-cu12"):
            registry.load("nccl")
        assert report().install == "pip install nvidia-nccl-cu12"


@pytest.mark.parametrize(
    ("version", "words", "install"),
    [
        (0, "there is no NVIDIA driver", ""),
        (11080, "supports CUDA 11.8, and CuPy was built for CUDA 12.9", "cuda12"),
        (12040, "supports CUDA 12.4", "cuda12"),
    ],
)
def test_no_driver(monkeypatch: pytest.MonkeyPatch, version: int, words: str, install: str) -> None:
    with fake_cuda.installed(1) as machine:
        driver(monkeypatch, version)
        machine.faults.driver = False
        found = report()
    assert not found.usable
    assert words in found.problem
    assert install in found.install


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda.installed(1) as machine:
        driver(monkeypatch, 13000)
        machine.faults.devices = 0
        found = report()
    assert not found.usable
    assert "no GPU can be used" in found.problem
    assert found.install == ""


def test_a_configured_transport_without_a_gpu_is_a_problem(tmp_path: Path) -> None:
    """Whatever is missing; and its options are shown as they are meant."""
    with fake_cuda.installed(1) as machine:
        found = [doctor.examine({"FSDPCORE_TRANSPORT": "nccl"}, tmp_path)]
        machine.faults.devices = 0
        found.append(doctor.examine({"FSDPCORE_TRANSPORT": "nccl://?device=1"}, tmp_path))
    assert [diagnosis.well for diagnosis in found] == [True, False]
    devices = [{s.name: s.value for s in diagnosis.settings}["device"] for diagnosis in found]
    assert devices == ["by local rank", "1"]


def test_versions() -> None:
    with fake_cuda.installed(3):
        found = report()
    assert found.usable, found.problem
    for word in ("CuPy 14.2.0", "NCCL 2.32.3", "CUDA 12.9", "3 x Stand-in GPU"):
        assert word in found.versions
