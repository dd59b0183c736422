"""``fsdpcore doctor`` finds out what can run, and survives what cannot."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support import fake_packages

from fsdpcore.commands import doctor


@pytest.fixture
def packages(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    fake_packages.install(
        folder,
        "fakepack",
        {
            "lacking": "doctor_no_such_mod:Thing [a-very-long-name-of-an-extra]",
            "raising": "doctor_raising:Thing",
            "versionless": "doctor_versionless:Thing",
        },
        doctor_raising="raise RuntimeError('no device found')",
        doctor_versionless="""
from fsdpcore.transports.simulated.backend import SimBackend
class Thing(SimBackend):
    @classmethod
    def versions(cls):
        raise OSError("no library")
""",
    )
    monkeypatch.syspath_prepend(str(folder))


def examine(tmp_path, **environ):
    return doctor.examine(environ, tmp_path)


def shown(diagnosis, width=100):
    out = io.StringIO()
    doctor.show(diagnosis, Console(file=out, width=width))
    return out.getvalue()


def by_scheme(diagnosis):
    return {report.scheme: report for report in diagnosis.transports}


def test_it_knows_what_runs_and_on_which_versions(tmp_path):
    reports = by_scheme(examine(tmp_path))
    assert reports["sim"].usable
    assert reports["zmq"].usable
    assert "libzmq" in reports["zmq"].versions
    assert reports["zmq"].package == "fsdpcore"


@pytest.mark.usefixtures("packages")
def test_it_says_what_is_missing_and_how_to_get_it(tmp_path):
    diagnosis = examine(tmp_path)
    report = by_scheme(diagnosis)["lacking"]
    assert not report.usable
    assert "doctor_no_such_mod" in report.problem
    assert report.install == 'pip install "fakepack[a-very-long-name-of-an-extra]"'
    assert report.install in shown(diagnosis, width=40), "in one line, to be copied"


@pytest.mark.usefixtures("packages")
def test_a_transport_that_fails_in_another_way_is_no_reason_to_fail(tmp_path):
    reports = by_scheme(examine(tmp_path))
    assert "no device found" in reports["raising"].problem
    assert "no library" in reports["versionless"].problem
    assert not reports["raising"].install
    assert reports["sim"].usable


@pytest.mark.usefixtures("packages")
def test_a_configured_transport_that_cannot_run_is_a_problem(tmp_path):
    diagnosis = examine(tmp_path, FSDPCORE_TRANSPORT="versionless")
    assert diagnosis.configuration_error is None
    assert not diagnosis.well
    assert "FSDPCORE_TRANSPORT" in diagnosis.transport_error
    assert "transport 'versionless', which is configured" in shown(diagnosis)
    assert examine(tmp_path).well
    assert not examine(tmp_path, FSDPCORE_TRANSPORT="raising").well


def test_it_describes_the_machine(tmp_path):
    diagnosis = examine(tmp_path)
    assert diagnosis.cores >= 1
    assert diagnosis.libraries["numpy"].startswith("2.")
    assert all(blas.threads >= 1 for blas in diagnosis.blas)
    memory = diagnosis.shared_memory
    assert memory is None or 0 <= memory.free <= memory.size
    text = shown(diagnosis)
    for word in ("Python", "numpy", "cores", "shared memory", "BLAS"):
        assert word in text


def test_a_system_without_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "none")
    diagnosis = examine(tmp_path)
    assert diagnosis.shared_memory is None
    assert "none" in shown(diagnosis)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "launch() starts the ranks"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "rank 1 of 2"),
        ({"FSDPCORE_THREADS": "3"}, "3 ranks as threads"),
        ({"FSDPCORE_RANK": "7", "FSDPCORE_WORLD_SIZE": "2"}, "FSDPCORE_RANK=7"),
    ],
)
def test_it_says_which_launcher_it_sees(tmp_path, environ, words):
    diagnosis = examine(tmp_path, **environ)
    assert words in diagnosis.launcher
    assert words in shown(diagnosis)


def test_it_says_where_settings_come_from(tmp_path):
    (tmp_path / "fsdpcore.toml").write_text("world_size = 6\n")
    diagnosis = examine(tmp_path, FSDPCORE_TRANSPORT="sim://?seed=5")
    settings = {item.name: item for item in diagnosis.settings}
    assert settings["world_size"].value == "6"
    assert "fsdpcore.toml" in settings["world_size"].source
    assert "FSDPCORE_TRANSPORT" in settings["transport"].source
    assert settings["seed"].value == "5"
    assert "URL" in settings["seed"].source
    assert settings["timeout"].source == "default"


def test_it_shows_which_algorithms_are_overridden(tmp_path):
    (tmp_path / "fsdpcore.toml").write_text('[algorithms]\nall_gather = "ring"\n')
    diagnosis = examine(tmp_path, FSDPCORE_ALL_REDUCE="ring:8193-max;doubling:0-8KiB")
    settings = {item.name: item for item in diagnosis.settings}
    assert settings["all_reduce"].value == "doubling:0-8192;ring:8193-max"
    assert "FSDPCORE_ALL_REDUCE" in settings["all_reduce"].source
    assert settings["all_gather"].value == "ring:0-max"
    assert "fsdpcore.toml [algorithms]" in settings["all_gather"].source
    assert "broadcast" not in settings
    assert "doubling:0-8192;ring:8193-max" in shown(diagnosis, width=200)


def test_a_wrong_configuration_is_shown_not_raised(tmp_path):
    diagnosis = examine(tmp_path, FSDPCORE_TIMOUT="5")
    assert "FSDPCORE_TIMOUT" in diagnosis.configuration_error
    assert "did you mean 'FSDPCORE_TIMEOUT'" in shown(diagnosis)
