"""Strangers at the ports of a job, two jobs at once, and the addresses that can be named."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq
from fsdpcore.transports.zmq.backend import ZmqBackend
from support.zmq_ranks import PATIENCE, config, listener, place, run_threads
from support.zmq_rogue import (
    EAGER,
    FAIL,
    TOKEN,
    Rogue,
    frame,
    greeting,
    proof,
    stranger_job,
)

import fsdpcore as fc
from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import RendezvousError
from fsdpcore.launch.config import resolve

# What strangers send to a port where ranks listen for each other.
GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00PLAIN" + bytes(47)
BYTES = {
    "nothing": b"",
    "a web request": b"GET / HTTP/1.0\r\n\r\n",
    "zeros": bytes(1000),
    "half a greeting": GREETING[:20],
    "a greeting": GREETING,
    "a greeting and a huge command": GREETING + b"\x06" + b"\xff" * 8,
    "a greeting and a huge message": GREETING + b"\x02" + b"\x7f" * 8 + bytes(100),
}


@contextlib.contextmanager
def raw(address: tuple[str, int], data: bytes) -> Iterator[socket.socket]:
    """A plain TCP connection that has sent some bytes."""
    with socket.create_connection(address) as connection:
        connection.sendall(data)
        yield connection


def port_of(rogue: Rogue) -> tuple[str, int]:
    """Where rank 0 listens for ZeroMQ's connection."""
    host, _, port = rogue.endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def finish(rogue: Rogue, joined: Callable[[], ZmqBackend]) -> None:
    """Let the true rank 1 come after all, and check that the job works."""
    rogue.connect()
    rogue.greet()
    backend = joined()
    assert isinstance(backend, ZmqBackend), backend
    check(backend, rogue)


def check(backend: ZmqBackend, rogue: Rogue) -> None:
    rogue.send(frame(EAGER, payload=b"abc"))
    out = np.empty(3, np.uint8)
    assert backend.post_recv(out, 1, Envelope(0, 0)).join(PATIENCE)
    assert out.tobytes() == b"abc"
    backend.check_usable()


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_stranger_before_the_rank(name: str, leaves: bool) -> None:
    with (
        stranger_job() as (port, joined),
        Rogue(port) as rogue,
        raw(port_of(rogue), BYTES[name]) as connection,
    ):
        if leaves:
            connection.close()
        finish(rogue, joined)


@pytest.mark.parametrize("name", BYTES)
def test_a_stranger_after_the_rank(name: str) -> None:
    with stranger_job() as (port, joined), Rogue(port) as rogue:
        rogue.connect()
        rogue.greet()
        backend = joined()
        with raw(port_of(rogue), BYTES[name]):
            check(backend, rogue)
        check(backend, rogue)


