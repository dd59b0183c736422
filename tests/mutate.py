"""Put a change into the product, run what tests it, and say who noticed.

    python tests/mutate.py --map    # once, some 20 minutes: which test runs what
    python tests/mutate.py 'fsdpcore/comm/mesh.py:142: < => <='
    python tests/mutate.py --random 20 --seed 7 --only collectives --only transports --jobs 2
    python tests/mutate.py 'transports/zmq/wire.py:131: < => <=' --tests tests/unit/test_zmq_wire.py

Every change goes into a copy of the checkout, alone, and the first test that fails has noticed it.
By the map, the tests that run the changed block come first, those of files close to it before
others, some of each file before many of one; then the rest of their files. ``--tests`` names
others, for which no map is needed. A line of a table, and one of JSON (``--log``), tells about each
change, and a diff about each that nobody noticed: a person judges whether it changes anything.

Random changes are drawn from the rooms of ``fsdpcore`` (but for ``bench``, ``commands`` and
``diagnostics``) and from ``transports``. ``--draw FILE`` writes them down, for ``--changes FILE``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import gzip
import itertools
import json
import math
import os
import pickle
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import mutations
from support.jobs import kill_marked
from support.mutations import Change

MAP = ".cache/mutate.pickle.gz"
UNASKED = ("bench", "commands", "diagnostics")
_PLAN, _EVENTS, _MARKS = "MUTATE_PLAN", "MUTATE_EVENTS", "MUTATE_MARKS"
# Seconds: a test hangs that takes so much longer than it did when the map was made.
_HANGS = (10.0, 30.0)


# What is known: which tests run which blocks


@dataclass
class Known:
    """What each test took and ran; tests that fail without a change are not in it."""

    numbers: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ran: dict[str, frozenset[int]] = field(default_factory=dict)

    def order(self, block: str, limit: float) -> list[str]:
        """The tests for a change in a block, the most promising first, as many as fit."""
        path, function, _ = block.rsplit(":", 2)
        house = path.rpartition("/")[0]
        file = {n for name, n in self.numbers.items() if name.startswith(f"{path}:")}
        parts = (
            {self.numbers.get(block, -1)},
            {n for b, n in self.numbers.items() if b.startswith(f"{path}:{function}:")},
            file,
            {n for name, n in self.numbers.items() if name.startswith(f"{house}/")},
        )
        hit: set[str] = set()
        for part in parts:
            hit = hit or {test for test, ran in self.ran.items() if ran & part}
        close: defaultdict[str, float] = defaultdict(float)
        for test in hit:
            share = len(self.ran[test] & file) / len(self.ran[test])
            close[_file(test)] = max(close[_file(test)], share)
        ranked, spent = [], dict.fromkeys(close, 0.0)
        for test in sorted(self.seconds, key=lambda test: (test not in hit, self.seconds[test])):
            if (name := _file(test)) in close:
                spent[name] += self.seconds[test]
                turn = math.ceil(math.log(max(spent[name], 0.5), 4))
                ranked.append(((test not in hit, turn, -close[name], name, spent[name]), test))
        order = [test for _, test in sorted(ranked)]
        total = itertools.accumulate(self.seconds[test] for test in order)
        return [test for test, seconds in zip(order, total, strict=True) if seconds < limit]


def _file(test: str) -> str:
    return test.partition("::")[0]


# A copy of the checkout


class Copy:
    """The checkout's files in a folder of their own, from which every process imports."""

    def __init__(self, root: Path, home: Path) -> None:
        self.home = home
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=root, text=True).split("\0"):
            if name and (root / name).is_file():
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, home / name)
        # What is installed says where this folder is; a copy has it where packages are.
        (home / "fsdpcore" / "transports").symlink_to("../transports")

    def environ(self, **extra: str) -> dict[str, str]:
        paths = [str(self.home), str(self.home / "tests"), str(Path(__file__).parent)]
        path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MUTATE_")}
        return {**kept, "PYTHONPATH": path, **extra}

    @contextlib.contextmanager
    def changed(self, change: Change) -> Iterator[list[str]]:
        """The copy has a change, of which this is the diff."""
        file = self.home / change.path
        before = file.read_text()
        after = change.apply(before)
        lines = before.splitlines(), after.splitlines()
        try:
            self._write(file, after)
            yield list(difflib.unified_diff(*lines, change.path, change.path, "", "", 3, ""))
        finally:
            self._write(file, before)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # Python compares seconds and sizes: it would take the one for the other.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()


