"""A meeting of processes that is given up, and one that says who did not come."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

import fsdpcore as fc
from fsdpcore.comm.place import RankPlace
from fsdpcore.launch.config import resolve
from fsdpcore.launch.rank import join


class Joining:
    """A thread that becomes a rank of three."""

    def __init__(self, rank: int, address: str, seconds: float = 30.0) -> None:
        self.why, self.error, self.ended = "", None, 0.0
        place = RankPlace(
            rank, 3, rank, 3, "a test", address, token="x" * 32, given_up=lambda: self.why
        )
        self._place: Any = place
        self._config = resolve({"transport": "zmq", "rendezvous_timeout": seconds}, {})
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            join(self._place, self._config).close()
        except fc.RendezvousError as error:
            self.error = error
        self.ended = time.monotonic()

    def join(self) -> fc.RendezvousError:
        self._thread.join(20)
        assert isinstance(self.error, fc.RendezvousError)
        return self.error


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("there", [(0,), (1,), (0, 1)])
def test_a_meeting_is_given_up_at_once(there: tuple[int, ...], address: str) -> None:
    joining = [Joining(rank, address) for rank in there]
    time.sleep(0.3)
    now = time.monotonic()
    for each in joining:
        each.why = "generation 2 begins"
    told = [str(each.join()) for each in joining]
    # The first one may be gone before the other one has looked.
    assert any("generation 2 begins" in text for text in told), told
    assert all(each.ended - now < 2 for each in joining)


def test_who_did_not_come_is_named(address: str) -> None:
    joining = [Joining(rank, address, 0.5) for rank in (0, 1)]
    assert [each.join().ranks for each in joining] == [(2,), (2,)]
    assert Joining(1, address, 0.3).join().ranks == (0,)
