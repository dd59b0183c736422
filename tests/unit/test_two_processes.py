"""A suite on two processes: every test runs once, and what became of it is told, whoever ran it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from support.jobs import Finished, clean_environ, finished, python, started

SUPPORT = Path(__file__).parents[1]
CONFTEST = """
import os
import pytest
from support.two_processes import pytest_runtestloop

@pytest.fixture(autouse=True)
def _noted(request):
    yield
    with open("ran", "a") as file:
        file.write(f"{os.getpid()} {request.node.nodeid}\\n")

@pytest.fixture(scope="session", autouse=True)
def _ended():
    yield
    with open("ended", "a") as file:
        file.write(f"{os.getpid()}\\n")
"""
# The first process begins with module 0, the second one with the last; each waits for the other.
MEET = """
import os, time
def test_meet():
    open("{mine}", "w").close()
    end = time.monotonic() + 60
    while not os.path.exists("{other}"):
        assert time.monotonic() < end
        time.sleep(0.01)
"""
PLAIN = """
import pytest
def test_good():
    pass
"""
MORE = """
@pytest.mark.parametrize("n", range(3))
def test_numbers(n):
    pass
"""
COUNT = 24
TESTS = COUNT + COUNT // 2 * 3 + 2


def suite(folder: Path, modules: dict[int, str], *arguments: str) -> Finished:
    return finished(*command(folder, modules, *arguments), cwd=folder)


def command(
    folder: Path, modules: dict[int, str], *arguments: str
) -> tuple[list[str], dict[str, str]]:
    """Write the modules; return the command that runs them, and its environment."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for number in range(COUNT):
        text = PLAIN + (MORE if number % 2 == 0 else "") + modules.get(number, "")
        if number in (0, COUNT - 1):
            mine, other = ("one", "two") if number else ("two", "one")
            text = MEET.format(mine=mine, other=other) + text
        (folder / f"test_{number:02}.py").write_text(text)
    environ = clean_environ(PYTHONPATH=os.fspath(SUPPORT), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    environ.pop("PYTEST_ADDOPTS", None)
    return python("-m", "pytest", "-p", "no:cacheprovider", *arguments), environ


def ran(folder: Path) -> tuple[Counter[str], int]:
    """How often each test has run, and in how many processes."""
    lines = [line.split(maxsplit=1) for line in (folder / "ran").read_text().splitlines()]
    return Counter(name for _, name in lines), len({pid for pid, _ in lines})


needs_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: one process")


@needs_cores
def test_every_test_runs_once_and_is_told(tmp_path):
    done = suite(tmp_path, {})
    assert done.code == 0, done.out
    assert f"{TESTS} passed" in done.out
    names, processes = ran(tmp_path)
    assert processes == 2
    assert set(names.values()) == {1}
    assert len(names) == TESTS
    # Fixtures of the session end in both, before either is gone.
    assert len(set((tmp_path / "ended").read_text().split())) == 2
    lines = [line.split()[0] for line in done.out.splitlines() if line.startswith("test_")]
    assert sorted(lines) == [f"test_{number:02}.py" for number in range(COUNT)]


@needs_cores
def test_what_fails_is_shown_whoever_ran_it(tmp_path):
    bad = """
import sys
def test_bad():
    print("printed")
    assert [1, 2] == [1, 3], "a difference"
def test_skipped():
    pytest.skip("not today")
@pytest.fixture
def broken():
    yield
    raise ValueError("broken at the end")
def test_end(broken):
    pass
"""
    done = suite(tmp_path, {0: bad, COUNT - 1: bad}, "-rfEs")
    assert done.code == 1
    assert f"2 failed, {TESTS + 2} passed, 2 skipped, 2 errors" in done.out
    assert ran(tmp_path)[1] == 2
    for words in ("a difference", "printed", "not today", "ValueError: broken at the end"):
        assert done.out.count(words) >= 2
    for number in (0, COUNT - 1):
        assert f"FAILED test_{number:02}.py::test_bad" in done.out
        assert f"ERROR test_{number:02}.py::test_end" in done.out


@needs_cores
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_an_end_of_the_second_process_is_no_success(tmp_path, end):
    done = suite(tmp_path, {COUNT - 1: f"\nimport os\ndef test_end():\n    {end}\n"})
    assert done.code == 2
    assert "the second process ended with" in done.out
    assert f"test_{COUNT - 1:02}.py" in done.out.partition("not reported:")[2]


@needs_cores
def test_an_interrupt_ends_both(tmp_path):
    wait = """
def test_wait():
    os.write(1, b"\\nready\\n")
    time.sleep(100)
"""
    line = command(tmp_path, {0: wait, COUNT - 1: wait}, "-s")
    with started(*line, cwd=tmp_path) as job:
        job.wait_for("ready", 2)
        job.process.send_signal(signal.SIGINT)
        done = job.finish()  # nothing is left
    assert done.code == 2
    assert "KeyboardInterrupt" in done.out
    assert done.err == ""


def test_one_process_where_the_first_failure_is_to_end_all(tmp_path):
    (tmp_path / "one").touch()
    (tmp_path / "two").touch()
    done = suite(tmp_path, {2: "def test_bad():\n    raise ValueError\n"}, "-x")
    assert done.code == 1
    names, processes = ran(tmp_path)
    assert processes == 1
    assert max(names) == "test_02.py::test_numbers[2]"
