"""How processes find out whether they are on one host."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from fsdpcore.comm import hosts
from fsdpcore.core.errors import ConfigError


def test_processes_that_see_each_other_are_on_one_host() -> None:
    code = "from fsdpcore.comm import hosts; print(hosts.identity())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == hosts.identity()
    assert len(hosts.identity().encode()) <= hosts.MAX_BYTES


def test_processes_of_other_containers_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    here = hosts.identity()
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[17]")
    assert hosts.identity() != here


def test_the_user_may_say_so() -> None:
    assert hosts.identity("rack 3") == "rack 3"
    assert hosts.identity("é" * 32) == "é" * 32
    with pytest.raises(ConfigError, match="host_id must be at most 64 bytes"):
        hosts.identity("é" * 33)


def test_numbers_follow_the_first_appearance() -> None:
    assert hosts.number(["b", "a", "b", "c"]) == (0, 1, 0, 2)


@pytest.mark.parametrize(
    ("others", "containers"),
    [
        ([], 0),
        (["a host of its own"], 0),
        (["another boot, pid:[1]", "the third, pid:[1]"], 0),
        (["{boot}, pid:[1]"], 2),
        (["{boot}, pid:[1]", "{boot}, pid:[2]", "{boot}, pid:[1]", "x, pid:[9]"], 3),
    ],
)
def test_containers_on_one_machine_are_pointed_out(
    others: list[str],
    containers: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[77]")
    here = hosts.identity()
    boot = here.partition(", pid:")[0]
    with caplog.at_level(logging.WARNING):
        hosts.warn_of_containers([here, *(other.format(boot=boot) for other in others)])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (containers > 0)
    assert all(f"in {containers} containers" in message for message in messages)
