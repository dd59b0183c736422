"""A peer that knows the job's token and sends what no rank would send: a clear error, no hang."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from fsdpcore.transports.zmq import backend as zmq_backend
from fsdpcore.transports.zmq.backend import ZmqBackend
from fsdpcore.transports.zmq.link_speed import LinkSpeed
from support.zmq_ranks import Outcome, config, run_joined
from support.zmq_rogue import (
    BYE,
    CREDIT,
    DATA,
    EAGER,
    FAIL,
    GRANT,
    HEADER_BYTES,
    NOTE,
    OFFER,
    QUERY,
    REPORT,
    SEEN,
    STATUS,
    Frame,
    Rogue,
    frame,
    rogue_job,
    stranger_job,
)

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import (
    CommunicationError,
    MismatchError,
    PeerFailedError,
    ProtocolError,
)
from fsdpcore.core.work import Pending

HERE = Envelope(0, 0)
SIZE = 100_000  # large enough to be offered first
PATIENCE = 60.0


def fails(pending: Pending, why: str, error: type[Exception] = ProtocolError) -> None:
    with pytest.raises(error, match=why):
        assert pending.join(PATIENCE), "hangs"


BAD = [
    ("garbage", (b"GET / HTTP/1.0\r\n\r\n" + bytes(40),), "does not begin like one"),
    ("empty", (b"",), "shorter than any header"),
    ("unknown kind", frame(99), "unknown kind 99"),
    ("two frames in one", (frame(BYE)[0] + frame(BYE)[0],), "wrong length"),
    ("a payload too many", (*frame(SEEN), b"y"), "announces 0 bytes and has 1"),
    ("a payload too few", frame(EAGER, size=3), "announces 3 bytes and has 0"),
    ("FAIL without JSON", frame(FAIL, payload=b"{"), "not JSON"),
    ("deep FAIL", frame(FAIL, payload=b"[" * 100_000), "not JSON"),
    ("STATUS without JSON", frame(STATUS, payload=b"\xff"), "not JSON"),
    ("huge FAIL", frame(FAIL, payload=bytes(2**20 + 1)), "announces 1048577 bytes"),
    ("a NOTE", frame(NOTE, payload=b"{}"), "which this transport does not send"),
    ("REPORT without a rank", frame(REPORT, payload=b"{}"), "REPORT frame makes no sense"),
    (
        "REPORT of a rank that is not there",
        frame(REPORT, payload=b'{"rank": 2, "by": 0, "found": "ended"}'),
        "REPORT frame makes no sense",
    ),
    (
        "REPORT for no reason",
        frame(REPORT, payload=b'{"rank": 0, "by": 1, "found": "bored"}'),
        "REPORT frame makes no sense",
    ),
    ("DATA nobody asked for", frame(DATA, message=1, payload=b"abc"), "not asked for"),
    ("DATA of no bytes", frame(DATA, message=1, payload=b""), "not asked for"),
    ("huge EAGER", frame(EAGER, payload=bytes(2**20 + 1)), "announces 1048577 bytes"),
    ("a long beginning", frame(OFFER, message=1, size=2**30, offset=2**20 + 1), "announces"),
    ("more than there is", frame(OFFER, message=1, size=3, offset=4, payload=b"1234"), "more of a"),
    ("an offer without a number", frame(OFFER, size=3), "offers message 0 a second time"),
]


@pytest.mark.parametrize(("bad", "why"), [case[1:] for case in BAD], ids=[c[0] for c in BAD])
def test_bad_frames(bad: Frame, why: str) -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        rogue.send(frame(EAGER, tag=9, payload=b"x"), bad)
        fails(pending, f"from the connection to rank 1: .*{why}")
        reason = json.loads(rogue.read(FAIL)[48:])
        assert reason["kind"] == "ProtocolError"
        with pytest.raises(ProtocolError, match=why):
            backend.post_send(np.zeros(3, np.uint8), 1, HERE)


FIRST = frame(EAGER, payload=b"abc")[0]
NUMBERS: list[tuple[str, list[Frame]]] = [
    ("one is left out", [(bytes([2]) + bytes(7) + FIRST, b"abc")]),
    ("one comes twice", [(bytes(8) + FIRST, b"abc")]),
    ("no number", [(b"1234567",)]),
    ("nothing", [(b"",)]),
    ("three parts", [(bytes([1]) + bytes(7) + FIRST, b"abc", b"def")]),
]


@pytest.mark.parametrize("parts", [case[1] for case in NUMBERS], ids=[c[0] for c in NUMBERS])
def test_a_frame_that_is_missing_or_comes_twice_is_noticed(parts: list[Frame]) -> None:
    """Though nothing in it is wrong by itself: ZeroMQ may lose what it was given."""
    with rogue_job() as (backend, rogue):
        out = np.empty(3, np.uint8)
        rogue.send(frame(EAGER, payload=b"abc"))
        assert backend.post_recv(out, 1, HERE).join(PATIENCE)
        pending = backend.post_recv(out, 1, HERE)
        rogue.raw(*parts[0])
        fails(pending, "frames from rank 1 are missing, or are none of ours")


def offered(rogue: Rogue, number: int = 7, tag: int = 0) -> None:
    rogue.send(frame(OFFER, tag=tag, message=number, size=SIZE))
    assert rogue.read(GRANT)


PART = bytes(1000)
BAD_DATA = [
    ("a gap", frame(DATA, message=7, offset=1, payload=PART)),
    ("behind the end", frame(DATA, message=7, payload=bytes(SIZE + 1))),
    ("another message", frame(DATA, message=8, payload=PART)),
    ("the same twice", *2 * [frame(DATA, message=7, payload=PART)]),
    ("nothing", frame(DATA, message=7, payload=b"")),
]


@pytest.mark.parametrize("frames", [case[1:] for case in BAD_DATA], ids=[c[0] for c in BAD_DATA])
def test_bad_data(frames: list[Frame]) -> None:
    with rogue_job() as (backend, rogue):
        out = np.full(SIZE, 1, np.uint8)
        pending = backend.post_recv(out, 1, HERE)
        offered(rogue)
        rogue.send(*frames)
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
        rogue.send(*2 * [frame(GRANT, message=number)])
        fails(pending, "a second time")


@pytest.mark.parametrize("pieces", [1, 7, 100])
def test_a_message_that_comes_in_pieces_with_others_in_between(pieces: int) -> None:
    payload = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
    whole, at = payload.tobytes(), 30_000
    with rogue_job() as (backend, rogue):
        first = np.empty(SIZE, np.uint8)
        pending = backend.post_recv(first, 1, HERE)
        rogue.send(frame(OFFER, message=7, size=SIZE, offset=at, payload=whole[:at]))
        rogue.read(GRANT)
        for piece in np.array_split(payload[at:], pieces):
            assert not pending.finished
            rogue.send(frame(DATA, message=7, offset=at, payload=piece.tobytes()))
            at += piece.size
            check(backend, rogue)
        assert pending.join(PATIENCE)
        assert (first == payload).all()


def check(backend: ZmqBackend, rogue: Rogue, tag: int = 9) -> None:
    """A message gets through, and so all has that was sent before it."""
    out = np.empty(3, np.uint8)
    rogue.send(frame(EAGER, tag=tag, payload=b"abc"))
    assert backend.post_recv(out, 1, Envelope(0, tag)).join(PATIENCE)
    assert out.tobytes() == b"abc"


def test_nothing_is_written_to_a_receive_that_was_given_up_while_its_message_comes() -> None:
    half = SIZE // 2
    with rogue_job() as (backend, rogue):
        out = np.full(SIZE, 1, np.uint8)
        pending = backend.post_recv(out, 1, HERE)
        offered(rogue)
        rogue.send(frame(DATA, message=7, payload=bytes([2]) * half))
        check(backend, rogue)
        assert not pending.cancel()
        rogue.send(frame(DATA, message=7, offset=half, payload=bytes([2]) * half))
        check(backend, rogue)
        assert (out[:half] == 2).all()
        assert (out[half:] == 1).all()


def test_nothing_more_is_sent_of_a_message_that_was_given_up() -> None:
    size = 1 << 26  # more than may be under way
    with rogue_job() as (backend, rogue):
        data = np.full(size, 1, np.uint8)
        pending = backend.post_send(data, 1, HERE)
        number = int.from_bytes(rogue.read(OFFER)[24:32], "little")
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
        rogue.credits = False
        data, outlet = np.zeros(16_000, np.uint8), backend.control.peers[1].channel.outlet
        posted, waiting = list[int](), 0
        while waiting < 20:
            data[:] = number = 1 + len(posted) % 250
            backend.post_send(data, 1, HERE)
            posted.append(number)
            waiting += not outlet.flushed
        data[:] = 251
        for number in posted[:-20]:
            assert set(rogue.read(EAGER)[HEADER_BYTES:]) == {number}
        rogue.send(frame(CREDIT, size=16_000 * len(posted)))
        for number in posted[-20:]:
            assert set(rogue.read(EAGER)[HEADER_BYTES:]) == {number}


def test_no_more_is_under_way_than_the_receiver_takes_in() -> None:
    """Whatever it says that it has taken; and what is short, such as an answer, passes by."""
    size, window, segment = 1 << 24, 4 << 20, 1 << 16
    with rogue_job(segment_bytes=segment) as (backend, rogue):
        rogue.credits = False
        backend.post_send(np.zeros(size, np.uint8), 1, HERE)
        came = len(rogue.read(OFFER)) - HEADER_BYTES
        rogue.send(frame(GRANT, message=1))
        for credit in (0, 300_000, 700_000):
            rogue.send(frame(CREDIT, size=credit), frame(QUERY, message=3))
            while (found := rogue.next())[5] == DATA:
                came += len(found) - HEADER_BYTES
            assert found[5] == STATUS
            assert window + credit < came <= window + credit + segment
        rogue.send(frame(CREDIT, size=2**63))  # of what was not sent, nothing can have come
        rogue.send(frame(QUERY, message=3))
        while (found := rogue.next())[5] == DATA:
            came += len(found) - HEADER_BYTES
        assert 2 * window + 700_000 < came <= 2 * (window + segment) + 700_000


# Where the other host is far away, or near and fast: what was measured of the link counts.


def test_a_sender_hears_what_has_come_before_its_window_becomes_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may wait for that already, and send nothing more until it hears."""

    def receive(backend: ZmqBackend, *_: object) -> LinkSpeed:
        assert backend.post_recv(np.empty(SIZE, np.uint8), 1, HERE).join(PATIENCE)
        return LinkSpeed(0.02, 1e6)

    monkeypatch.setattr(zmq_backend, "measure", receive)
    with stranger_job(host_id="another") as (port, joined), Rogue(port) as rogue:
        rogue.connect()
        rogue.send(frame(EAGER, payload=bytes(SIZE)))
        assert isinstance(joined(), ZmqBackend)
        rogue.send(frame(QUERY, message=3))
        credits = []
        while (found := rogue.next())[5] != STATUS:
            credits.append(int.from_bytes(found[32:40], "little") if found[5] == CREDIT else 0)
        assert SIZE in credits


