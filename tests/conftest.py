"""Tests marked ``side_by_side`` run at the same time as the others of their module.

They wait: for deadlines, for interpreters to start, for processes to compute. When the first one
is called, all of the module are, on threads; every test then ends as its own call did. Such a test
takes its parameters and fixtures of the session, since no other fixture is made for all at once.
The time that all of them took is divided among them as they took it, for ``--durations`` and for
the table of folders at the end.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support.gpu_here import why_no_gpu
from threadpoolctl import ThreadpoolController, threadpool_limits

from fsdpcore.launch.blas import available_cores

_MARK = "side_by_side"
_Outcomes = dict[str, "Future[None]"]
_outcomes = pytest.StashKey[_Outcomes]()
_shares = pytest.StashKey[dict[str, float]]()  # seconds, by test

# Seconds that the tests of a folder may take on two cores, of all three processes together: less
# than four minutes in all.
_BUDGET = {"conformance": 130, "faults": 210, "properties": 80, "unit": 280}

# Markers of tests that run where -m asks for them.
_ASKED_FOR = {"campaign": "campaigns", "tools": "whole runs of tools beside the library"}

_interrupts = pytest.StashKey[Any]()
_before = pytest.StashKey["dict[str, str | None]"]()
_IMPORTED = (
    "fsdpcore.commands.main, fsdpcore.transports.zmq.backend, fsdpcore.transports.mpi.backend"
)
_NO_BYTECODE, _PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
# What Python and JAX have compiled, for all processes of this run and for the next ones.
_CACHE = Path(__file__).parents[1] / ".cache"
_ENVIRON = {
    # In the processes that this one starts, idle threads of OpenBLAS sleep at once. They would spin
    # for a while wherever numpy is imported, a quarter of what an interpreter's start costs, and
    # after each matrix product.
    "OPENBLAS_THREAD_TIMEOUT": "4",
    "JAX_COMPILATION_CACHE_DIR": str(_CACHE / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


# No test is timed: an example may take as long as the machine does.
hypothesis.settings.register_profile("fsdpcore", deadline=None, max_examples=50)
hypothesis.settings.load_profile("fsdpcore")


def pytest_configure(config: pytest.Config) -> None:
    # A shell has what it starts in the background ignore Ctrl-C, and so would all processes that
    # the tests start. They are about what happens where nobody has said so.
    config.stash[_interrupts] = signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_before] = {
        name: os.environ.get(name) for name in (*_ENVIRON, _NO_BYTECODE, _PREFIX)
    }
    for name, value in _ENVIRON.items():
        os.environ.setdefault(name, value)
    if os.environ.get(_NO_BYTECODE):
        # Hundreds of interpreters are started. Where they may not leave compiled modules beside
        # the sources, each would compile the package again, which takes as long as all the rest
        # of its start: they keep them elsewhere, as this one does, for the next runs, too.
        del os.environ[_NO_BYTECODE]
        sys.pycache_prefix = os.environ.setdefault(_PREFIX, str(_CACHE / "bytecode"))
        sys.dont_write_bytecode = False
        # Ranks that this process launches read there only, so somebody has to write before.
        subprocess.run([sys.executable, "-c", f"import {_IMPORTED}"], check=False)
    config.addinivalue_line(
        "markers",
        f"{_MARK}(how): run tests of a module at the same time, at most so many, or where "
        "'how' is the name of a parameter, one for each of its values",
    )


@pytest.hookimpl(optionalhook=True)  # where tests run without pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the whole suite on three processes, and what the command line names on this one.

    Tests wait now and then: with two processes, two cores would too.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return 3 if whole and available_cores() > 1 else 0


def pytest_unconfigure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, config.stash[_interrupts])
    before = config.stash[_before]
    if before[_NO_BYTECODE]:
        sys.pycache_prefix, sys.dont_write_bytecode = before[_PREFIX], True
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _not_asked_for(config: pytest.Config) -> list[str]:
    """Markers whose tests run where the command line names them only."""
    return [mark for mark in _ASKED_FOR if mark not in config.getoption("markexpr")]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what of the suite is left out, where that is not what the command line says."""
    told = []
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        told += [f"left out: {_ASKED_FOR[mark]}: -m {mark}" for mark in _not_asked_for(config)]
    gpu = Path(__file__).parent / "gpu"
    named = [Path(arg.split("::")[0]).resolve() for arg in config.args]
    if any(path in (gpu, *gpu.parents) or gpu in path.parents for path in named):
        told += [f"left out: tests/gpu, {why}"] if (why := why_no_gpu()) else []
    return told


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = _not_asked_for(config)
    if any("gpu" in item.keywords for item in items) and why_no_gpu():
        left_out.append("gpu")
    gone = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if not any(map(item.get_closest_marker, left_out))]


def pytest_collection_finish(session: pytest.Session) -> None:
    # A full collection of garbage looks at all that is alive. Thousands of collected tests are,
    # to the end: leaving them out makes it ten times as fast.
    gc.collect()
    gc.freeze()
    # A test makes thousands of objects and lets them go: looking at them as often as Python does
    # by default takes a twentieth of the whole suite.
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    result = yield
    if nextitem is None or nextitem.path != item.path:
        # What a file leaves alive (imported modules, caches) mostly stays until the end. The
        # hundreds of tests that collect garbage themselves would look at all of it each time.
        gc.collect()
        gc.freeze()
    return result


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and item.get_closest_marker(_MARK):
        item.fixturenames.append("request")  # so that it can ask for what the other tests take


