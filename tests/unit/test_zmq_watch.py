"""What a rank of zmq finds out about others: many ranks, none of which is a process."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from fsdpcore.transports.zmq import watch
from fsdpcore.transports.zmq.keys import JobKeys
from fsdpcore.transports.zmq.links import IO_THREADS, Links
from fsdpcore.transports.zmq.probe import CUT, ENDED, SILENT, STOPPED, UNKNOWN, Probe
from fsdpcore.transports.zmq.watch import ALIVE, LEFT, Report, Watch
from support.zmq_ranks import PATIENCE

from fsdpcore.core.clock import Clock
from fsdpcore.core.errors import CommunicationError, PeerFailedError

NOWHERE = ("127.0.0.1", 1)


class Job:
    """Ranks that tell each other at once, and a clock."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, world_size: int, per_host: int | None = None
    ) -> None:
        self.now = 100.0
        self.hosts = tuple(rank // (per_host or world_size) for rank in range(world_size))
        self.clock = Clock()
        self.clock.now = lambda: self.now  # type: ignore[method-assign]
        monkeypatch.setattr(watch, "Probe", self.probe)
        self.findings = [CUT] * world_size
        self.ended: set[int] = set()
        self.ranks = [Rank(self, rank, world_size) for rank in range(world_size)]

    def probe(self, address: tuple[str, int], seconds: float, clock: Clock) -> Found:
        """A probe that finds what there is."""
        return Found(self.findings[address[1]], self.now + seconds, self)

    def leave(self, *ranks: int) -> None:
        """Have ranks leave, and end."""
        for rank in ranks:
            self.ranks[rank].watch.leave()
        self.end(*ranks)

    def end(self, *ranks: int) -> None:
        """End processes."""
        self.ended |= set(ranks)
        for rank in ranks:
            self.findings[rank] = ENDED
            for other in self.there():
                if rank in self.ranks[other].links or other in self.ranks[rank].links:
                    self.ranks[other].watch.lost(rank)

    def there(self) -> list[int]:
        return [rank.number for rank in self.ranks if rank.number not in self.ended]

    def wait(self, seconds: float) -> None:
        """Let time pass for those that are there."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.01
            for rank in self.there():
                self.ranks[rank].watch.tick()

    def errors(self) -> dict[int, CommunicationError | None]:
        return {rank: self.ranks[rank].error for rank in self.there()}


class Found:
    """A probe that has found something: at its end, if that nothing comes back."""

    def __init__(self, found: str, end: float, job: Job) -> None:
        self.found, self.end, self.job = found, end, job

    def look(self) -> str:
        return self.found if self.found != STOPPED or self.job.now >= self.end else ""

    def close(self) -> None:
        pass


class Rank:
    """The owner of a watch."""

    def __init__(self, job: Job, number: int, world_size: int) -> None:
        addresses = [(NOWHERE[0], rank) for rank in range(world_size)]
        self.job, self.number, self.links = job, number, set[int]()
        self.error: CommunicationError | None = None
        self.watch = Watch(number, job.hosts, addresses, 5.0, self, job.clock)
        for rank in self.watch.neighbours:
            self.links.add(rank)

    def spread(self, content: Mapping[str, Any], source: int | None) -> None:
        for rank in set(self.watch.neighbours) - {source} - self.job.ended:
            self.job.ranks[rank].watch.heard(self.number, content)

    def open(self, rank: int) -> None:
        self.links.add(rank)
        if rank in self.job.ended:
            self.watch.lost(rank)

    def has_left(self, rank: int) -> bool:
        return rank in self.watch.leavers

    def miss_if_incomplete(self, rank: int) -> None:
        pass

    def note_left(self, rank: int) -> None:
        pass

    def fail(self, error: CommunicationError) -> None:
        self.error = self.error or error


@pytest.mark.parametrize("apart", [0.0, 0.3, 0.9])
def test_ranks_that_leave_one_after_another_are_missed_by_nobody(
    monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    """Not even those whose neighbours have all left before."""
    job = Job(monkeypatch, 8)
    for rank in (1, 2, 4, 5):
        job.leave(rank)
        job.wait(apart)
    job.wait(0.3)
    job.leave(3)
    job.wait(3.0)
    assert job.errors() == {0: None, 6: None, 7: None}
    assert [job.ranks[rank].watch.leavers for rank in (0, 6, 7)] == [{1, 2, 3, 4, 5}] * 3


def test_the_gaps_that_leaving_ranks_make_are_closed_while_more_of_them_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, 12)
    for rank in (1, 11, 3, 9):
        job.leave(rank)
        job.wait(0.6)
    job.end(0)
    job.wait(0.3)
    for error in job.errors().values():
        assert isinstance(error, PeerFailedError)
        assert error.rank == 0


def test_a_rank_whose_last_words_are_still_on_their_way_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is none of its neighbours may find that it has ended before it hears that it left."""
    job = Job(monkeypatch, 8)
    job.ended.add(3)
    job.findings[3] = ENDED
    job.ranks[0].watch.lost(3)
    job.wait(0.1)
    job.ranks[1].watch.heard(3, Report(3, 3, LEFT)._asdict())
    job.wait(0.5)
    assert not any(job.errors().values())


def test_a_rank_that_has_told_of_another_can_be_lost_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, 4)
    job.leave(2)
    job.ranks[1].watch.heard(0, Report(2, 0, ENDED)._asdict())
    job.wait(0.3)
    assert job.errors() == {0: None, 1: None, 3: None}
    job.ended.add(0)
    job.ranks[1].watch.heard(0, Report(0, 3, SILENT)._asdict())
    job.wait(0.3)
    for error in job.errors().values():
        assert isinstance(error, PeerFailedError)
        assert (error.rank, error.pair) == (0, None)