PEERS = {
    "without a password": (None, ""),
    "with the password of another job": ("1", proof(1, 0, "another")),
    "with the password of another rank": ("1", proof(2, 0)),
    "with the token itself": ("1", TOKEN),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_stranger_that_speaks_zeromq_is_not_heard(name: str) -> None:
    with stranger_job() as (port, joined), Rogue(port) as rogue:
        stranger = rogue.dial(*PEERS[name])
        gone = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(rogue.endpoint)
        with contextlib.suppress(zmq.Again):  # it may have been shown out already
            stranger.send(frame(FAIL, payload=b"bad"), zmq.DONTWAIT)
        assert gone.poll(int(PATIENCE * 1000)), "nobody showed the stranger out"
        gone.close(0)
        finish(rogue, joined)


def test_the_true_password_works_once() -> None:
    with stranger_job() as (port, joined), Rogue(port) as rogue:
        rogue.connect()
        rogue.greet()
        backend = joined()
        second = rogue.dial()
        gone = second.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        second.setsockopt(zmq.LINGER, 0)
        second.connect(rogue.endpoint)
        with contextlib.suppress(zmq.Again):
            second.send(frame(FAIL, payload=b"bad"), zmq.DONTWAIT)
        assert gone.poll(int(PATIENCE * 1000))
        gone.close(0)
        check(backend, rogue)


# The port for data connections.

SHOWN = {
    "nothing": b"",
    "a web request": BYTES["a web request"],
    "zeros": bytes(1000),
    "half a greeting": greeting(1, 0)[:30],
    "the greeting of another job": greeting(1, 0, "another"),
    "the greeting of another rank": greeting(2, 0),
    "the greeting of rank 0": greeting(0, 1),
    "another rank, with the proof of this one": greeting(2, 0)[:16] + greeting(1, 0)[16:],
}


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_stranger_at_the_data_port(name: str, leaves: bool) -> None:
    with (
        stranger_job() as (port, joined),
        Rogue(port) as rogue,
        raw(rogue.data, SHOWN[name]) as connection,
    ):
        if leaves:
            connection.close()
        elif len(SHOWN[name]) >= len(greeting(1, 0)):
            connection.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b"", "nobody showed the stranger out"
        finish(rogue, joined)


def test_many_strangers_at_the_data_port() -> None:
    with (
        stranger_job() as (port, joined),
        Rogue(port) as rogue,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(200):
            stack.enter_context(raw(rogue.data, b"who is there?"))
        finish(rogue, joined)


def test_the_data_port_is_closed_once_all_have_come() -> None:
    with stranger_job() as (port, joined), Rogue(port) as rogue:
        finish(rogue, joined)
        with pytest.raises(ConnectionError):
            socket.create_connection(rogue.data)


def test_the_true_greeting_works_once() -> None:
    with stranger_job() as (port, joined), Rogue(port) as rogue:
        rogue.line.connect(rogue.data)
        rogue.line.settimeout(PATIENCE)
        rogue.send(greeting(1, 0))
        assert rogue.answered()
        with raw(rogue.data, greeting(1, 0)) as second:
            second.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionError):
                assert second.recv(1) == b"", "nobody showed the stranger out"
        rogue.connect()
        rogue.hello()
        check(joined(), rogue)


def test_ranks_of_two_jobs_do_not_mix() -> None:
    with listener() as meeting:
        port, errors = meeting.getsockname()[1], list[BaseException]()

        def join(rank: int, token: str) -> None:
            here = place(rank, 2, port, token, None if rank else meeting)
            try:
                ZmqBackend.join(here, config(rendezvous_timeout=1.0)).close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=join, args=who) for who in [(0, "mine"), (1, "yours")]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    texts = sorted(str(error) for error in errors)
    assert [type(error) for error in errors] == [RendezvousError, RendezvousError]
    assert "without an answer to rank 1" in texts[0]
    assert "FSDPCORE_TOKEN" in texts[0]
    assert "rank 1 of 2 did not come" in texts[1]


def total(backend: fc.Backend) -> float:
    return float(fc.all_reduce(np.full(50_000, backend.rank + 1.0), backend)[-1])


def test_two_jobs_at_the_same_time() -> None:
    found: list[list[object]] = []

    def job() -> None:
        found.append([outcome.result for outcome in run_threads(total, 3)])

    threads = [threading.Thread(target=job) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [[6.0] * 3] * 2


def free_port(family: int, host: str) -> int:
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


HOSTS = [
    "127.0.0.1",
    "localhost",
    "127.0.0.2",
    pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
]


@pytest.mark.parametrize("host", HOSTS)
def test_addresses_in_the_url(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    port = free_port(family, host.strip("[]"))
    settings = resolve({"transport": f"zmq://{host}:{port}", "timeout": PATIENCE}, {})
    sums: list[float] = []

    def join(rank: int) -> None:
        here = RankPlace(rank, 2, rank, 2, "a test", None, None, "token")
        with ZmqBackend.join(here, settings) as backend:
            sums.append(total(backend))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sums == [3.0, 3.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_host(rank: int) -> None:
    url = {"transport": "zmq://no-such-host.invalid:5555", "rendezvous_timeout": 0.5}
    here = RankPlace(rank, 2, rank, 2, "a test", None, None, "token")
    with pytest.raises(RendezvousError, match=r"'no-such-host\.invalid'.* cannot be found") as e:
        ZmqBackend.join(here, resolve(url, {}))
    assert "\n" not in str(e.value)


def test_a_port_that_is_taken() -> None:
    with listener() as taken:
        port = taken.getsockname()[1]
        url = {"transport": f"zmq://127.0.0.1:{port}", "rendezvous_timeout": 0.5}
        here = RankPlace(0, 2, 0, 2, "a test", None, None, "token")
        with pytest.raises(RendezvousError, match=f"rank 0 cannot listen at 127.0.0.1:{port}: .*"):
            ZmqBackend.join(here, resolve(url, {}))


def test_an_interface_that_this_host_does_not_have() -> None:
    settings = config(interface="192.0.2.1", rendezvous_timeout=0.5)
    with listener() as meeting:
        here = place(0, 2, meeting.getsockname()[1], "token", meeting)
        with pytest.raises(RendezvousError, match=r"rank 0 cannot listen at 192\.0\.2\.1"):
            ZmqBackend.join(here, settings)
