"""A peer that knows the job's token and sends what no rank would send: a clear error, no hang."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest
from fsdpcore.transports.zmq.backend import ZmqBackend
from support.zmq_rogue import (
    BYE,
    DATA,
    EAGER,
    FAIL,
    GRANT,
    HEADER_BYTES,
    HELLO,
    NOTE,
    OFFER,
    QUERY,
    SEEN,
    STATUS,
    Rogue,
    frame,
    proof,
    rogue_job,
    stranger_job,
)

from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.errors import (
    CommunicationError,
    MismatchError,
    PeerFailedError,
    ProtocolError,
    RendezvousError,
)
from fsdpcore.core.work import Pending

HERE = Envelope(0, 0)
SIZE = 100_000  # large enough to be offered first
PATIENCE = 60.0


def fails(pending: Pending, why: str, error: type[Exception] = ProtocolError) -> None:
    with pytest.raises(error, match=why):
        assert pending.join(PATIENCE), "hangs"


BAD_CONTROL = [
    ("garbage", [b"GET / HTTP/1.0\r\n\r\n" + bytes(40)], "does not begin like one"),
    ("empty", [b""], "shorter than any header"),
    ("unknown kind", [frame(99)], "unknown kind 99"),
    ("two frames in one", [frame(BYE) + frame(BYE)], "wrong length"),
    ("a second part", [frame(SEEN), b"y"], "shorter than any header"),
    ("a second HELLO", [frame(HELLO, payload=b"{}")], "a second HELLO"),
    ("a message", [frame(EAGER, payload=b"abc")], "EAGER frame where only control frames"),
    ("FAIL without JSON", [frame(FAIL, payload=b"{")], "not JSON"),
    ("deep FAIL", [frame(FAIL, payload=b"[" * 100_000)], "not JSON"),
    ("STATUS without JSON", [frame(STATUS, payload=b"\xff")], "not JSON"),
    ("huge FAIL", [frame(FAIL, size=2**40)], "too many"),
    ("a NOTE", [frame(NOTE, payload=b"{}")], "which this transport does not send"),
]
BAD_MESSAGES = [
    ("garbage", b"GET / HTTP/1.0\r\n\r\n" + bytes(40), "does not begin like one"),
    ("garbage behind a frame", frame(EAGER, tag=9, payload=b"x") + bytes(48), "does not begin"),
    ("unknown kind", frame(99), "unknown kind 99"),
    ("a control frame", frame(BYE), "BYE frame where only messages"),
    ("DATA nobody asked for", frame(DATA, message=1, payload=b"abc"), "not asked for"),
    ("DATA of no bytes", frame(DATA, message=1), "not asked for"),
    ("huge DATA", frame(DATA, message=1, size=2**40), "too many"),
    ("huge EAGER", frame(EAGER, size=2**20 + 1), "too many"),
    ("a long beginning", frame(OFFER, message=1, size=2**30, offset=2**20 + 1), "too many"),
    ("more than there is", frame(OFFER, message=1, size=3, offset=4), "more of a message than"),
    ("an offer without a number", frame(OFFER, size=3), "offers message 0 a second time"),
]


def expect_refusal(backend: ZmqBackend, rogue: Rogue, pending: Pending, why: str) -> None:
    fails(pending, f"from the connection to rank 1: .*{why}")
    reason = json.loads(rogue.read(FAIL)[48:])
    assert reason["kind"] == "ProtocolError"
    with pytest.raises(ProtocolError, match=why):
        backend.post_send(np.zeros(3, np.uint8), 1, HERE)


@pytest.mark.parametrize(
    ("parts", "why"), [case[1:] for case in BAD_CONTROL], ids=[c[0] for c in BAD_CONTROL]
)
def test_bad_control_frames(parts: list[bytes], why: str) -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        rogue.say(*parts)
        expect_refusal(backend, rogue, pending, why)


@pytest.mark.parametrize(
    ("data", "why"), [case[1:] for case in BAD_MESSAGES], ids=[c[0] for c in BAD_MESSAGES]
)
def test_bad_messages(data: bytes, why: str) -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        rogue.send(data)
        expect_refusal(backend, rogue, pending, why)


def offered(rogue: Rogue, number: int = 7, tag: int = 0) -> None:
    rogue.send(frame(OFFER, tag=tag, message=number, size=SIZE))
    assert rogue.read(GRANT)


PART = bytes(1000)
BAD_DATA = [
    ("a gap", frame(DATA, message=7, offset=1, payload=PART)),
    ("behind the end", frame(DATA, message=7, payload=bytes(SIZE + 1))),
    ("another message", frame(DATA, message=8, payload=PART)),
    ("the same twice", 2 * frame(DATA, message=7, payload=PART)),
    ("nothing", frame(DATA, message=7)),
]


@pytest.mark.parametrize("data", [case[1] for case in BAD_DATA], ids=[c[0] for c in BAD_DATA])
def test_bad_data(data: bytes) -> None:
    with rogue_job() as (backend, rogue):
        out = np.full(SIZE, 1, np.uint8)
        pending = backend.post_recv(out, 1, HERE)
        offered(rogue)
        rogue.send(data)
        fails(pending, "not asked for")
        assert (out[1000:] == 1).all()


def test_an_offer_with_the_number_of_another() -> None:
    with rogue_job() as (backend, rogue):
        first = backend.post_recv(np.empty(SIZE, np.uint8), 1, HERE)
        backend.post_recv(np.empty(SIZE, np.uint8), 1, Envelope(0, 1))
        offered(rogue)
        rogue.send(frame(OFFER, tag=1, message=7, size=SIZE))
        fails(first, "a second time")


def test_so_much_is_sent_before_it_is_known_whether_anybody_receives_it() -> None:
    """256 KiB of each message, so that a receiver that waits need not answer; 1 MiB in all."""
    with rogue_job() as (backend, rogue):
        for _ in range(6):
            backend.post_send(np.zeros(1 << 19, np.uint8), 1, HERE)
        ahead = [int.from_bytes(rogue.read(OFFER)[40:48], "little") for _ in range(6)]
        assert ahead == 4 * [1 << 18] + 2 * [0]


def test_a_message_that_is_granted_twice() -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_send(np.zeros(1 << 26, np.uint8), 1, HERE)
        number = int.from_bytes(rogue.read(OFFER)[24:32], "little")
        rogue.send(2 * frame(GRANT, message=number))
        fails(pending, "a second time")


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_frames_that_come_in_pieces(pieces: int) -> None:
    payload = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
    whole, head = payload.tobytes(), 30_000
    with rogue_job() as (backend, rogue):
        first, second = np.empty(SIZE, np.uint8), np.empty(5, np.uint8)
        pending = [backend.post_recv(first, 1, HERE), backend.post_recv(second, 1, HERE)]
        data = frame(OFFER, message=7, size=SIZE, offset=head) + whole[:head]
        data += frame(DATA, message=7, offset=head, payload=whole[head:])
        data += frame(EAGER, payload=b"small")
        for piece in np.array_split(np.frombuffer(data, np.uint8), pieces):
            rogue.send(piece.tobytes())
        for item in pending:
            assert item.join(PATIENCE)
        assert (first == payload).all()
        assert second.tobytes() == b"small"


def test_a_receive_that_is_posted_while_its_message_comes() -> None:
    payload = bytes(range(250)) * 80
    with rogue_job() as (backend, rogue):
        rogue.send(frame(EAGER, payload=payload)[:5000])
        while not backend.unexpected(1, 0):
            time.sleep(0.001)
        out = np.empty(len(payload), np.uint8)
        pending = backend.post_recv(out, 1, HERE)
        assert not pending.finished
        rogue.send(frame(EAGER, payload=payload)[5000:])
        assert pending.join(PATIENCE)
        assert out.tobytes() == payload


def test_nothing_is_written_to_a_receive_that_was_given_up_while_its_message_comes() -> None:
    payload = bytes([2]) * 20_000
    with rogue_job() as (backend, rogue):
        out, last = np.full(len(payload), 1, np.uint8), np.empty(3, np.uint8)
        pending = backend.post_recv(out, 1, HERE)
        rogue.send(frame(EAGER, payload=payload)[:10_000])
        while out[0] == 1:
            time.sleep(0.001)
        assert not pending.cancel()
        before = out.copy()
        rogue.send(frame(EAGER, payload=payload)[10_000:] + frame(EAGER, payload=b"abc"))
        assert backend.post_recv(last, 1, HERE).join(PATIENCE)  # the next message is found
        assert last.tobytes() == b"abc"
        assert (out == before).all()


def test_what_was_begun_is_sent_to_its_end_though_it_was_given_up() -> None:
    size = 1 << 26  # more than the kernel takes at once
    with rogue_job() as (backend, rogue):
        data = np.full(size, 1, np.uint8)
        pending = backend.post_send(data, 1, HERE)
        offer = rogue.read(OFFER)
        number = int.from_bytes(offer[24:32], "little")
        rogue.send(frame(GRANT, message=number))
        rogue.read(DATA)
        assert not pending.cancel()
        data[:] = 2
        backend.post_send(np.full(3, 3, np.uint8), 1, HERE)
        while (found := rogue.next_message())[5] == DATA:
            assert set(found[48:]) == {1}
        assert found[48:] == bytes([3, 3, 3])


def test_small_messages_that_wait_for_room_are_sent_as_they_were() -> None:
    """The caller may change its array as soon as a small message is posted."""
    with rogue_job() as (backend, rogue):
        data, channel = np.zeros(16_000, np.uint8), backend.control.peers[1].peer_channel
        assert channel is not None
        frame_socket, numbers = channel.frame_socket, itertools.cycle(range(1, 251))
        posted, waiting = list[int](), 0
        while waiting < 20:  # until the kernel has taken what it takes, and some more
            data[:] = number = next(numbers)
            backend.post_send(data, 1, HERE)
            posted.append(number)
            waiting += not frame_socket.flushed
        data[:] = 251
        for number in posted:
            assert set(rogue.read(EAGER)[HEADER_BYTES:]) == {number}


def test_answers_that_nobody_asked_for_change_nothing() -> None:
    with rogue_job() as (backend, rogue):
        rogue.send(frame(GRANT, message=99))
        rogue.say(frame(STATUS, message=99, payload=b"{}"))
        rogue.say(frame(SEEN))
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
        rogue.say(frame(BYE))
        rogue.say(frame(QUERY, message=3))
        assert rogue.read(STATUS)
        rogue.send(frame(EAGER, payload=b"abc"))
        reason = json.loads(rogue.read(FAIL)[48:])
        assert "after the rank has left" in reason["reason"]
        with pytest.raises(ProtocolError, match="after the rank has left"):
            backend.post_recv(np.empty(3, np.uint8), 1, HERE)


def test_what_came_before_bye_can_be_received_after_it() -> None:
    with rogue_job() as (backend, rogue):
        rogue.send(frame(EAGER, payload=b"abc"))
        rogue.say(frame(BYE, size=1))
        rogue.shut()
        rogue.read(SEEN)
        out = np.empty(3, np.uint8)
        assert backend.post_recv(out, 1, HERE).join(PATIENCE)
        assert out.tobytes() == b"abc"
        with pytest.raises(PeerFailedError, match="rank 1 has left the job"):
            backend.post_recv(out, 1, HERE)


def test_a_message_that_bye_overtakes() -> None:
    with rogue_job() as (backend, rogue):
        rogue.say(frame(BYE, size=1))
        rogue.say(frame(QUERY, message=3))
        rogue.read(STATUS)
        out = np.empty(3, np.uint8)
        pending = backend.post_recv(out, 1, HERE)
        rogue.send(frame(EAGER, payload=b"abc"))
        assert pending.join(PATIENCE)
        assert out.tobytes() == b"abc"
        fails_at_once = pytest.raises(PeerFailedError, match="rank 1 has left the job")
        with fails_at_once:
            backend.post_recv(out, 1, HERE).join(PATIENCE)


def test_a_grant_that_bye_overtakes() -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_send(np.zeros(SIZE, np.uint8), 1, HERE)
        number = int.from_bytes(rogue.read(OFFER)[24:32], "little")
        rogue.say(frame(BYE, offset=1))
        rogue.say(frame(QUERY, message=3))
        rogue.read(STATUS)
        rogue.send(frame(GRANT, message=number))
        assert pending.join(PATIENCE)


def test_a_data_connection_that_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpcore.transports.zmq.control._CUT_SECONDS", 0.2)
    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        rogue.shut()
        fails(pending, "rank 1 is lost", PeerFailedError)


def test_a_data_connection_that_ends_before_the_last_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fsdpcore.transports.zmq.control._CUT_SECONDS", 0.2)
    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        rogue.say(frame(BYE, size=1))
        rogue.shut()
        fails(pending, "rank 1 is lost", PeerFailedError)


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
        rogue.say(frame(FAIL, payload=json.dumps(content).encode()))
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


waits = pytest.mark.side_by_side(9)


@waits
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
        rogue.say(frame(SEEN))
        error = joined()
        assert isinstance(error, ProtocolError)


@waits
def test_a_rank_that_meets_but_never_connects() -> None:
    with stranger_job(rendezvous_timeout=1.0) as (port, joined), Rogue(port):
        error = joined()
        assert isinstance(error, RendezvousError)
        assert "rank 0 met all ranks, but could not connect to 1 within 1 s" in str(error)


@waits
def test_a_rank_that_connects_but_says_nothing() -> None:
    with stranger_job(rendezvous_timeout=1.0) as (port, joined), Rogue(port) as rogue:
        rogue.connect()
        error = joined()
        assert isinstance(error, RendezvousError)
        assert "could not connect to 1" in str(error)
