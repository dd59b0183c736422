"""Faults injected into the simulated transport: what the ranks say of them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.simulated import backend as simulated
from fsdpcore.transports.simulated.faults import FaultInjector, Faults, InjectedCrash
from support.arrays import check_same
from support.bodies import asynchronous, groups, movement, point_to_point, reductions
from support.bodies.point_to_point import check_words, expect
from support.cases import bodies
from support.spmd import RanksFailed, meet, run

import fsdpcore as fc
from fsdpcore.core.clock import Clock


def _run(body: Any, world_size: int, *args: Any, **options: Any) -> list[Any]:
    return run(body, transport="sim", world_size=world_size, args=args, **options)


@pytest.mark.parametrize("seed", range(3))
@bodies(
    reductions.all_reduce_in_two_steps,
    movement.ragged_exchange,
    point_to_point.many_outstanding,
    point_to_point.one_tag_keeps_order,
    groups.several_at_once,
    groups.equal_members_do_not_mix,
    asynchronous.many_outstanding,
)
def test_delays_change_nothing(body: Any, seed: int) -> None:
    _run(body, 4, seed=seed, max_delay=0.0005)


class _Sleeps(Clock):
    """Takes no time for a sleep, and writes it down."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.sleep = self.slept.append


def _delays(seed: int, rank: int) -> list[float]:
    clock = _Sleeps()
    injector = FaultInjector(Faults(seed=seed, max_delay=2.0), rank, clock)
    assert not any(injector.before_post() for _ in range(10))
    return clock.slept


def test_delays_follow_the_seed() -> None:
    first = _delays(1, 0)
    assert len(first) == 10
    assert all(0 <= delay <= 2 for delay in first)
    assert _delays(1, 0) == first
    assert _delays(2, 0) != first
    assert _delays(1, 1) != first


def _lost_message(backend: fc.Backend) -> None:
    """The second message from 1 to 0 is lost; the others arrive."""
    if backend.rank == 1:
        for number in range(3):
            backend.send(np.full(2, number), 0, tag=number)
    elif backend.rank == 0:
        room = np.full(2, -1)
        for number in (0, 2):
            check_same(backend.recv(room, 1, tag=number), np.full(2, number), "arrived")
        error = expect(fc.CommTimeoutError, backend.recv, room, 1, tag=1, timeout=0.05)
        check_words(error, "rank 1", "tag 1")
    backend.barrier()


def test_lost_message() -> None:
    _run(_lost_message, 2, faults=Faults(drop={(1, 0): frozenset({1})}))


def _lost_in_a_collective(backend: fc.Backend) -> None:
    """All have begun the call, so nobody is missing: the error must not accuse anybody."""
    meet()
    error = expect(
        fc.CommTimeoutError, fc.all_reduce, np.ones(4), backend, algorithm="direct", timeout=0.3
    )
    check_words(error, "all_reduce #1", "every rank has begun it")
    meet()


def test_lost_in_a_collective() -> None:
    lost = frozenset(range(10))  # all of both ranks' data
    _run(_lost_in_a_collective, 2, faults=Faults(drop={(0, 1): lost, (1, 0): lost}))


def _death(backend: fc.Backend, victim: int) -> None:
    for _ in range(50):
        if backend.rank == victim:
            try:
                backend.barrier()
            except InjectedCrash:
                break
        else:
            try:
                backend.barrier()
            except fc.PeerFailedError as error:
                check_words(error, f"rank {victim} has died")
                failed = error
                break
    else:
        raise AssertionError("nobody died")
    if backend.rank == victim:
        expect(InjectedCrash, backend.barrier)
        backend.abort("a dead rank says nothing")
    else:
        assert failed.rank == victim
        assert str(expect(fc.PeerFailedError, backend.barrier)) == str(failed)
    meet()


@pytest.mark.parametrize("posts", [0, 1, 5, 20])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_death_of_a_rank(world_size: int, posts: int) -> None:
    victim = world_size // 2
    _run(_death, world_size, victim, faults=Faults(crash={victim: posts}))


def _death_while_waiting_long(backend: fc.Backend, src: Any) -> None:
    """A peer that the dead rank may have sent to is woken, long before its deadline."""
    if backend.rank == 1:
        meet()
        expect(InjectedCrash, backend.send, np.ones(3), 2)
    elif backend.rank == 0:
        work = backend.irecv(np.empty(3), src)
        meet()
        error = expect(fc.PeerFailedError, work.wait)
        check_words(error, "rank 1 has died")
    else:
        meet()
    meet()


@pytest.mark.parametrize("src", [1, fc.ANY])
def test_death_wakes_who_waits(src: Any) -> None:
    _run(_death_while_waiting_long, 3, src, faults=Faults(crash={1: 0}), op_timeout=300.0)


def _unlucky(backend: fc.Backend) -> None:
    backend.barrier()