def test_a_large_message_to_a_fast_host_ends_though_its_window_is_not_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_backend, "measure", lambda *_: LinkSpeed(1e-4, 4e9))

    def join(here: RankPlace) -> ZmqBackend:
        return ZmqBackend.join(here, config(host_id=f"host {here.rank}", timeout=10))

    def body(backend: ZmqBackend) -> None:
        array = np.zeros(2 << 20, np.uint8)
        if backend.rank == 0:
            backend.send(array, 1)
        else:
            backend.recv(array, 0)

    assert run_joined(join, body, 2) == [Outcome()] * 2


def test_a_rank_far_away_is_not_judged_before_it_can_have_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_backend, "measure", lambda *_: LinkSpeed(0.3, 1e6))
    with rogue_job(host_id="another") as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        check(backend, rogue)
        since = time.monotonic()
        rogue.hang_up()
        fails(pending, "the connection between rank 0 and rank 1 is lost", PeerFailedError)
        assert time.monotonic() - since > 4 * 0.3


def test_answers_that_nobody_asked_for_change_nothing() -> None:
    with rogue_job() as (backend, rogue):
        rogue.send(frame(GRANT, message=99))
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
        reason = json.loads(rogue.read(FAIL)[48:])
        assert "after the rank has left" in reason["reason"]
        with pytest.raises(ProtocolError, match="after the rank has left"):
            backend.post_recv(np.empty(3, np.uint8), 1, HERE)


