"""A long run on two processes: this one, and a fork of it after everything has been collected.

Each takes the next whole module when it is done with one: this process from the front of the list,
the other from its end. So neither waits for the other before the list is empty, tests of a module
stay together, and what the first modules start once, fleets of ranks, is not started in both.
Reports of the other process are told here when a module is done, as if its tests had run here.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NoReturn

import pytest

# Below so many modules the second process is not worth its fleets.
_LEAST_MODULES = 20
_LENGTH = struct.Struct("<Q")
_POLL_SECONDS = 0.1
_LAST_SECONDS = 10.0

_Modules = list[list[pytest.Item]]
_second = pytest.StashKey[bool]()


def is_second(config: pytest.Config) -> bool:
    """Whether this is the second process."""
    return config.stash.get(_second, False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests; return None to leave that to pytest, in one process."""
    modules = _modules(session.items)
    if not _worth_it(session, len(modules)):
        return None
    with tempfile.TemporaryFile() as file:
        shares = _shares(modules)
        other = _fork(session.config)
        if other == 0:
            _be_the_other(session, modules[::-1], shares, file.fileno())
        try:
            _run_both(session, modules, shares, _Other(session, other, file.fileno()))
        finally:
            os.close(shares)
    return True


def _modules(items: list[pytest.Item]) -> _Modules:
    """The tests of each module; those for a GPU as one, so that one process has it to itself."""
    found: dict[object, list[pytest.Item]] = {}
    for item in items:
        found.setdefault("gpu" if item.get_closest_marker("gpu") else item.path, []).append(item)
    return list(found.values())


def _worth_it(session: pytest.Session, modules: int) -> bool:
    option = session.config.option
    alone = option.collectonly or option.maxfail or option.usepdb or session.testsfailed
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return not alone and cores > 1 and modules >= _LEAST_MODULES and threading.active_count() == 1


def _shares(modules: _Modules) -> int:
    """A descriptor with one byte for each module: who has read one may take a module."""
    reading, writing = os.pipe()
    with open(writing, "wb") as file:
        file.write(bytes(len(modules)))
    return reading


def _fork(config: pytest.Config) -> int:
    """Fork, with the files into which pytest captures output different in the two processes."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the threads that BLAS has; it knows about forks
        pid = os.fork()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    return pid


def _run(session: pytest.Session, modules: _Modules, shares: int) -> Iterator[int]:
    """Run modules from the front, as long as there are shares; yield how many, after each."""
    done, here = 0, bool(os.read(shares, 1))
    while here:
        for item, following in pairwise(modules[done]):
            _call(session, item, following)
        here = bool(os.read(shares, 1))  # not before, so that the other one may still take it
        _call(session, modules[done][-1], modules[done + 1][0] if here else None)
        done += 1
        yield done


def _call(session: pytest.Session, item: pytest.Item, following: pytest.Item | None) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    _stop_if_asked(session)


def _stop_if_asked(session: pytest.Session) -> None:
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _run_both(session: pytest.Session, modules: _Modules, shares: int, other: _Other) -> None:
    here = 0
    try:
        for here in _run(session, modules, shares):  # noqa: B007 - the last one counts
            other.tell()
        while not other.ended():
            other.tell()
            time.sleep(_POLL_SECONDS)
    except BaseException:
        other.interrupt()
        raise
    other.tell()
    if other.code or here + other.modules != len(modules):
        missing = [str(items[0].path) for items in modules[here : len(modules) - other.modules]]
        why = f"the second process ended with {other.code}; not reported: {', '.join(missing)}"
        raise session.Interrupted(why)


class _Other:
    """The second process, seen from the first.

    Attributes:
        modules: how many of its modules have been told.
        code: its exit code, negative for a signal; None while it runs.
    """

    def __init__(self, session: pytest.Session, pid: int, file: int) -> None:
        self.modules = 0
        self.code: int | None = None
        self._session = session
        self._pid = pid
        self._file = file
        self._position = 0

    def tell(self) -> None:
        """Report the tests of all modules that it has done since."""
        while len(head := os.pread(self._file, _LENGTH.size, self._position)) == _LENGTH.size:
            (size,) = _LENGTH.unpack(head)
            content = os.pread(self._file, size, self._position + _LENGTH.size)
            if len(content) < size:
                return  # it is being written
            self._position += _LENGTH.size + size
            self.modules += 1
            self._replay(pickle.loads(content))

    def _replay(self, reports: list[Any]) -> None:
        config = self._session.config
        hook = config.hook
        for data in reports:
            report = hook.pytest_report_from_serializable(config=config, data=data)
            place = {"nodeid": report.nodeid, "location": report.location}
            if report.when == "setup":
                hook.pytest_runtest_logstart(**place)
            hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                hook.pytest_runtest_logfinish(**place)
        _stop_if_asked(self._session)

    def ended(self) -> bool:
        """Whether the process is over."""
        if self.code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def interrupt(self) -> None:
        """End it, as Ctrl-C does; a test may keep that to itself, so it is killed if it goes on."""
        if not self.ended():
            os.kill(self._pid, signal.SIGINT)
        end = time.monotonic() + _LAST_SECONDS
        while not self.ended():
            if time.monotonic() > end:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)


def _be_the_other(session: pytest.Session, modules: _Modules, shares: int, file: int) -> NoReturn:
    """Run modules and write down their reports; ends the process."""
    code = 1
    try:
        session.config.stash[_second] = True
        reports = _Reports(session.config)
        session.config.pluginmanager.unregister(name="terminalreporter")
        session.config.pluginmanager.register(reports)
        for _ in _run(session, modules, shares):
            content = pickle.dumps(reports.taken())
            with open(file, "ab", closefd=False) as writing:
                writing.write(_LENGTH.pack(len(content)) + content)
        code = 0
    except KeyboardInterrupt:
        pass  # the first process has it too, and says so
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)  # the rest of pytest's session is the first process's


class _Reports:
    """Keeps the reports of tests that run in the other process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reports: list[object] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_data = self._config.hook.pytest_report_to_serializable
        self._reports.append(to_data(config=self._config, report=report))

    def taken(self) -> list[object]:
        """The reports since the last call."""
        taken, self._reports = self._reports, []
        return taken