def test_faults_make_a_careless_program_fail_on_every_rank() -> None:
    with pytest.raises(RanksFailed, match=r"failed on ranks \[0, 1, 2\] of 3"):
        _run(_unlucky, 3, faults=Faults(crash={0: 0}))


def test_faults_are_for_python_only() -> None:
    with pytest.raises(fc.ConfigError, match="from Python only"):
        fc.launch(_unlucky, world_size=1, transport="sim://?faults=many")


def test_a_message_that_comes_as_its_receive_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over, but before the receive is withdrawn the message is there: it is kept."""
    cancel, given_up = simulated.PostedReceive.cancel, threading.Event()

    def late(self: Any) -> bool:
        given_up.set()
        assert self.settle(20), "the message does not come"
        return cancel(self)

    def body(backend: fc.Backend) -> None:
        if backend.rank == 1:
            assert given_up.wait(20)
            backend.send(np.full(3, 7), 0)
        else:
            check_same(backend.recv(np.zeros(3, int), 1, timeout=0.01), np.full(3, 7), "received")

    monkeypatch.setattr(simulated.PostedReceive, "cancel", late)
    _run(body, 2)


_BEGINNINGS = {
    "post_send": lambda backend: backend.send(np.zeros(3), 1),
    "post_recv": lambda backend: backend.recv(np.zeros(3), 1),
    "post_probe": lambda backend: backend.iprobe(1),
}


def _broken_as_it_begins(backend: fc.Backend, name: str) -> None:
    if backend.rank == 1:
        backend.close()
        meet()
        return
    begin = getattr(backend.root, name)

    def hear_meanwhile(*args: Any) -> Any:
        try:
            return begin(*args)
        finally:
            backend.root.fail(fc.PeerFailedError("somebody was first", 1))

    setattr(backend.root, name, hear_meanwhile)
    meet()
    for call in (_BEGINNINGS[name], fc.Backend.barrier):
        assert str(expect(fc.PeerFailedError, call, backend)) == "somebody was first"


@pytest.mark.parametrize("name", _BEGINNINGS)
def test_who_finds_a_loss_as_another_tells_of_it_raises_what_all_later_calls_do(name: str) -> None:
    _run(_broken_as_it_begins, 2, name)


def test_leaving_takes_no_look_at_ranks_that_never_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    take_leave = simulated.SimBackend._take_leave

    def counted(backend: simulated.SimBackend, peer: simulated.SimBackend) -> None:
        looks.append(peer.rank)
        take_leave(backend, peer)

    monkeypatch.setattr(simulated.SimBackend, "_take_leave", counted)
    fc.launch(_to_the_right, world_size=100, transport="sim")
    assert len(looks) <= 100  # of 100 * 100


def _to_the_right(backend: fc.Backend) -> None:
    p, me = backend.world_size, backend.rank
    work = backend.isend(np.ones(3), (me + 1) % p)
    backend.recv(np.empty(3), (me - 1) % p)
    work.wait()


@pytest.mark.parametrize("waits", [fc.Backend.barrier, lambda backend: backend.recv(_THREE, 1)])
def test_who_is_told_of_a_failure_first_is_not_taken_for_its_cause(
    waits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear, over = simulated.SimBackend.peer_reported, threading.Event()

    def late(backend: simulated.SimBackend, rank: int, error: fc.CommunicationError) -> None:
        if backend.rank == 2:
            over.wait(0.2)
        hear(backend, rank, error)

    def body(backend: fc.Backend) -> None:
        backend.barrier()
        if backend.rank == 0:
            backend.abort("on purpose")
        elif backend.rank == 1:
            expect(fc.PeerFailedError, backend.barrier)
            backend.close()
        else:
            error = expect(fc.PeerFailedError, waits, backend)
            over.set()
            assert error.rank == 0, str(error)

    monkeypatch.setattr(simulated.SimBackend, "peer_reported", late)
    _run(body, 3)


@pytest.mark.parametrize("options", [{}, {"clock": "virtual"}])
def test_no_message_overtakes_one_that_is_lost(options: dict[str, str]) -> None:
    """A rank dies with a large message that nobody has taken, and a small one behind it."""

    def body(backend: fc.Backend) -> None:
        if backend.rank == 0:
            large, small = np.ones(1000), np.ones(3)
            works = [
                backend.isend(large, 1),
                backend.isend(small, 1),
                backend.isend(small, 1, tag=7),
            ]
            expect(InjectedCrash, backend.recv, _THREE, 1)
            assert len(works) == 3
        else:
            backend.recv(_THREE.copy(), 0, tag=7)  # so all of them have come; it dies then
            backend.clock.sleep(0.05)
            expect(fc.PeerFailedError, backend.recv, np.empty(1000), 0)

    _run(body, 2, faults=Faults(crash={0: 3}), eager_bytes=100, shm="off", **options)


_THREE = np.zeros(3)