def test_what_came_before_bye_can_be_received_after_it() -> None:
    with rogue_job() as (backend, rogue):
        rogue.send(frame(EAGER, payload=b"abc"))
        rogue.send(frame(BYE, size=1))
        rogue.read(SEEN)
        rogue.hang_up()
        out = np.empty(3, np.uint8)
        assert backend.post_recv(out, 1, HERE).join(PATIENCE)
        assert out.tobytes() == b"abc"
        with pytest.raises(PeerFailedError, match="rank 1 has left the job"):
            backend.post_recv(out, 1, HERE)


def test_a_message_that_bye_overtakes() -> None:
    with rogue_job() as (backend, rogue):
        rogue.send(frame(BYE, size=1))
        rogue.send(frame(QUERY, message=3))
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
        rogue.send(frame(BYE, offset=1))
        rogue.send(frame(QUERY, message=3))
        rogue.read(STATUS)
        rogue.send(frame(GRANT, message=number))
        assert pending.join(PATIENCE)


@pytest.mark.parametrize("says", [[], [frame(BYE, size=2)]], ids=["nothing", "BYE"])
def test_a_link_that_ends_before_the_last_message(says: list[Frame]) -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        check(backend, rogue)
        rogue.send(*says, frame(QUERY, message=3))
        rogue.read(STATUS)
        rogue.hang_up()
        fails(pending, "the connection between rank 0 and rank 1 is lost", PeerFailedError)
        error = backend.failure
        assert isinstance(error, PeerFailedError)
        assert (error.rank, error.pair) == (0, (0, 1))


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
        ({"kind": 3, "from": 7}, PeerFailedError, "^rank 1 failed: no reason given"),
        ({}, PeerFailedError, "failed: no reason given"),
    ],
)
def test_reasons(content: dict[str, object], error: type[CommunicationError], why: str) -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        rogue.send(frame(FAIL, payload=json.dumps(content).encode()))
        fails(pending, why, error)


