"""Strangers at the ports of a job, two jobs at once, and the addresses that can be named."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from fsdpcore.transports.zmq import joining
from fsdpcore.transports.zmq.backend import ZmqBackend
from support.zmq_ranks import (
    PATIENCE,
    Outcome,
    config,
    listener,
    place,
    run_joined,
    run_threads,
)
from support.zmq_rogue import (
    EAGER,
    FAIL,
    TOKEN,
    Address,
    Keys,
    Rogue,
    frame,
    rogue_job,
    stranger_job,
    url,
)

import fsdpcore as fc
from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import ConfigError, RendezvousError
from fsdpcore.core.work import Deadline
from fsdpcore.launch import endpoints
from fsdpcore.launch.config import resolve

# What strangers send to a port where ranks listen for each other.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
PLAIN = GREETING + b"NULL".ljust(52, b"\0")
READY = b"\x04\x29\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
BYTES = {
    "nothing": b"",
    "a web request": b"GET / HTTP/1.0\r\n\r\n",
    "zeros": bytes(1000),
    "half a greeting": GREETING,
    "another mechanism": GREETING + b"PLAIN".ljust(52, b"\0"),
    "a greeting and a huge command": PLAIN + b"\x06" + b"\xff" * 8,
    "a name that no rank has": PLAIN + READY + b"\x00\x03abc",
    "a huge message": PLAIN + READY + b"\x02" + b"\x7f" * 8 + bytes(100),
    "half a message": PLAIN + READY + b"\x01\x03abc",
}


@contextlib.contextmanager
def raw(address: Address, data: bytes) -> Iterator[socket.socket]:
    """A plain TCP connection that has sent some bytes."""
    with socket.create_connection(address) as connection:
        connection.sendall(data)
        yield connection


def check(backend: ZmqBackend, rogue: Rogue) -> None:
    rogue.send(frame(EAGER, payload=b"abc"))
    out = np.empty(3, np.uint8)
    assert backend.post_recv(out, 1, Envelope(0, 0)).join(PATIENCE)
    assert out.tobytes() == b"abc"
    backend.check_usable()


@pytest.mark.parametrize("security", ["auto", "curve"])
@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_stranger_changes_nothing(name: str, leaves: bool, security: str) -> None:
    """Before the rank comes, and after it."""
    with (
        stranger_job(security=security) as (port, joined),
        Rogue(port, encrypted=security == "curve") as rogue,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(2):
            connection = stack.enter_context(raw(rogue.address, BYTES[name]))
            if leaves:
                connection.close()
            if not rogue.number:
                rogue.connect()
            check(joined(), rogue)


def test_many_strangers() -> None:
    with stranger_job() as (port, joined), Rogue(port) as rogue, contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(raw(rogue.address, b"who is there?"))
        rogue.connect()
        check(joined(), rogue)


def shown_out(rogue: Rogue, name: bytes, server: bytes | None) -> None:
    """Come as this, and be neither let in nor heard."""
    stranger = rogue.dial(name, server)
    stranger.setsockopt(zmq.LINGER, 0)
    failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    events = failed | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
    monitor = stranger.get_monitor_socket(events)
    stranger.connect(url(rogue.address))
    stranger.send_multipart([b"rank 0", bytes(8) + frame(FAIL)[0], b"{}"])
    assert monitor.poll(int(PATIENCE * 1000)), "nobody showed the stranger out"
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
    stranger.disable_monitor()
    monitor.close(0)
    stranger.close(0)


STRANGERS = {
    "without encryption": None,
    "with another secret": Keys("another token of a job").listening(0),
    "with the secret of another job": Keys(TOKEN, "another").listening(0),
    "with another rank's key": Keys().listening(1),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_who_does_not_know_the_secret_is_shown_out(name: str) -> None:
    """Though it knows the name of the link, and comes before the rank."""
    with (
        stranger_job(security="curve") as (port, joined),
        Rogue(port, encrypted=True) as rogue,
    ):
        joined()
        shown_out(rogue, rogue.name, STRANGERS[name])
        rogue.connect()
        check(joined(), rogue)


@pytest.mark.parametrize("security", ["auto", "curve"])
def test_the_name_of_an_earlier_link_or_of_another_is_not_heard(security: str) -> None:
    encrypted = security == "curve"
    with rogue_job(security=security) as (_, earlier):
        pass
    with rogue_job(security=security) as (backend, rogue):
        server = rogue.keys.listening(0) if encrypted else None
        check(backend, rogue)
        others = [earlier.name, rogue.keys.link(0, 1, rogue.nonce), rogue.name]
        assert earlier.name != rogue.name, "though their secret is the same"
        for name in others:
            stranger = rogue.dial(name, server)
            greeted = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            stranger.connect(url(rogue.address))
            assert greeted.poll(int(PATIENCE * 1000))
            stranger.send_multipart([b"rank 0", bytes(8) + frame(FAIL)[0], b"{}"])
            time.sleep(0.02)  # to be heard
            stranger.disable_monitor()
            greeted.close(0)
            stranger.close(0)
        check(backend, rogue)


def greeting(address: Address, source: str = "127.0.0.1") -> bytes:
    """How a rank greets who comes from an address of this machine; nothing if it lets nobody in."""
    with socket.create_connection(address, PATIENCE, (source, 0)) as connection:
        data = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(GREETING)
            while len(data) < 64 and (piece := connection.recv(64 - len(data))):
                data += piece
        return data


@pytest.mark.parametrize(("security", "mechanism"), [("auto", b"NULL"), ("curve", b"CURVE")])
def test_who_comes_from_where_no_rank_is_is_not_even_greeted(
    security: str, mechanism: bytes
) -> None:
    with rogue_job(security=security) as (backend, rogue):
        assert greeting(rogue.address)[12:32].strip(b"\0") == mechanism
        assert greeting(rogue.address, "127.0.0.2") == b""
        check(backend, rogue)


REACHED, ASKED = {"interface": "0.0.0.0"}, {"security": "curve"}


@pytest.mark.parametrize(
    ("options", "mechanism"),
    [
        (({}, {}), b"NULL"),
        ((REACHED, {}), b"CURVE"),
        (({}, REACHED), b"CURVE"),
        ((ASKED, ASKED), b"CURVE"),
    ],
    ids=["nobody", "the first", "the second", "asked for"],
)
def test_a_job_is_encrypted_if_others_reach_one_of_its_ranks(
    options: tuple[dict[str, str], dict[str, str]], mechanism: bytes
) -> None:
    """Though they do not reach where the ranks meet; or if its user says so."""
    port = free_port(socket.AF_INET, "127.0.0.1")

    def join(here: RankPlace) -> Any:
        here = replace(here, rendezvous=f"127.0.0.1:{port}", listener_fd=None)
        return ZmqBackend.join(here, config(**options[here.rank]))

    def mechanisms(backend: ZmqBackend) -> set[bytes]:
        found = {greeting(address)[12:32].strip(b"\0") for address in addresses(backend)}
        backend.barrier()
        return found

    assert run_joined(join, mechanisms, 2) == [Outcome({mechanism})] * 2
    for rank in (0, 1):
        if options[rank]:
            with pytest.raises(ConfigError, match="the job has no secret, and"):
                join(place(rank, 2, port, ""))


# Somebody who listens in between.


class Tap:
    """Passes on what it is told, by connections to it, and keeps it."""

    def __init__(self) -> None:
        self.heard: list[bytearray] = []
        self._selector = selectors.DefaultSelector()
        self._open: list[socket.socket] = []
        self._over = False
        self._wake, self._woken = socket.socketpair()
        self._open += [self._wake, self._woken]
        self._lock = threading.Lock()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def to(self, address: Address) -> Address:
        """Where to connect to instead of an address."""
        sock = listener()
        self._open.append(sock)
        self._selector.register(sock, selectors.EVENT_READ, address)
        self._wake.send(b"!")
        return "127.0.0.1", sock.getsockname()[1]

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select():
                sock: Any = key.fileobj
                if key.data is None:
                    sock.recv(100)
                elif isinstance(key.data[0], str):
                    self._join(sock.accept()[0], socket.create_connection(key.data))
                else:
                    self._pass(sock, *key.data)

    def _join(self, *both: socket.socket) -> None:
        self._open += both
        for sock, other in (both, both[::-1]):
            self.heard.append(bytearray())
            self._selector.register(sock, selectors.EVENT_READ, (other, self.heard[-1]))

    def _pass(self, sock: socket.socket, other: socket.socket, heard: bytearray) -> None:
        try:
            data = sock.recv(1 << 20)
            heard += data  # before anybody can know that it has come
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(sock)
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._wake.send(b"!")
        self._thread.join()
        for sock in self._open:
            sock.close()
        self._selector.close()


@pytest.mark.parametrize("security", ["curve", "auto"])
def test_who_listens_learns_nothing_and_can_use_nothing(security: str) -> None:
    """Without encryption, what is said in the meeting is safe all the same, and messages are not.

    What a rank has said is said once more, by another connection, when it was the first to say it.
    """
    text = bytes(range(200, 250)) * 20
    with Tap() as tap, rogue_job(security=security, via=tap.to) as (backend, rogue):
        backend.post_send(np.frombuffer(text, np.uint8), 1, Envelope(0, 0))
        assert rogue.read(EAGER).endswith(text)
        rogue.send(frame(EAGER, payload=text))
        out = np.empty(len(text), np.uint8)
        assert backend.post_recv(out, 1, Envelope(0, 0)).join(PATIENCE)
        said = [bytes(heard) for heard in tap.heard]
        assert len(said) == 6
        everything = b"".join(said)
        for secret in (TOKEN.encode(), rogue.nonce, rogue.nonce.hex().encode(), b"world_size"):
            assert secret not in everything
        for plain in (text, rogue.name, b"FDP1"):
            assert (plain in everything) == (security == "auto")
        if security == "curve":
            for one in said:  # a meeting, and links
                with raw(rogue.address, one) as connection:
                    connection.settimeout(PATIENCE)
                    with contextlib.suppress(ConnectionError):
                        while connection.recv(1 << 16):
                            pass
        check(backend, rogue)


def other_machines_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "is_loopback", lambda host: False)


@pytest.mark.parametrize(
    ("token", "why"),
    [("", "has no secret"), ("0123456789abcde", "has a secret that can be guessed")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_others_reach_needs_a_secret(
    token: str, why: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_machines_reach(monkeypatch)
    with listener() as meeting:
        here = place(rank, 2, meeting.getsockname()[1], token, None if rank else meeting)
        text = (
            f"the job {why}.* reach 127.0.0.1: .*FSDPCORE_TOKEN.*'openssl rand -hex 32' makes one"
        )
        with pytest.raises(ConfigError, match=text):
            ZmqBackend.join(here, config())


def test_without_security_the_job_runs_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other_machines_reach(monkeypatch)
    with caplog.at_level(logging.WARNING):
        found = run_threads(total, 3, security="none")
    assert [outcome.result for outcome in found] == [6.0] * 3, found
    assert sum("security=none: whoever reaches" in line for line in caplog.messages) == 1


def _pickling(backend: ZmqBackend) -> str:
    """What pickle is refused for; objects without it travel anyway."""
    assert fc.all_gather_object(backend.rank, backend) == [0, 1]
    try:
        assert fc.broadcast_object({backend.rank}, backend, pickle=True) == {0}
    except fc.UnsupportedError as error:
        assert fc.all_gather_object("goes on", backend) == ["goes on"] * 2
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("reached", "token", "security", "why"),
    [
        (False, TOKEN, "auto", ""),
        (False, "", "auto", "the job has no secret"),
        (False, "0123456789abcde", "auto", "the job has no secret"),
        (True, TOKEN, "auto", ""),
        (True, TOKEN, "none", "with security=none whoever reaches"),
        (True, "", "none", "the job has no secret"),
    ],
)
def test_pickle_is_for_jobs_without_strangers(
    reached: bool, token: str, security: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reached:
        other_machines_reach(monkeypatch)

    def join(here: RankPlace) -> Any:
        here = replace(here, token=token)
        return ZmqBackend.join(here, config(security=security))

    for outcome in run_joined(join, _pickling, 2):
        assert not outcome.error, outcome
        assert why in outcome.result
        assert bool(why) == bool(outcome.result)


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
    assert "rank 1 of 2 did not come" in texts[0]
    assert "does not know the secret of rank 1" in texts[1]


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
    "0.0.0.0",
    pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
]


@pytest.mark.parametrize("host", HOSTS)
def test_addresses_in_the_url(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    port = free_port(family, host.strip("[]"))
    settings = resolve({"transport": f"zmq://{host}:{port}", "timeout": PATIENCE}, {})
    sums: list[float] = []

    def join(rank: int) -> None:
        here = RankPlace(rank, 2, rank, 2, "a test", None, None, TOKEN)
        with ZmqBackend.join(here, settings) as backend:
            sums.append(total(backend))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sums == [3.0, 3.0]


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_name_with_an_address_at_which_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank that finds rank 0 at another one tells of itself does not depend on that."""
    look_up = endpoints._look_up

    def both(address: tuple[str, int], deadline: Deadline) -> list[Any]:
        names = ["127.0.0.3", "::1"] if address[0] == "both" else [address[0]]
        return [entry for name in names for entry in look_up((name, address[1]), deadline)]

    monkeypatch.setattr(endpoints, "_look_up", both)
    port, found = free_port(socket.AF_INET6, "::1"), list[list[tuple[str, int]]]()

    def join(rank: int, host: str) -> None:
        here = RankPlace(rank, 2, rank, 2, "a test", f"{host}:{port}", None, TOKEN)
        with ZmqBackend.join(here, config()) as backend:
            found.append(addresses(backend))

    threads = [threading.Thread(target=join, args=it) for it in enumerate(["[::1]", "both"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [host for host, _ in found[0]] == ["::1", "::1"]


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
        with pytest.raises(RendezvousError, match=f"cannot listen at 127.0.0.1:{port}: .*"):
            ZmqBackend.join(here, resolve(url, {}))


def test_an_interface_that_this_host_does_not_have() -> None:
    settings = config(interface="192.0.2.1", rendezvous_timeout=0.5)
    with listener() as meeting:
        here = place(1, 2, meeting.getsockname()[1], TOKEN)
        with pytest.raises(RendezvousError, match=r"rank 1 .*cannot listen at 192\.0\.2\.1"):
            ZmqBackend.join(here, settings)


def addresses(backend: ZmqBackend) -> list[tuple[str, int]]:
    total(backend)
    return [tuple(address) for address in backend.control.watch._addresses]


def test_an_interface_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"interface=nope0 is neither .* which are lo"):
        joining._interface_address("nope0")


def test_the_interface_and_ports_that_ranks_are_to_listen_at() -> None:
    first = free_port(socket.AF_INET, "127.0.0.1")
    found = run_threads(addresses, 3, interface="lo", port=f"{first}-{min(first + 9, 65535)}")
    for outcome in found:
        assert not outcome.error, outcome
        assert {host for host, _ in outcome.result} == {"127.0.0.1"}
        assert all(first <= port <= first + 9 for _, port in outcome.result[1:])


@pytest.mark.parametrize("several", [True, False])
def test_ports_that_are_all_taken(several: bool) -> None:
    with listener() as meeting, listener() as taken:
        port = taken.getsockname()[1]
        text = f"{port}-{port}" if several else f"{port}"
        here = place(1, 2, meeting.getsockname()[1], "token")
        told = "rank 1 finds no free port: .*cannot listen at .*'ss -ltnp'.* range .* port=29501-"
        with pytest.raises(RendezvousError, match=told):
            ZmqBackend.join(here, config(port=text))
