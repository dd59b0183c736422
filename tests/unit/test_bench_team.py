"""Ranks in other processes: asked together, and given up on as soon as one is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsdpcore.bench.harness import team
from fsdpcore.bench.harness.team import RemoteTeam
from fsdpcore.core.errors import RankFailedError
from fsdpcore.launch import supervision
from fsdpcore.launch.supervision import LaunchedProcess

# A rank that answers with its number, unless the order says something else.
PROGRAM = """
import json, os, socket, sys, time
rank, size, path, start = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if start == "exit": sys.exit(3)
if start == "hang": time.sleep(600)
channel = socket.socket(socket.AF_UNIX)
channel.connect(path)
lines = channel.makefile("rwb")
def say(**message):
    lines.write(json.dumps(message).encode() + b"\\n"); lines.flush()
if start != "mute":
    say(rank=rank, world_size=size, versions={"fake": {"rank": str(rank)}})
    for line in lines:
        order = json.loads(line)
        if order["do"] == "fail" and rank == 1: say(error="ValueError: no")
        elif order["do"] == "die" and rank == 1: os._exit(9)
        elif order["do"] in ("die", "hang"): time.sleep(600)
        else: say(answer=[rank, order["value"]])
"""


@pytest.fixture
def started(monkeypatch):
    """Make a team of two such ranks; at the end nothing of it is left."""
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.1)  # these do not end by themselves
    made = {}

    def begin(sizes=(2, 2), start="well"):
        def processes(directory: Path, path: str) -> list[LaunchedProcess]:
            made["directory"] = directory
            made["ranks"] = [
                LaunchedProcess([sys.executable, "-c", PROGRAM, str(rank), str(size), path, start])
                for rank, size in enumerate(sizes)
            ]
            return made["ranks"]

        return RemoteTeam("fake", 2, processes)

    yield begin
    assert not made["directory"].exists()
    assert all(rank.poll() is not None for rank in made["ranks"])


def test_all_ranks_answer_in_order(started):
    with started() as team:
        assert team.ask("fake", "echo", value=5) == [[0.0, 5.0], [1.0, 5.0]]
        assert team.ask("fake", "echo", value=6) == [[0.0, 6.0], [1.0, 6.0]]
        assert team.versions == {"fake": {"rank": "0"}}


def test_a_rank_that_fails(started):
    with pytest.raises(RankFailedError, match="fake: rank 1 failed: ValueError: no"):  # noqa: SIM117
        with started() as team:
            team.ask("fake", "fail", value=0)


def test_a_rank_that_dies_while_the_others_wait_for_it(started):
    with pytest.raises(RankFailedError, match="fake: rank 1 has ended"):  # noqa: SIM117
        with started() as team:
            team.ask("fake", "die", value=0)


def test_ranks_that_do_not_answer(started, monkeypatch):
    monkeypatch.setattr(team, "ANSWER_SECONDS", 0.2)
    with pytest.raises(RankFailedError, match=r"ranks 0, 1 have not answered 'hang'"):  # noqa: SIM117
        with started() as hanging:
            hanging.ask("fake", "hang", value=0)


def test_ranks_that_cannot_start(started):
    with pytest.raises(RankFailedError, match=r"could not be started \(exit code 3\)"):
        started(start="exit")


def test_ranks_that_never_come(started, monkeypatch):
    monkeypatch.setattr(team, "START_SECONDS", 0.3)
    with pytest.raises(RankFailedError, match="not all ranks had started after"):
        started(start="hang")


def test_a_rank_that_says_nothing(started):
    with pytest.raises(RankFailedError, match="ended"):
        started(start="mute")


def test_a_launcher_that_makes_worlds_of_one(started):
    with pytest.raises(RankFailedError, match="rank 0 thinks that there are 1 ranks, not 2"):
        started(sizes=(1,))