def test_a_rank_that_meets_but_does_not_listen() -> None:
    with stranger_job() as (port, joined), Rogue(port) as rogue:
        rogue.deafen()
        backend = joined()
        assert isinstance(backend, ZmqBackend)
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        fails(pending, "rank 1 is lost: its process ended without a word", PeerFailedError)


def test_whoever_reads_a_frame_wakes_those_who_wait_for_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rogue_job() as (backend, rogue), backend.lock:
        calls: list[None] = []
        monkeypatch.setattr(backend.poller, "changed", lambda: calls.append(None))
        rogue.send(frame(QUERY, message=3))
        end = time.monotonic() + PATIENCE
        while not calls:
            assert time.monotonic() < end, "nobody is told"
            backend.control.serve()
        assert rogue.read(STATUS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_whose_thread_ends_does_not_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise OSError("out of descriptors")

    with rogue_job() as (backend, rogue):
        pending = backend.post_recv(np.empty(3, np.uint8), 1, HERE)
        monkeypatch.setattr(backend.control.watch, "tick", fail)
        backend.poller.remind()
        why = "the thread of rank 0 that looks after its links ended: .*out of descriptors"
        fails(pending, why, CommunicationError)
        assert "out of descriptors" in json.loads(rogue.read(FAIL)[48:])["reason"]


def test_a_message_that_was_granted_and_given_up_counts_once_among_those() -> None:
    with rogue_job() as (backend, rogue):
        pending = backend.post_send(np.zeros(1 << 26, np.uint8), 1, Envelope(0, 0))
        number = int.from_bytes(rogue.read(OFFER)[24:32], "little")
        rogue.send(frame(GRANT, message=number))
        rogue.read(5)
        assert not pending.cancel()
        for _ in range(6):
            backend.post_send(np.zeros(1 << 19, np.uint8), 1, Envelope(0, 0))
        ahead = [int.from_bytes(rogue.read(OFFER)[40:48], "little") for _ in range(6)]
        assert ahead == 4 * [1 << 18] + 2 * [0]