# A run of pytest, and what it tells


class Verdict(NamedTuple):
    """Whether a change was noticed: how, by which test, after how many seconds and tests."""

    how: str = "survived"
    test: str = ""
    seconds: float = 0.0
    tests: int = 0


class Run:
    """pytest in a copy: tells a line for each test that begins, fails and ends."""

    def __init__(self, copy: Copy, arguments: Sequence[str], **environ: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mutate-run-")
        self._events = Path(self._folder.name, "events")
        self._events.touch()
        environ[_EVENTS] = str(self._events)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--tb=no"]
        command += ["-p", "mutate", "-p", "no:cacheprovider", *arguments]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=copy.home, env=copy.environ(**environ), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def events(self) -> list[list[Any]]:
        text = self._events.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def close(self) -> None:
        """End every process that it has started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10 if any(e[0] == "failed" for e in self.events()) else 0)
        kill_marked(f"{_EVENTS}={self._events}")
        self.process.wait()
        self._folder.cleanup()

    def verdict(self, known: dict[str, float], limit: float) -> Verdict:
        """Wait for a test that fails or hangs, or for the end."""
        while True:
            code, events, now = self.process.poll(), self.events(), time.monotonic() - self.began
            count = sum(kind == "began" for kind, *_ in events)
            for kind, test, _ in events:
                if kind == "failed":
                    return Verdict("failed", test, now, count)
            test, at = events[-1][1:] if events else ("", time.time())
            if code is not None and code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                return Verdict("crashed", test, now, count)
            times, more = _HANGS if now < limit else (3.0, 5.0)
            if code is None and time.time() - at > times * known.get(test, 1.0) + more:
                return Verdict("hung", test, now, count)
            if code is not None or now > limit:
                how = "survived" if code is not None or events else "hung"  # before any test
                return Verdict(how, "", now, count)
            time.sleep(0.05)


def judge(
    copy: Copy, change: Change, known: Known, tests: Sequence[str], limit: float
) -> dict[str, Any]:
    """Run what tests a change; what became of it."""
    source = (copy.home / change.path).read_text()
    order = known.order(mutations.block_at(change.path, source, change.line), limit)
    seconds = itertools.accumulate(known.seconds[test] for test in order)
    few = sum(spent < limit / 10 for spent in seconds)  # for these, few files are collected
    verdict = Verdict()
    with copy.changed(change) as diff, tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        for part in [tests] if tests else filter(None, (order[:few], order[few:])):
            plan.write_text(json.dumps(part))
            files, environ = dict.fromkeys(map(_file, part)), {_PLAN: str(plan)}
            run = Run(copy, tests) if tests else Run(copy, list(files), **environ)
            try:
                found = run.verdict(known.seconds, limit - verdict.seconds)
            finally:
                run.close()
            spent, count = verdict.seconds + found.seconds, verdict.tests + found.tests
            verdict = found._replace(seconds=round(spent, 1), tests=count)
            if verdict.how != "survived":
                break
    said = {**dataclasses.asdict(change), **verdict._asdict()}
    return {**said, "chosen": len(order), "diff": diff}


def make_map(root: Path, paths: Sequence[str]) -> Known:
    """Run tests in a copy where every block leaves a mark; add what they ran to the map."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as home:
        copy, numbers = Copy(root, Path(home)), load_map(root).numbers
        for path in sources(root, [], asked=True):
            file = copy.home / path
            if "njit(" not in file.read_text():  # what numba compiles knows no marks
                file.write_text(mutations.marked(path, file.read_text(), numbers))
        (copy.home / "fsdpcore" / "_marks.py").write_text(mutations.MARKS)
        marks = Path(home, "marks")
        marks.write_bytes(bytes(1 << 16))
        # A test that fails is no reason to know nothing of those behind it: 0 takes -x back.
        run = Run(copy, ["--maxfail=0", *paths], **{_MARKS: str(marks)})
        try:
            run.process.wait()
        finally:
            run.close()
        lines = Path(f"{marks}.ran").read_text().splitlines()
    known = load_map(root)  # others may have added to it
    known.numbers.update(numbers)
    tests = [json.loads(line) for line in lines]
    for name, *_ in tests:
        known.seconds[name], known.ran[name] = 0.0, frozenset()
    for name, seconds, _, ran in tests:
        known.seconds[name] += seconds
        known.ran[name] |= frozenset(ran)
    for name in {name for name, _, failed, _ in tests if failed}:
        print(f"fails without a change, or for the marks: {name}")
        del known.seconds[name], known.ran[name]
    (root / MAP).parent.mkdir(exist_ok=True)
    (root / f"{MAP}.new").write_bytes(gzip.compress(pickle.dumps(known)))
    (root / f"{MAP}.new").rename(root / MAP)
    return known


def load_map(root: Path) -> Known:
    """What is known of the tests; nothing if no map was made."""
    if not (root / MAP).exists():
        return Known()
    known: Known = pickle.loads(gzip.decompress((root / MAP).read_bytes()))
    return known


# pytest loads this file as a plugin, which knows its orders from the environment


def _tell(kind: str, test: str) -> None:
    with open(os.environ[_EVENTS], "a") as file:
        file.write(json.dumps([kind, test, time.time()]) + "\n")


def _unit(item: pytest.Item) -> str:
    """A test; those of a file that run side by side are one."""
    mark = item.get_closest_marker("side_by_side")
    return item.nodeid if mark is None else f"{_file(item.nodeid)}::side_by_side {mark.args}"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    yield
    if _PLAN in os.environ:
        places = {t: n for n, t in enumerate(json.loads(Path(os.environ[_PLAN]).read_text()))}
        items[:] = [item for item in items if _unit(item) in places]
        items.sort(key=lambda item: places[_unit(item)])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    _tell("began", _unit(item))
    if _MARKS not in os.environ:
        return (yield)
    marks, failures, began = Path(os.environ[_MARKS]), item.session.testsfailed, time.monotonic()
    with marks.open("r+b") as file:  # in its place, for processes have mapped it
        file.write(bytes(1 << 16))
    result = yield
    ran = [found.start() for found in re.finditer(b"\1", marks.read_bytes())]
    failed, seconds = item.session.testsfailed > failures, time.monotonic() - began
    with open(f"{marks}.ran", "a") as out:
        out.write(json.dumps([_unit(item), seconds, failed, ran]) + "\n")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _tell("failed", report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _tell("failed", f"{report.nodeid} (collecting)")


# The command


def sources(root: Path, only: Sequence[str], *, asked: bool = False) -> list[str]:
    """The files of the product, or those of some rooms."""
    rooms = [root / "transports", *(root / "fsdpcore").iterdir()]
    chosen = [room for room in rooms if room.stem in only] if only else rooms
    if unknown := {*only} - {room.stem for room in chosen}:
        raise SystemExit(f"no such room: {', '.join(sorted(unknown))}")
    if not only and not asked:
        chosen = [room for room in rooms if room.stem not in UNASKED]
    files = {file for room in chosen for file in [room, *room.rglob("*.py")]}
    return sorted(str(f.relative_to(root)) for f in files if f.suffix == ".py" and f.is_file())


def draw(root: Path, number: int, seed: int, only: Sequence[str]) -> list[Change]:
    """Random changes: each line that has any is as likely as the others, and is drawn once."""
    lines: dict[tuple[str, int], list[Change]] = {}
    for path in sources(root, only):
        source = (root / path).read_text()
        for change in mutations.changes(path, source):
            with contextlib.suppress(SyntaxError):
                ast.parse(change.apply(source))
                lines.setdefault((path, change.line), []).append(change)
    chance = random.Random(seed)
    places = chance.sample(sorted(lines), min(number, len(lines)))
    return [chance.choice(lines[place]) for place in places]


def given(root: Path, text: str) -> Change:
    """A change as the command line says it: ``FILE:LINE: OLD => NEW``."""
    if (found := re.fullmatch(r"(.+?):(\d+): (.+?) => ?(.*)", text)) is None:
        raise SystemExit(f"a change is FILE:LINE: OLD => NEW, not {text!r}")
    path, number, old, new = found.groups()
    line = (root / path).read_text().splitlines()[int(number) - 1]
    if line.count(old) != 1:
        raise SystemExit(f"{path}:{number} has {old!r} {line.count(old)} times: {line.strip()!r}")
    return Change(path, int(number), len(line[: line.index(old)].encode()), old, new)


def judge_all(
    root: Path, wanted: Sequence[Change], tests: Sequence[str], limit: float, jobs: int
) -> Iterator[dict[str, Any]]:
    """Judge changes side by side, in one copy of the checkout for each job; in their order."""
    known = load_map(root)
    if not known.ran and not tests:
        raise SystemExit("which tests run what is not known: --map finds out; or name --tests")
    with contextlib.ExitStack() as stack:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for _ in range(jobs):
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutate-"))
            copies.put(Copy(root, Path(home)))

        def one(change: Change) -> dict[str, Any]:
            copy = copies.get()
            try:
                return judge(copy, change, known, tests, limit)
            finally:
                copies.put(copy)

        yield from stack.enter_context(ThreadPoolExecutor(jobs)).map(one, wanted)


def _options() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    add = parser.add_argument
    add("given", nargs="*", metavar="FILE:LINE: OLD => NEW")
    add("--random", type=int, default=0, metavar="N", help="so many random changes")
    add("--seed", type=int, default=0)
    add("--only", action="append", default=[], metavar="ROOM", help="draw from these")
    add("--draw", type=Path, metavar="FILE", help="write the changes there, no more")
    add("--changes", type=Path, metavar="FILE", help="changes that were written")
    add("--tests", nargs="+", default=[], metavar="TEST", help="instead of the map's")
    add("--map", nargs="*", metavar="TEST", help="find out what these tests run")
    add("--limit", type=float, default=240.0, help="seconds for each change")
    add("--jobs", type=int, default=1, help="changes at the same time")
    add("--log", type=Path, metavar="FILE", help="add a line of JSON for each")
    return parser


def main(arguments: Sequence[str], root: Path = Path(__file__).parents[1]) -> int:
    """Run the command; returns the number of changes that nobody noticed."""
    chosen = _options().parse_args(arguments)
    if chosen.map is not None:
        known = make_map(root, chosen.map)
        print(f"{len(known.ran)} tests run {len(known.numbers)} blocks: {root / MAP}")
        return 0
    written = json.loads(chosen.changes.read_text()) if chosen.changes else []
    wanted = [given(root, text) for text in chosen.given] + [Change(**each) for each in written]
    if chosen.random:
        wanted += draw(root, chosen.random, chosen.seed, chosen.only)
    if chosen.draw:
        chosen.draw.write_text(json.dumps([dataclasses.asdict(each) for each in wanted], indent=1))
        return 0
    unnoticed = []
    for said in judge_all(root, wanted, chosen.tests, chosen.limit, chosen.jobs):
        place, words = f"{said['path']}:{said['line']}", f"{said['old']} => {said['new']}"
        short, found = " ".join(words.split())[:60], f"{said['how']:8} {said['seconds']:6.1f} s"
        print(f"{place:50} {short:60} {found}  {said['test']}", flush=True)
        if chosen.log:
            with chosen.log.open("a") as file:
                file.write(json.dumps(said) + "\n")
        unnoticed += [said] if said["how"] == "survived" else []
    for said in unnoticed:
        print("", f"{said['tests']} of {said['chosen']} tests passed with:", sep="\n")
        print(*said["diff"], sep="\n")
    return len(unnoticed)


if __name__ == "__main__":
    import mutate  # by the name that others know its classes by

    sys.exit(min(mutate.main(sys.argv[1:]), 1))
