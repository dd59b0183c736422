"""What an agent does with its processes and its member; the processes are played."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdpcore.elastic.agent import Agent
from fsdpcore.elastic.generation import Generation, HostCard, Seat
from fsdpcore.elastic.host import AgentShare, run_host
from fsdpcore.elastic.membership import Member
from fsdpcore.elastic.seats import Seats
from fsdpcore.launch.config import resolve
from fsdpcore.launch.run.endings import ScriptExit

CARD = HostCard("a", "a:1", "a:2")


class Process:
    """A process that does what the test says, and ends when it is let go or killed."""

    pid = 0

    def __init__(self, end: int) -> None:
        self.code: int | None = None
        self.signals: list[int] = []
        self.obeys = True
        self._socket = socket.socket(fileno=os.dup(end))
        self._socket.settimeout(1.0)
        self._lines = self._socket.makefile()

    def tell(self, kind: str, **fields: Any) -> None:
        self._socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lines.readline())
        return found

    def end(self, code: int) -> None:
        self.code = code
        self._lines.close()
        self._socket.close()

    def poll(self) -> int | None:
        return self.code

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL and self.obeys and self.code is None:
            self.end(-number)

    def watched(self) -> list[int]:
        return []

    def close(self) -> None:
        if self.code is None:
            self.end(0)


class Links:
    """Links to other agents; there is none."""

    def send(self, address: str, message: Any) -> None:
        pass

    def take(self) -> list[Any]:
        return []

    def refused(self) -> set[str]:
        return set()


class Played:
    """An agent of a job of its own with so many processes, all of which are ready."""

    def __init__(self, count: int, maximum: int, restarts: int = 0) -> None:
        self.processes: list[Process] = []
        self.said: list[str] = []
        self.seats = Seats(self._start, -1, {})
        links: Any = Links()
        self.agent = Agent(
            lambda others, job: (CARD.id, self._found(maximum)),
            links,
            self.seats,
            token="",
            listener_fd=-1,
            restarts=restarts,
            say=self.said.append,
        )
        for _ in range(count):
            self.agent._start()
        for process in self.processes:
            process.tell("ready")
        self.step()

    def _found(self, maximum: int) -> Member:
        terms: Any = {"minimum": 1, "maximum": maximum, "lost_after": 9.0, "patience": 60.0}
        self.member = Member(CARD, job="job", **terms)
        self.member.found(1, time.monotonic())
        return self.member

    def _start(self, number: int, variables: Mapping[str, str], fds: Sequence[int] = ()) -> Any:
        self.processes.append(Process(fds[0]))
        return self.processes[-1]

    def step(self, *signals: int) -> None:
        self.agent._step([*signals])


@pytest.fixture
def playing() -> Iterator[list[Played]]:
    made: list[Played] = []
    yield made
    for played in made:
        played.seats.close()


def test_who_waits_is_let_go_when_it_is_to_leave(playing: list[Played]) -> None:
    played = Played(3, maximum=1)
    playing.append(played)
    rank, asked, waiting = played.processes
    assert rank.hear()["kind"] == "generation"
    asked.tell("leave", reason="it was told to")
    played.step()
    assert asked.hear() == {"kind": "left"}
    asked.end(0)
    played.step(signal.SIGTERM)
    assert waiting.hear() == {"kind": "left"}
    waiting.end(0)
    assert rank.hear()["kind"] == "change"
    rank.tell("paused", number=1, commit=1, leaves=True)
    played.step()
    rank.end(0)
    played.step()
    assert played.agent._ending() is not None


def test_a_host_joins_again_though_the_disk_of_the_witness_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    made = []

    class Rejoining:
        def __init__(self, make_member: Any, *args: Any, **options: Any) -> None:
            made.append(make_member((), ""))
            folder.rename(tmp_path / "away")
            made.append(make_member(("b:1",), "job"))

        def run(self, count: int) -> ScriptExit:
            return ScriptExit(0)

    share = AgentShare(1, 1, 1, ("127.0.0.1", 0), token="x" * 32, witness=str(folder / "witness"))
    with mock.patch("fsdpcore.elastic.host.Agent", Rejoining):
        run_host([], resolve({"transport": "zmq"}, {}), {}, share, lambda *_: None, print)
    (one, first), (other, second) = made
    assert one != other
    assert first._describe(0.0).witness == second._describe(0.0).witness != ""


def test_who_was_killed_and_does_not_end_is_not_killed_again_and_again(
    playing: list[Played],
) -> None:
    played = Played(1, maximum=1)
    playing.append(played)
    (process,), (seat,) = played.processes, played.seats.living
    process.obeys, seat.kill_at = False, time.monotonic()
    for _ in range(3):
        played.step()
    assert process.signals == [signal.SIGKILL]
    assert seat.kill_at is None


def test_an_interrupted_agent_stays_as_long_as_others_need_its_vote(playing: list[Played]) -> None:
    played = Played(1, maximum=1)
    playing.append(played)
    other = HostCard("b", "b:1", "b:2")
    both = (Seat("a", 0), Seat("b", 0))
    played.member._learn(Generation(2, (CARD, other), both), time.monotonic())
    played.step(signal.SIGINT)
    played.processes[0].end(-signal.SIGINT)
    played.step()
    assert played.agent._ending() is None
    played.member._learn(Generation(3, (other,), both[1:]), time.monotonic())
    played.step()
    assert played.agent._ending() is not None


def test_an_interrupted_agent_starts_nothing_again(playing: list[Played]) -> None:
    played = Played(1, maximum=1, restarts=1)
    playing.append(played)
    played.step(signal.SIGINT)
    played.processes[0].tell("failed", reason="it was interrupted")
    played.step()
    assert len(played.processes) == 1