@pytest.mark.parametrize("heard", [True, False])
def test_of_a_host_of_which_others_hear_it_is_the_network(
    monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """Though the rank that one of them does not hear says nothing for itself: it computes."""
    job = Job(monkeypatch, 4, per_host=2)
    job.ended |= {2} if heard else {2, 3}
    for rank in (0, 1, 3) if heard else (0, 1):  # those of its host, too, say so
        job.ranks[rank].watch.heard(2, Report(2, 1, SILENT)._asdict())
        if heard:
            job.ranks[rank].watch.heard(2, Report(3, 3, ALIVE)._asdict())
    job.wait(0.3)
    for error in job.errors().values():
        assert isinstance(error, PeerFailedError)
        assert (error.rank, error.pair) == ((1, (1, 2)) if heard else (2, None))


def test_a_rank_far_away_has_time_to_say_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, 3)
    watching = job.ranks[0].watch
    watching.expect(0.3)
    job.findings[1] = STOPPED
    watching.lost(1)
    job.wait(1.1)
    assert job.errors() == dict.fromkeys(range(3))
    job.wait(1.5)
    assert all(job.errors().values())


def test_a_system_that_does_not_count_wakes_tells_no_rank_that_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(resource, "RUSAGE_THREAD", raising=False)
    standstill = watch._Standstill(1.0)
    for now in (0.0, 5.0):
        standstill.look(now)
    assert standstill.seconds(5.0) == 0


# Real connections.


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_rank_without_descriptors_looks_later_and_accuses_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with no_descriptors():
            with pytest.raises(OSError, match="Too many open files"):
                socket.socket()
            probe = Probe(listener.getsockname()[:2], PATIENCE)
            assert probe.look() == ""
        assert probe.look() == ""
        with listener.accept()[0] as connection:
            connection.send(b"\xff")
            assert found(probe) == CUT
    with no_descriptors():
        assert found(Probe(NOWHERE, 0.1)) == UNKNOWN
    probe = Probe(NOWHERE, PATIENCE)
    assert found(probe) == ENDED


def found(probe: Probe) -> str:
    while not probe.look():
        pass
    return probe.look()


def test_a_link_that_cannot_be_made_for_want_of_descriptors_is_lost() -> None:
    lost: list[tuple[int, bool]] = []
    with zmq.Context[zmq.Socket[bytes]](IO_THREADS) as context:
        keys = JobKeys("a secret")
        links = Links(
            context,
            0,
            2,
            keys,
            encrypted=False,
            heartbeat=5.0,
            lost=lambda rank, to: lost.append((rank, to)),
        )
        links.introduce(b"", [NOWHERE, NOWHERE])
        end = time.monotonic() + PATIENCE
        with no_descriptors():
            links.open(1)
            while not lost:
                assert time.monotonic() < end, "nobody notices"
                links.look()
        links.close(0)
    assert lost == [(1, True)]


def test_a_process_that_just_ends_is_looked_at_again():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probe = Probe(listener.getsockname()[:2], PATIENCE)
        listener.accept()[0].close()
    assert found(probe) == ENDED


def test_who_is_cut_off_shows_that_the_other_is_alive(monkeypatch):
    job = Job(monkeypatch, 4)
    job.ended.add(3)  # is too busy to say so
    for rank in (0, 1, 2):
        job.ranks[rank].watch.heard(3, Report(3, 0, SILENT)._asdict())
        job.ranks[rank].watch.heard(3, Report(3, 1, CUT)._asdict())
    job.wait(0.3)
    assert {error.pair for error in job.errors().values()} == {(0, 3)}
