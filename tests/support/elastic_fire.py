"""An elastic job on the hosts of a lab, and all that may happen to it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from support.hosts.lab import Host, Lab
from support.jobs import clean_environ

PORT = 5600
HEARTBEAT, LOST_AFTER = 1.0, 2.0
PATIENCE = 60.0
SCRIPT = Path(__file__).with_name("elastic_burned.py")


@dataclass
class Entry:
    """A line of a diary; see ``elastic_burned.Diary``."""

    what: str
    at: float
    pid: int
    rest: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.rest[name]
        except KeyError:
            raise AttributeError(name) from None


def read(folder: Path) -> list[Entry]:
    """All that the processes of a job have written so far, in order of time."""
    found = []
    for path in folder.glob("diaries/*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # else it is being written
                content = json.loads(line)
                what, at, pid = (content.pop(name) for name in ("what", "at", "pid"))
                found.append(Entry(what, at, pid, content))
    return sorted(found, key=lambda entry: entry.at)


def recoveries(entries: Sequence[Entry]) -> list[float]:
    """Of each loss the seconds from its notice to the end of the next step.

    That is from the first of those that go on which gave up its generation, to the last of them
    that has made a commit in a later one. Changes in order are none.
    """
    commits = [entry for entry in entries if entry.what == "commit"]
    notices: dict[int, float] = {}
    for entry in entries:
        if entry.what == "unwound" and entry.why != "HandedOver":
            notices.setdefault(entry.generation, entry.at)
    found = []
    for generation, at in notices.items():
        later: dict[int, dict[int, float]] = {}
        for entry in commits:
            if entry.generation > generation:
                later.setdefault(entry.generation, {}).setdefault(entry.pid, entry.at)
        if later:
            found.append(max(later[min(later)].values()) - at)
    return found


@dataclass
class Fire:
    """A job on three hosts or so, of ``per_host`` ranks each; all of it ends with the block.

    Attributes:
        lab: its hosts.
        folder: of diaries, checkpoints and what the agents print.
        arguments: of the training.
        script: of the training, whose diary is that of ``elastic_burned``.
        patience: seconds after which what does not happen hangs.
        struck: the processes that we have killed, stopped or cut off.
        faults: what was done, by kind.
        seconds: from each fault until all that were left, or all, had made a commit again.
    """

    lab: Lab
    folder: Path
    arguments: Sequence[object]
    per_host: int = 2
    seed: int = 0
    script: Path = SCRIPT
    patience: float = PATIENCE
    struck: set[int] = field(default_factory=set)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._token = secrets.token_hex(16)
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self.all = len(self.lab.hosts) * self.per_host

    def __enter__(self) -> Fire:
        for host in self.lab.hosts:
            where = ["--nnodes", len(self.lab.hosts), "--node-rank", host.number]
            self._start(host, [*where, "--address", f"{self.lab.hosts[0].address}:{PORT}"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for agent in self._agents.values():
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
            agent.wait()

    def _start(self, host: Host, where: Sequence[object]) -> None:
        url = f"zmq://?heartbeat={HEARTBEAT:g}&host_id={host.name}&security=none"
        words = [sys.executable, "-m", "fsdpcore", "run", "--elastic", "--restarts", 1000]
        words += ["-n", f"1:{self.all}", "--per-node", self.per_host, *where]
        words += ["--lost-after", LOST_AFTER, "--transport", url, "--rendezvous-timeout", 30]
        words += [self.script, self.folder, *self.arguments]
        environ = clean_environ(FSDPCORE_TOKEN=self._token, LAB_HOST=str(host.number))
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"agent-{host.number}.log", "ab") as log:
            self._agents[host.number] = subprocess.Popen(
                host.command(*words), env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def rejoin(self, host: Host) -> None:
        """Start an agent on a host anew; it joins whoever of the job is there."""
        agent = self._agents[host.number]
        if agent.poll() is None:
            self._struck_on(host)
            agent.kill()
        agent.wait()
        everybody = ",".join(f"{each.address}:{PORT}" for each in self.lab.hosts)
        self._start(host, ["--join", everybody])

    # What is known.

    def ranks(self, host: Host | None = None) -> dict[int, Entry]:
        """The last entry of each process that lives, on a host or on all."""
        last = {entry.pid: entry for entry in read(self.folder)}
        return {
            pid: entry
            for pid, entry in last.items()
            # At its end a process no longer says where it is.
            if (host is None or entry.rest.get("host") == host.number) and _lives(pid)
        }

    def ended(self) -> bool:
        """Whether the training has come to its end on some rank."""
        return any(entry.what == "end" for entry in read(self.folder))

    def whole(self, since: float) -> bool:
        """Whether all ranks of one generation, as many as can be, have made a commit since."""
        entries = [e for e in read(self.folder) if e.what == "commit" and e.at > since]
        if not entries:
            return False
        newest = max(entry.generation for entry in entries)
        there = {e.pid: e.world_size for e in entries if e.generation == newest}
        return len(there) == self.all and set(there.values()) == {self.all}

    def wait(self, what: Callable[[], bool], words: str) -> bool:
        """Wait until something is so; False if the training has ended before.

        Raises:
            AssertionError: it does not happen.
        """
        end = time.monotonic() + self.patience
        while not what():
            if self.ended():
                return False
            for number, agent in self._agents.items():
                assert agent.poll() is None, f"agent {number} ended: {self.said(number)}"
            assert time.monotonic() < end, f"hangs: {words}; {self.describe()}"
            time.sleep(0.03)
        return True

    def said(self, number: int) -> str:
        """The last that an agent has printed."""
        return (self.folder / f"agent-{number}.log").read_text(errors="replace")[-1500:]

    def describe(self) -> str:
        """For whoever has to find out what went wrong."""
        lines = [f"seed {self.seed}, folder {self.folder}, faults {dict(self.faults)}"]
        lines += [f"{pid}: {entry}" for pid, entry in self.ranks().items()]
        lines += [f"agent {number}: {self.said(number)}" for number in self._agents]
        return "\n".join(lines)

    # What happens. Each returns when the job is whole again, or has ended.

    def strike(self, kind: str) -> None:
        """Let something happen, and wait until the job is whole again."""
        if not self.wait(lambda: self.whole(0.0), "the job is not whole at first"):
            return
        self.faults[kind] += 1
        began = time.monotonic()
        getattr(self, f"_{kind}")()
        struck = time.monotonic()  # all may have made a commit while it was made out whom to strike
        if self.wait(lambda: self.whole(struck), f"no recovery from {kind}"):
            self.seconds.setdefault(kind, []).append(time.monotonic() - began)

    def flurry(self, count: int) -> None:
        """Kill a rank as soon as somebody has made a commit since the last one was killed."""
        for _ in range(count):
            self.faults["kill"] += 1
            began = time.monotonic()
            self._kill()
            if not self.wait(functools.partial(self._goes_on, began), "nobody goes on"):
                return

    def _goes_on(self, since: float) -> bool:
        return any(entry.what == "commit" and entry.at > since for entry in read(self.folder))

    def _pick(self, count: int = 1) -> list[int]:
        ranks = sorted(self.ranks())
        return self.random.sample(ranks, min(count, len(ranks)))

    def _kill_ranks(self, pids: Sequence[int], number: int = signal.SIGKILL) -> None:
        for pid in pids:
            self.struck.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _struck_on(self, host: Host) -> None:
        self.struck |= self.ranks(host).keys()

    def _kill(self) -> None:
        self._kill_ranks(self._pick())

    def _stop(self) -> None:
        self._kill_ranks(self._pick(), signal.SIGSTOP)

    def _two(self) -> None:
        self._kill_ranks(self._pick(2))

    def _rank_0(self) -> None:
        first = [pid for pid, entry in self.ranks().items() if entry.rank == 0]
        self._kill_ranks(first[-1:])

    def _in_recovery(self) -> None:
        self._kill_ranks(self._pick())
        time.sleep(self.random.uniform(0.02, 0.6))
        self._kill_ranks(self._pick())

    def _in_join(self) -> None:
        """Another one goes while one that was started again joins."""
        before = set(self.ranks())
        victim = self._pick()
        self._kill_ranks(victim)
        time.sleep(self.random.uniform(0.8, 3.0))
        others = sorted(before - set(victim))
        self._kill_ranks([self.random.choice(others)])

    def _host(self) -> None:
        host = self.random.choice(self.lab.hosts)
        self._struck_on(host)
        self.lab.vanish(host.number)
        self._agents[host.number].wait()
        self._back_after(host)

    def _cut(self) -> None:
        host = self.random.choice(self.lab.hosts)
        self._struck_on(host)
        self.lab.cut(host.number)
        self._back_after(host)

    def _one_way(self) -> None:
        host, other = self.random.sample(self.lab.hosts, 2)
        self._struck_on(host)
        self._struck_on(other)  # either may be left out
        self.lab.lose(host.number, other.number)
        self._back_after(None)

    def _blink(self) -> None:
        """A cable that is out for less than anybody's patience."""
        host = self.random.choice(self.lab.hosts)
        # On a busy machine a link may break all the same, and then either of its hosts may go.
        for each in self.lab.hosts:
            self._struck_on(each)
        self.lab.cut(host.number)
        time.sleep(self.random.uniform(0.05, 0.4))
        self.lab.mend()

    def _back_after(self, host: Host | None) -> None:
        """Wait until the others go on, mend the links, and have who was left out join again."""
        began = time.monotonic()
        end = began + self.patience
        while not (left := self._smaller(began)) and not self.ended():
            assert time.monotonic() < end, f"the others do not go on: {self.describe()}"
            time.sleep(0.03)
        self.lab.mend()
        if self.ended():
            return
        out = [each for each in self.lab.hosts if each.number not in left]
        assert host is None or host in out, (host, left)
        for each in out:
            self.rejoin(each)

    def _smaller(self, since: float) -> set[int]:
        """The hosts of a generation with fewer ranks that has made a commit since."""
        entries = [e for e in read(self.folder) if e.what == "commit" and e.at > since]
        newest = max((entry.generation for entry in entries), default=0)
        last = [e for e in entries if e.generation == newest]
        complete = last and len({e.pid for e in last}) == last[0].world_size < self.all
        return {entry.host for entry in last} if complete else set()

    # The end.

    def finish(self) -> dict[str, Any]:
        """Wait for the end; return what all ranks have told of it.

        Raises:
            AssertionError: ranks differ, some end badly, or a process that was left alone is gone.
        """
        while any(agent.poll() is None for agent in self._agents.values()):
            last = max((entry.at for entry in read(self.folder)), default=0.0)
            assert time.monotonic() < last + self.patience, f"hangs at the end: {self.describe()}"
            time.sleep(0.1)
        entries = read(self.folder)
        ends = [entry for entry in entries if entry.what == "end"]
        assert ends, f"nobody came to the end: {self.describe()}"
        told = {json.dumps([e.digest, e.used, e.epochs]) for e in ends}
        assert len(told) == 1, f"ranks ended differently: {told}; {self.describe()}"
        begun = {entry.pid for entry in entries}
        gone = begun - {entry.pid for entry in ends} - self.struck
        assert not gone, f"nobody had touched {gone}: {self.describe()}"
        return {"digest": ends[0].digest, "used": ends[0].used, "epochs": ends[0].epochs}


KINDS = (
    "kill",
    "stop",
    "two",
    "rank_0",
    "in_recovery",
    "in_join",
    "host",
    "cut",
    "one_way",
    "blink",
)
# How many faults one of a kind is.
DOUBLE = {"two", "in_recovery", "in_join"}


def _lives(pid: int) -> bool:
    """Whether a process runs or is stopped, and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