@pytest.fixture(scope="session", autouse=True)
def _launches_read_once() -> Iterator[None]:
    """Every launch looks for transports among all packages, for BLAS, and for this project's file.

    Most of a launch's time is that. Where a test adds folders to the path, it finds what is there;
    files of other directories are read each time, and BLAS is looked for after each import.
    """
    from fsdpcore.comm import registry
    from fsdpcore.launch import blas, config

    look_up, folders = registry.entry_points, set(sys.path)
    read, here = config._parse_file, Path("pyproject.toml").absolute()
    found: dict[Any, Any] = {}

    def known(**chosen: str) -> Any:
        if not folders.issuperset(sys.path):
            return look_up(**chosen)
        key = (*sys.path, *chosen.items())
        if key not in found:
            found[key] = look_up(**chosen)
        return found[key]

    def known_file(file: Path, keys: tuple[str, ...]) -> dict[str, Any]:
        if file != here:
            return read(file, keys)
        if keys not in found:
            found[keys] = read(file, keys)
        return dict(found[keys])

    controllers: dict[int, ThreadpoolController] = {}

    def limits(number: int, *, user_api: str) -> Any:
        if len(sys.modules) not in controllers:
            controllers.clear()
            controllers[len(sys.modules)] = ThreadpoolController()
        return controllers[len(sys.modules)].limit(limits=number, user_api=user_api)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blas, "threadpool_limits", limits)
        patch.setattr(registry, "entry_points", known)
        patch.setattr(config, "_parse_file", known_file)
        yield


@pytest.fixture(scope="session", autouse=True)
def _processes() -> Iterator[None]:
    """End the processes that the suite keeps between tests, and see that no thread stays."""
    yield
    if (spmd := sys.modules.get("support.spmd")) is not None:
        spmd.shut_down()
    if (forks := sys.modules.get("support.forks")) is not None:
        forks.shut_down()
    mine = ("rank-", "fsdpcore-", "fleet")
    for thread in [t for t in threading.enumerate() if t.name.startswith(mine)]:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} is left behind"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return None
    outcomes = pyfuncitem.session.stash.setdefault(_outcomes, {})
    if pyfuncitem.nodeid not in outcomes:
        outcomes.update(_called(pyfuncitem, *mark.args))
    outcomes.pop(pyfuncitem.nodeid).result()
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        report.duration = item.session.stash.get(_shares, {}).pop(item.nodeid, report.duration)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how long the tests of each folder took, beside what they may take."""
    took: dict[str, list[float]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = Path(report.nodeid).parent.name
                took.setdefault(folder, []).append(report.duration)
    if not took.keys() >= _BUDGET.keys():
        return  # not the whole suite
    terminalreporter.section("seconds of all processes together, and the budget")
    for folder, budget in _BUDGET.items():
        seconds = sum(took[folder])
        over = "  OVER" if seconds > budget else ""
        terminalreporter.write_line(f"{folder:12} {seconds:6.0f} {budget:6}{over}")


def _called(first: pytest.Function, how: int | str) -> _Outcomes:
    """Call all tests of the module that are marked like this; returns when all have ended."""
    items = [
        item
        for item in first.session.items
        if isinstance(item, pytest.Function)
        and item.module is first.module
        and (mark := item.get_closest_marker(_MARK)) is not None
        and mark.args == (how,)
    ]
    outcomes: _Outcomes = {}
    began, took = time.monotonic(), dict.fromkeys((item.nodeid for item in items), 0.0)

    def timed(item: pytest.Function, known: dict[str, Any]) -> None:
        start = time.monotonic()
        try:
            item.obj(**known)
        finally:
            took[item.nodeid] = time.monotonic() - start

    # Jobs of threads limit the BLAS of this process, and put back what they found.
    with threadpool_limits(1, user_api="blas"), ExitStack() as stack:
        calls = [(item, _arguments(item, first)) for item in items]
        lanes: dict[Any, ThreadPoolExecutor] = {}
        for item, known in calls:
            lane = known.get(how) if isinstance(how, str) else None
            if lane not in lanes:
                width = how if isinstance(how, int) else 1
                lanes[lane] = stack.enter_context(ThreadPoolExecutor(width, _MARK))
            outcomes[item.nodeid] = lanes[lane].submit(timed, item, known)
    share = (time.monotonic() - began) / max(sum(took.values()), 1e-9)
    shares = first.session.stash.setdefault(_shares, {})
    shares.update((name, seconds * share) for name, seconds in took.items())
    return outcomes


def _arguments(item: pytest.Function, first: pytest.Function) -> dict[str, Any]:
    """What a test takes: its own parameters, and fixtures that it has in common with others."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    request: pytest.FixtureRequest = first.funcargs["request"]
    taken = {}
    for name in inspect.signature(item.obj).parameters:
        if name in params:
            taken[name] = params[name]
        elif name == "request":
            taken[name] = request
        else:
            (*_, fixture) = item._fixtureinfo.name2fixturedefs[name]
            assert fixture.scope in ("session", "module"), f"{name} would be another test's"
            taken[name] = request.getfixturevalue(name)
    return taken
