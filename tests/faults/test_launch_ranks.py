"""``launch`` with ranks as threads and as processes: results, failures, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
from support import programs
from support.jobs import clean_environ

import fsdpcore as fc
from fsdpcore.launch import failure_report, supervision
from fsdpcore.launch.supervision import RankProcess

TRANSPORTS = ["sim", "zmq"]

# Those that start many interpreters.
together = pytest.mark.side_by_side(4)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch, tmp_path):
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def children():
    """Processes that this one has started and not let go of, zombies included."""
    found: set[str] = set()
    for thread in Path("/proc/self/task").glob("*/children"):
        # A thread that has just ended has left its children to another one.
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update(thread.read_text().split())
    return found


def left():
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": children(),
    }


@pytest.fixture(autouse=True)
def _nothing_is_left():
    fc.launch(programs.identify, world_size=1, transport="sim")  # what starts once and stays
    before = left()
    yield
    assert left() == before


def failure(fn, *args, world_size=2, transport):
    began = time.monotonic()
    with pytest.raises(fc.RankFailedError) as caught:
        fc.launch(fn, world_size=world_size, transport=transport, args=args)
    assert time.monotonic() - began < 20, "no deadline of 60 s was waited for"
    return caught.value


def text(error):
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


# What comes back.


@together
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_results_come_in_rank_order(transport):
    results = fc.launch(programs.identify, world_size=3, transport=transport, args=["first", 7])
    assert results == [(rank, 3, ("first", 7)) for rank in range(3)]


@together
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_rank(transport):
    assert fc.launch(programs.identify, transport=transport) == [(0, 1, ())]


def test_ranks_are_threads_or_processes_with_the_same_blas():
    threads = fc.launch(programs.whereabouts, world_size=2, transport="sim")
    processes = fc.launch(programs.whereabouts, world_size=2, transport="zmq")
    assert {pid for pid, _ in threads} == {os.getpid()}
    assert len({os.getpid(), *(pid for pid, _ in processes)}) == 3
    assert {blas for _, blas in threads} == {blas for _, blas in processes}
    (_, blas), *_ = fc.launch(programs.whereabouts, world_size=2, transport="sim", blas_threads=3)
    assert blas in (0, 3)


@together
def test_results_of_30_megabytes():
    results = fc.launch(programs.big, world_size=2, transport="zmq", args=[30])
    assert [(r.size, r.min(), r.max()) for r in results] == [(30_000_000, k, k) for k in range(2)]


@together
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_may_end_well_with_sys_exit(transport):
    assert fc.launch(programs.leaves, world_size=3, transport=transport) == [None, None, 2]


@together
@pytest.mark.parametrize(("outer", "inner"), [("sim", "sim"), ("zmq", "zmq")])
def test_a_rank_may_launch_in_turn(outer, inner):
    results = fc.launch(programs.nests, world_size=2, transport=outer, args=[inner])
    assert results == [[(0, 2, (k,)), (1, 2, (k,))] for k in range(2)]


# What is refused before anything starts.


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        (lambda backend: None, (), "top of a module"),
        (programs.identify, (threading.Lock(),), "picklable arguments"),
        (programs.identify, (programs.Unpicklable(),), "this stays here"),
        (programs.identify, 5, "args must be a list or tuple"),
        (programs.identify, "ab", "args must be a list or tuple"),
        (None, (), "a function to call on every rank"),
    ],
)
def test_what_cannot_be_passed_to_a_process(fn, args, words, monkeypatch):
    main = type(os)("__main__")
    main.__file__ = programs.__file__  # a worker of pytest has none, like a session
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(fc.ArgumentError, match=words):
        fc.launch(fn, world_size=2, transport="zmq", args=args)


def test_threads_take_any_function_and_argument():
    lock = threading.Lock()
    results = fc.launch(lambda backend, x: x, world_size=2, transport="sim", args=[lock])
    assert results == [lock, lock]


@pytest.mark.parametrize("options", [{"world_size": 0}, {"world_sise": 3}, {"transport": "zqm"}])
def test_wrong_options_start_nothing(options):
    with pytest.raises(fc.ConfigError):
        fc.launch(programs.identify, **options)


def test_what_cannot_be_copied_from_a_session_to_a_process(monkeypatch):
    lock = threading.Lock()
    monkeypatch.setitem(sys.modules, "__main__", type(os)("__main__"))
    with pytest.raises(fc.ArgumentError, match=r"of this session.*lock.*import it from a module"):
        fc.launch(lambda backend: lock, world_size=2, transport="zmq")


@pytest.mark.parametrize(
    ("transport", "words"), [("sim", "use launch()"), ("zmq", "fsdpcore run -n 3")]
)
def test_init_of_several_ranks_without_a_launcher_is_refused(transport, words):
    with pytest.raises(fc.ConfigError) as caught:
        fc.init(transport, world_size=3)
    assert words in str(caught.value)


# Failures.


@together
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("how", "ranks", "words"),
    [
        ("raise", 3, "rank 1 failed: ValueError: rank one is unwell"),
        ("exit 3", 2, "rank 1 failed: SystemExit: 3"),
    ],
)
def test_the_rank_that_failed_is_named_with_its_traceback(transport, how, ranks, words):
    error = failure(programs.fails, how, world_size=ranks, transport=transport)
    assert str(error) == words
    assert error.rank == 1
    assert not error.misuse
    shown = text(error)
    assert "in _fail" in shown, "the traceback of the rank"
    assert "direct cause" in shown


@together
@pytest.mark.parametrize(
    ("how", "ranks", "words"),
    [
        ("os._exit 0", 2, "exit code 0"),
        ("kill", 3, "killed by SIGKILL"),
    ],
)
def test_a_rank_that_ends_without_a_word(how, ranks, words):
    error = failure(programs.fails, how, world_size=ranks, transport="zmq")
    assert str(error) == f"rank 1 ended without a result: {words}"
    assert error.rank == 1


@together
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_is_told_whether_arguments_were_wrong(transport):
    error = failure(programs.fails, "misuse", transport=transport)
    assert str(error) == "rank 1 failed: ArgumentError: rank one has too few sequences"
    assert error.misuse


@together
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_that_another_rank_caused_is_not_blamed(transport):
    error = failure(programs.wraps, world_size=3, transport=transport)
    assert error.rank == 0
    assert "the cause" in str(error)


@together
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_computes_in_python_is_stopped(transport):
    error = failure(programs.computes, transport=transport)
    assert error.rank == 0
    assert "did not stop" not in str(error)


@together
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unpicklable", "rank 1 failed: its result cannot be pickled"),
        ("unloadable", "the result of rank 1 cannot be unpickled"),
    ],
)
def test_a_result_that_cannot_travel(kind, words):
    error = failure(programs.returns, kind, transport="zmq")
    assert words in str(error)
    assert error.rank == 1


def test_a_thread_stuck_outside_of_python_is_said():
    release = threading.Event()
    stuck = []

    def program(backend):
        if backend.rank == 0:
            while not stuck:
                time.sleep(0.01)
            raise ValueError("the cause")
        stuck.append(threading.current_thread())
        release.wait(30)

    error = failure(program, transport="sim")
    release.set()
    stuck[0].join(10)
    assert not stuck[0].is_alive()
    assert "the threads of rank 1 are busy" in str(error)
    assert error.rank == 0


def test_a_rank_that_cannot_be_started_is_said(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    error = failure(programs.identify, transport="zmq")
    assert "rank 0 cannot be started" in str(error)
    assert "/no/such/interpreter" in str(error)


def test_a_rank_that_was_made_to_end_is_not_blamed():
    """One that another took along ended first, and the culprit says that it is, but ends late."""
    shell = [shutil.which("sh"), "-c"]
    programs = ["exit 1", "exec sleep 100", "sleep 0.1; exit 1"]
    ranks = [RankProcess(rank, [*shell, program]) for rank, program in enumerate(programs)]
    first = supervision.wait(ranks)
    supervision.stop(ranks, grace=1.0)
    supervision.release(ranks, kill=True)
    assert supervision.culprit(ranks, first, {0: True, 2: False}).rank == 2
    assert [rank.stopped for rank in ranks] == [False, True, False]


def test_who_has_another_pipe_in_the_place_of_reports_writes_nothing_into_it():
    """As a process that a rank has started, and which fails in turn."""
    with failure_report.FailureReports() as reports:
        reader, writer = os.pipe()
        inode = reports.value.partition(":")[2]
        for number in (reports.fd, writer):
            environ = {failure_report.VARIABLE: f"{number}:{inode}"}
            failure_report.report(number, ValueError("unwell"), environ)
        os.close(writer)
        with open(reader, "rb") as pipe:
            assert pipe.read() == b""
        assert [(each.rank, each.consequence) for each in reports.read().values()] == [
            (reports.fd, False)
        ]
