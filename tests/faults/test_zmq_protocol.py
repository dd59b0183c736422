"""A peer that knows the job's token and sends what no rank would send: a clear error, no hang."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.zmq_rogue import (
    BYE,
    DATA,
    EAGER,
    FAIL,
    GRANT,
    HELLO,
    OFFER,
    QUERY,
    SEEN,
    STATUS,
    TAKEN,
    Rogue,
    frame,
    proof,
    rogue_job,
    stranger_job,
)

from fsdpcore.backend import Envelope
from fsdpcore.errors import (
    CommunicationError,
    MismatchError,
    PeerFailedError,
    ProtocolError,
    RendezvousError,
)
from fsdpcore.work import Pending

HERE = Envelope(0, 0)
SIZE = 100_000  # large enough to be offered first
PATIENCE = 60.0


def fails(pending: Pending, why: str, error: type[Exception] = ProtocolError) -> None:
    with pytest.raises(error, match=why):
        assert pending.join(PATIENCE), "hangs"


BAD = [
    ("garbage", [b"GET / HTTP/1.0\r\n\r\n" + bytes(40)], "does not begin like one"),
    ("empty", [b""], "shorter than any header"),
    ("unknown kind", [frame(99)], "unknown kind 99"),
    ("two frames in one", [frame(BYE) + frame(BYE)], "wrong length"),
    ("a second part", [frame(EAGER, tag=9, payload=b"x"), b"y"], "shorter than any header"),
    ("a second HELLO", [frame(HELLO, payload=b"{}")], "a second HELLO"),
    ("DATA without data", [frame(DATA, message=1, size=10)], "without data"),
    ("DATA nobody asked for", [frame(DATA, message=1, size=3), b"abc"], "not asked for"),
    ("DATA of no bytes", [frame(DATA, message=1), b""], "not asked for"),
    ("huge DATA", [frame(DATA, message=1, size=2**40), b""], "too many"),
    ("FAIL without JSON", [frame(FAIL, payload=b"{")], "not JSON"),
    ("deep FAIL", [frame(FAIL, payload=b"[" * 100_000)], "not JSON"),
    ("STATUS without JSON", [frame(STATUS, payload=b"\xff")], "not JSON"),
]


@pytest.mark.parametrize(("parts", "why"), [case[1:] for case in BAD], ids=[c[0] for c in BAD])
def test_bad_frames(parts: list[bytes], why: str) -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        rogue.send(*parts)
        fails(pending, f"from the connection to rank 1: .*{why}")
        reason = json.loads(rogue.read(FAIL)[0][48:])
        assert reason["kind"] == "ProtocolError"
        with pytest.raises(ProtocolError, match=why):
            backend.post_send(np.zeros(3, np.uint8), 1, HERE)


def offered(rogue: Rogue, number: int = 7, tag: int = 0) -> None:
    rogue.send(frame(OFFER, tag=tag, message=number, size=SIZE))
    assert rogue.read(GRANT)


PART = bytes(1000)
BAD_DATA = [
    ("shorter than said", [frame(DATA, message=7, size=1000), PART[:-1]], "sent 999 bytes"),
    ("longer than said", [frame(DATA, message=7, size=1000), PART + b"x"], "sent 1001 bytes"),
    ("a third part", [frame(DATA, message=7, size=1000), PART, b"x"], "sent 1000 bytes where"),
    ("a gap", [frame(DATA, message=7, size=1000, offset=1), PART], "not asked for"),
    ("behind the end", [frame(DATA, message=7, size=SIZE + 1), PART], "not asked for"),
    ("another message", [frame(DATA, message=8, size=1000), PART], "not asked for"),
]


@pytest.mark.parametrize(
    ("parts", "why"), [case[1:] for case in BAD_DATA], ids=[c[0] for c in BAD_DATA]
)
def test_bad_data(parts: list[bytes], why: str) -> None:
    with rogue_job() as (backend, rogue):
        out = np.full(SIZE, 1, np.uint8)
        pending = backend.post_recv(out, 1, HERE)
        offered(rogue)
        rogue.send(*parts)
        fails(pending, why)
        assert (out[1001:] == 1).all()


def test_the_same_data_twice() -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(SIZE, np.uint8), 1, HERE)
        offered(rogue)
        for _ in range(2):
            rogue.send(frame(DATA, message=7, size=1000), PART)
        fails(pending, "not asked for")


def test_an_offer_with_the_number_of_another() -> None:
    with rogue_job() as (backend, rogue):
        first = backend.post_recv(np.empty(SIZE, np.uint8), 1, HERE)
        backend.post_recv(np.empty(SIZE, np.uint8), 1, Envelope(0, 1))
        offered(rogue)
        rogue.send(frame(OFFER, tag=1, message=7, size=SIZE))
        fails(first, "a second time")


def test_a_grant_beyond_the_end() -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_send(np.zeros(SIZE, np.uint8), 1, HERE)
        number = int.from_bytes(rogue.read(OFFER)[0][24:32], "little")
        rogue.send(frame(GRANT, message=number, offset=SIZE + 1))
        fails(pending, "more than was offered")


def test_taken_before_it_was_sent() -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_send(np.zeros(SIZE, np.uint8), 1, HERE)
        number = int.from_bytes(rogue.read(OFFER)[0][24:32], "little")
        rogue.send(frame(TAKEN, message=number))
        fails(pending, "not sent yet")


def test_answers_that_nobody_asked_for_change_nothing() -> None:
    with rogue_job() as (backend, rogue):
        rogue.send(frame(GRANT, message=99, offset=5))
        rogue.send(frame(TAKEN, message=99))
        rogue.send(frame(STATUS, message=99, payload=b"{}"))
        rogue.send(frame(SEEN))
        out = np.empty(3, np.uint8)
        pending = backend.post_recv(out, 1, HERE)
        rogue.send(frame(EAGER, payload=b"abc"))
        assert pending.join(PATIENCE)
        assert out.tobytes() == b"abc"


def test_an_offer_of_more_than_there_is_memory_allocates_nothing() -> None:
    with rogue_job() as (backend, rogue):
        rogue.send(frame(OFFER, message=7, size=2**63))
        pending = backend.post_recv(np.empty(SIZE, np.uint8), 1, HERE)
        fails(pending, f"{2**63} bytes where rank 0 receives {SIZE} bytes", MismatchError)


def test_messages_after_bye() -> None:
    with rogue_job() as (backend, rogue):
        rogue.send(frame(BYE))
        rogue.send(frame(QUERY, message=3))
        assert rogue.read(STATUS)
        rogue.send(frame(EAGER, payload=b"abc"))
        reason = json.loads(rogue.read(FAIL)[0][48:])
        assert "after the rank has left" in reason["reason"]
        with pytest.raises(ProtocolError, match="after the rank has left"):
            backend.post_recv(np.empty(3, np.uint8), 1, HERE)


def test_what_came_before_bye_can_be_received_after_it() -> None:
    with rogue_job() as (backend, rogue):
        rogue.send(frame(EAGER, payload=b"abc"))
        rogue.send(frame(BYE))
        rogue.read(SEEN)
        out = np.empty(3, np.uint8)
        assert backend.post_recv(out, 1, HERE).join(PATIENCE)
        assert out.tobytes() == b"abc"
        with pytest.raises(PeerFailedError, match="rank 1 has left the job"):
            backend.post_recv(out, 1, HERE)


@pytest.mark.parametrize(
    ("content", "error", "why"),
    [
        ({"kind": "CommunicationError", "reason": "no disk"}, PeerFailedError, "1 failed: no disk"),
        ({"kind": "MismatchError", "reason": "shapes"}, MismatchError, "^shapes$"),
        (
            {"kind": "PeerFailedError", "reason": "x", "rank": 0},
            PeerFailedError,
            "rank 1 failed: x",
        ),
        ({"kind": "PeerFailedError", "reason": "x", "rank": -3}, PeerFailedError, "1 failed: x"),
        ({"kind": "PeerFailedError", "reason": "x", "rank": "0"}, PeerFailedError, "1 failed: x"),
        ({"kind": "SystemExit", "reason": ["y"]}, PeerFailedError, r"failed: \['y'\]"),
        ({"kind": 3}, PeerFailedError, "failed: no reason given"),
        ({}, PeerFailedError, "failed: no reason given"),
    ],
)
def test_reasons(content: dict[str, object], error: type[CommunicationError], why: str) -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        rogue.send(frame(FAIL, payload=json.dumps(content).encode()))
        fails(pending, why, error)


HELLOS = [
    ("another rank", {"rank": 0}),
    ("a rank that is a bool", {"rank": "1"}),
    ("no proof", {"proof": None}),
    ("the proof of the other direction", {"proof": proof(0, 1)}),
    ("the proof of another job", {"proof": proof(1, 0, "another token")}),
    ("a proof that is not ASCII", {"proof": "ñ" * 64}),
    ("a proof that is not text", {"proof": ["x"]}),
]


@pytest.mark.parametrize("wrong", [case[1] for case in HELLOS], ids=[c[0] for c in HELLOS])
def test_a_wrong_hello_ends_the_job(wrong: dict[str, object]) -> None:
    with stranger_job() as (port, joined), Rogue(port) as rogue:
        rogue.connect()
        rogue.greet(**wrong)
        error = joined()
        assert isinstance(error, ProtocolError)
        assert "who is there is not that rank of this job" in str(error)


def test_a_first_frame_that_is_no_hello() -> None:
    with stranger_job() as (port, joined), Rogue(port) as rogue:
        rogue.connect()
        rogue.send(frame(EAGER, payload=b"abc"))
        error = joined()
        assert isinstance(error, ProtocolError)


def test_a_rank_that_meets_but_never_connects() -> None:
    with stranger_job(rendezvous_timeout=1.0) as (port, joined), Rogue(port):
        error = joined()
        assert isinstance(error, RendezvousError)
        assert "rank 0 met all ranks, but could not connect to 1 within 1 s" in str(error)


def test_a_rank_that_connects_but_says_nothing() -> None:
    with stranger_job(rendezvous_timeout=1.0) as (port, joined), Rogue(port) as rogue:
        rogue.connect()
        error = joined()
        assert isinstance(error, RendezvousError)
        assert "could not connect to 1" in str(error)
