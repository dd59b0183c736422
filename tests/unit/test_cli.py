"""The ``fsdpcore`` command, inside this process: what needs no rank, and exit codes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from support.jobs import clean_environ
from typer.testing import CliRunner

import fsdpcore
from fsdpcore.commands.main import app


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)

    def invoke(*arguments, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import sys; sys.exit(int(sys.argv[1]))\n")
    return path


def only_line(result):
    (line,) = result.output.splitlines()
    assert line.startswith("fsdpcore: ")
    return line


def test_version(invoke):
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"fsdpcore {fsdpcore.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["doctor", "-h"]])
def test_help(invoke, arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_doctor(invoke):
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "zmq" in result.output
    assert invoke("doctor", FSDPCORE_NONSENSE="1").exit_code == 1


@pytest.mark.parametrize("ranks", [0, -4])
def test_too_few_ranks(invoke, script, ranks):
    result = invoke("run", "-n", ranks, script, 0)
    assert result.exit_code == 2
    assert f"at least 1, got {ranks}" in only_line(result)


@pytest.mark.parametrize(
    "option", [["-n", "2"], ["-n2"], ["--ranks", "2"], ["--ranks=2"]], ids=" ".join
)
def test_a_number_of_ranks_that_the_script_would_get(invoke, script, option):
    result = invoke("run", script, "--epochs", 3, *option, "x")
    assert result.exit_code == 2
    words = " ".join(option)
    assert only_line(result).endswith(
        f"'{words}' comes after {script}, which gets it; put it before: fsdpcore run {words} "
        f"{script}"
    )


def test_a_script_that_does_not_exist(invoke, tmp_path):
    result = invoke("run", "-n", 2, tmp_path / "none.py")
    assert result.exit_code == 2
    assert "there is no script" in only_line(result)
    assert "none.py" in only_line(result)


def test_a_directory_for_a_script(invoke, tmp_path):
    result = invoke("run", "-n", 2, tmp_path)
    assert result.exit_code == 2
    assert "is a directory" in only_line(result)


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        (["-n", 2, "--transport", "zqm"], {}, "did you mean 'zmq'"),
        (["-n", 2, "--transport", "zmq://?segmnt_bytes=1"], {}, "did you mean 'segment_bytes'"),
        (["-n", 2, "--transport", "zmq://host:port"], {}, "bad transport URL"),
        (["-n", 2, "--timeout", "-1"], {}, "timeout must be more than 0"),
        (["-n", 2], {"FSDPCORE_TIMEOUT": "x"}, "FSDPCORE_TIMEOUT"),
        (["-n", 2], {"FSDPCORE_RANKS": "3"}, "did you mean 'FSDPCORE_RANK'"),
        ([], {}, "how many ranks"),
        (["-n", 2, "--transport", "zmq://203.0.113.1"], {}, "cannot listen at 203.0.113.1"),
    ],
)
def test_what_is_wrong_is_one_line(invoke, script, options, environ, words):
    result = invoke("run", *options, script, 0, **environ)
    assert result.exit_code == 2
    assert words in only_line(result)


@pytest.mark.parametrize("options", [["--unknown"], ["-n", "two"], []])
def test_wrong_usage_has_the_usual_exit_code(invoke, options):
    assert invoke("run", *options).exit_code == 2


def test_the_scripts_exit_code_is_the_commands(invoke, script):
    assert invoke("run", "-n", 1, "--transport", "sim", script, 0).exit_code == 0
    result = invoke("run", "-n", 1, "--transport", "sim", script, 7)
    assert result.exit_code == 7
    assert only_line(result) == "fsdpcore: the script failed (exit code 7)"


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_nothing_of_a_run_stays_in_this_process(invoke, script, transport, code):
    def left():
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return len(os.listdir("/proc/self/fd")), threading.enumerate(), children, handlers

    before = left()
    assert invoke("run", "-n", 2, "--transport", transport, script, code).exit_code == code
    assert left() == before


def test_the_number_of_ranks_may_come_from_the_environment(invoke, script):
    result = invoke("run", script, 5, FSDPCORE_WORLD_SIZE="2", FSDPCORE_TRANSPORT="sim")
    assert result.exit_code == 5
