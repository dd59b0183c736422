"""Messages through memory, with a peer that keeps the protocol by hand, or breaks it."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.memory.shared import SharedMemory
from fsdpcore.transports.zmq import memory as zmq_memory
from fsdpcore.transports.zmq.backend import ZmqBackend
from support.zmq_rogue import (
    DATA,
    EAGER,
    GRANT,
    LEND,
    MEMORY,
    OFFER,
    PIECE,
    REFUSE,
    SEEN,
    TAKEN,
    Frame,
    Rogue,
    frame,
    rogue_job,
)

from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.errors import ConfigError, ProtocolError
from fsdpcore.core.work import Pending

pytestmark = pytest.mark.skipif(
    not SharedMemory.available, reason="this system has no memfd_create"
)

HERE = Envelope(0, 0)
SIZE = 600_000  # large enough for memory
PATIENCE = 60.0
NUMBER = 7


class Lender(Rogue):
    """Rank 1, with memory of its own."""

    memory: SharedMemory

    def introduce(self) -> None:
        self.send(frame(MEMORY, signature=self.memory.introduce()))

    def place(self, array: np.ndarray[Any, Any]) -> tuple[int, int]:
        found = self.memory.locate(array)
        assert found is not None
        return found

    def array(self, size: int = SIZE, value: int | None = None) -> Any:
        array = self.memory.empty(size)
        assert array is not None
        array[...] = np.arange(size, dtype=np.uint32) * 7 if value is None else value
        return array

    def tell(
        self, kind: int, place: tuple[int, int], size: int, offset: int, number: int = NUMBER
    ) -> None:
        where = struct.pack("<QQ", *place)
        self.send(frame(kind, message=number, size=size, offset=offset, signature=where))

    def lend(self, array: Any, number: int = NUMBER) -> None:
        """Offer all of an array, where it lies."""
        self.tell(LEND, self.place(array), array.size, array.size, number)

    def taken(self) -> tuple[int, int]:
        """Return the message and the end of what rank 0 has read next."""
        return _numbers(self.read(TAKEN))


def _numbers(data: bytes) -> tuple[int, int]:
    """Message and offset of a frame."""
    message, _, offset = struct.unpack("<QQQ", data[24:48])
    return message, offset


@contextlib.contextmanager
def near_job(**options: Any) -> Iterator[tuple[ZmqBackend, Lender]]:
    with rogue_job(near=True, **options) as (backend, rogue):
        rogue.__class__ = Lender
        assert isinstance(rogue, Lender)
        rogue.memory = SharedMemory()
        try:
            yield backend, rogue
        finally:
            rogue.memory.close()


def fails(pending: Pending, why: str, error: type[Exception] = ProtocolError) -> None:
    with pytest.raises(error, match=why):
        assert pending.join(PATIENCE), "hangs"


def post(backend: ZmqBackend, size: int = SIZE, tag: int = 0) -> tuple[Any, Pending]:
    out = np.full(size, 1, np.uint8)
    return out, backend.post_recv(out, 1, Envelope(0, tag))


def catch_up(backend: ZmqBackend, rogue: Rogue) -> None:
    """Wait until rank 0 has handled all that it was sent."""
    rogue.send(frame(EAGER, tag=99, payload=b"abc"))
    assert post(backend, 3, 99)[1].join(PATIENCE)


# Receiving.


@pytest.mark.parametrize("early", [True, False])
def test_a_lent_array_is_read_where_it_lies(early: bool) -> None:
    with near_job() as (backend, rogue):
        rogue.introduce()
        array = rogue.array()
        if early:
            rogue.lend(array)
            catch_up(backend, rogue)
        out, pending = post(backend)
        if not early:
            rogue.lend(array)
        assert pending.join(PATIENCE)
        assert (out == array).all()
        assert rogue.taken() == (NUMBER, SIZE)


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    with near_job() as (backend, rogue):
        rogue.introduce()
        array = rogue.array()
        out, pending = post(backend)
        segment, offset = rogue.place(array)
        rogue.tell(LEND, (segment, offset), SIZE, 1000)
        assert _numbers(rogue.read(GRANT))[0] == NUMBER
        assert rogue.taken() == (NUMBER, 1000)
        for start, end in ((1000, 1001), (1001, 300_000), (300_000, SIZE)):
            assert not pending.finished
            rogue.tell(PIECE, (segment, offset + start), end - start, start)
            assert rogue.taken() == (NUMBER, end)
        assert pending.join(PATIENCE)
        assert (out == array).all()


@pytest.mark.parametrize("introduced", [bytes(16), b"\xff" * 16])
def test_memory_that_is_out_of_reach_is_refused(
    introduced: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with near_job() as (backend, rogue):
        rogue.send(frame(MEMORY, signature=introduced))
        for tag in range(2):
            payload = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
            out, pending = post(backend, tag=tag)
            where = struct.pack("<QQ", 1, 2)
            rogue.send(
                frame(LEND, tag=tag, message=tag + 1, size=SIZE, offset=SIZE, signature=where)
            )
            assert _numbers(rogue.read(REFUSE))[0] == tag + 1
            rogue.send(frame(DATA, message=tag + 1, payload=payload.tobytes()))
            assert pending.join(PATIENCE)
            assert (out == payload).all()
    lines = [line for line in caplog.messages if "reaches no memory of rank 1" in line]
    assert len(lines) == 1


def test_memory_that_is_out_of_reach_is_an_error_where_it_is_required() -> None:
    with near_job(shm="on") as (backend, rogue):
        rogue.send(frame(MEMORY, signature=bytes(16)))
        _, pending = post(backend)
        rogue.tell(LEND, (1, 2), SIZE, SIZE)
        why = r"shm=on, but rank 0 of this host cannot share memory with the others: "
        fails(pending, why, ConfigError)


def test_ranks_without_memory_refuse() -> None:
    with near_job(shm="off") as (backend, rogue):
        rogue.introduce()
        out, pending = post(backend)
        rogue.lend(rogue.array())
        rogue.read(REFUSE)
        rogue.send(frame(DATA, message=NUMBER, payload=bytes(SIZE)))
        assert pending.join(PATIENCE)
        assert not out.any()


def test_a_rank_is_not_taken_for_another() -> None:
    with near_job() as (backend, rogue):
        assert backend.memory is not None
        _, pending = post(backend)
        rogue.send(frame(MEMORY, signature=backend.memory.introduce()))
        fails(pending, "memory that is no other rank's is introduced")


def _another_process(rogue: Lender) -> tuple[int, int]:
    segment, offset = rogue.place(rogue.array())
    return segment + (1 << 42), offset


def _nothing(rogue: Lender) -> tuple[int, int]:
    """A descriptor that is not open."""
    segment, offset = rogue.place(rogue.array())
    return segment | ((1 << 20) - 1) << 22, offset


def _another_file(rogue: Lender) -> tuple[int, int]:
    """Of the same process, but none that was made to be shared."""
    segment, offset = rogue.place(rogue.array())
    low = segment & ((1 << 22) - 1)
    descriptor = os.dup(0)
    rogue.others.append((os.fdopen(descriptor), None))  # type: ignore[attr-defined]
    return segment >> 42 << 42 | descriptor << 22 | low, offset


def _anothers(rogue: Lender) -> tuple[int, int]:
    """Of the same process, but of another rank in it."""
    other = SharedMemory()
    array = other.empty(SIZE)
    assert array is not None
    rogue.others.append((other, array))  # type: ignore[attr-defined]
    place = other.locate(array)
    assert place is not None
    return place


def _behind_the_end(rogue: Lender) -> tuple[int, int]:
    return rogue.place(rogue.array())[0], (4 << 20) - SIZE + 1


def _far_behind_the_end(rogue: Lender) -> tuple[int, int]:
    return rogue.place(rogue.array())[0], 2**64 - 1


PLACES = {
    "another process": (_another_process, "memory of another process is named"),
    "nothing": (_nothing, "memory is named that does not exist"),
    "another file": (_another_file, "memory is named that does not exist"),
    "another rank's": (_anothers, "memory of another process is named"),
    "behind the end": (_behind_the_end, "ends before"),
    "far behind the end": (_far_behind_the_end, "ends before"),
}


@pytest.mark.parametrize("kind", [LEND, PIECE], ids=["LEND", "PIECE"])
@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_is_none_of_the_peers(name: str, kind: int) -> None:
    make, why = PLACES[name]
    with near_job() as (backend, rogue):
        rogue.others = []  # type: ignore[attr-defined]
        out, pending = post(backend)
        rogue.introduce()
        if kind == PIECE:
            rogue.tell(LEND, rogue.place(rogue.array()), SIZE, 0)
            rogue.read(GRANT)
        place = make(rogue)
        rogue.tell(kind, place, SIZE, SIZE if kind == LEND else 0)
        fails(pending, f"from the connection to rank 1: .*{why}")
        assert (out == 1).all()
        for other, _ in rogue.others:  # type: ignore[attr-defined]
            other.close()


BAD = [
    ("memory that was not introduced", frame(LEND, message=1, size=SIZE, signature=bytes(16))),
    ("no place", frame(LEND, message=1, size=SIZE, signature=bytes(15))),
    ("more than there is", frame(LEND, message=1, size=3, offset=4, signature=bytes(16))),
    ("no number", frame(LEND, size=SIZE, signature=bytes(16))),
    ("a piece nobody asked for", frame(PIECE, message=1, size=3, signature=bytes(16))),
    ("a piece without a place", frame(PIECE, message=1, size=3)),
    ("two introductions", *2 * [frame(MEMORY, signature=bytes(16))]),
    ("half an introduction", frame(MEMORY, signature=bytes(8))),
    ("no introduction", frame(MEMORY)),
]


@pytest.mark.parametrize("frames", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_frames_that_make_no_sense(frames: list[Frame]) -> None:
    with near_job() as (backend, rogue):
        out, pending = post(backend)
        rogue.send(*frames)
        fails(pending, "from the connection to rank 1: ")
        assert (out == 1).all()


@pytest.mark.parametrize(
    ("start", "size"), [(999, 10), (1001, 10), (1000, 0), (1000, SIZE - 999), (1000, 2**63)]
)
def test_a_piece_that_does_not_follow(start: int, size: int) -> None:
    with near_job() as (backend, rogue):
        rogue.introduce()
        out, pending = post(backend)
        place = rogue.place(rogue.array(2 * SIZE, 2))
        rogue.tell(LEND, place, SIZE, 1000)
        rogue.taken()
        rogue.tell(PIECE, place, size, start)
        fails(pending, "data that it was not asked for")
        assert (out[1000:] == 1).all()


def test_another_shape_is_refused_before_anything_is_read() -> None:
    with near_job() as (backend, rogue):
        rogue.introduce()
        out, pending = post(backend, SIZE - 1)
        rogue.lend(rogue.array())
        fails(pending, f"{SIZE} bytes where rank 0 receives {SIZE - 1} bytes", Exception)
        assert (out == 1).all()


def test_what_was_revoked_does_not_finish_a_receive() -> None:
    with near_job() as (backend, rogue):
        rogue.introduce()
        first, second = rogue.array(value=2), rogue.array(value=3)
        rogue.memory.revoke(NUMBER)
        _, given_up = post(backend, tag=0)
        rogue.lend(first)
        out, pending = post(backend, tag=0)
        rogue.lend(second, NUMBER + 1)
        assert pending.join(PATIENCE)
        assert (out == 3).all()
        assert not given_up.finished
        assert rogue.taken() == (NUMBER + 1, SIZE)


def test_after_very_many_nothing_is_believed() -> None:
    memory, other = SharedMemory(), SharedMemory()
    memory_peer = other.memory_peer(memory.introduce())
    numbers = range(100, 100 + 509)
    for number in numbers:
        assert not memory_peer.revoked(number)
        memory.revoke(number)
        assert memory_peer.revoked(number)
        assert not memory_peer.revoked(5)
    assert all(memory_peer.revoked(number) for number in numbers)
    for number in (1, 2, 3):
        memory.revoke(number)
        assert memory_peer.revoked(number)
        assert memory_peer.revoked(4)
    memory.close()
    other.close()


def test_a_receive_that_is_given_up_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to it any more, and the lender can have its array back."""
    copies: list[int] = []
    original = zmq_memory.Borrowing.copy

    def once(self: zmq_memory.Borrowing) -> bool:
        if len(copies) == 1:
            return False  # as if others had their turn for long
        copies.append(1)
        return original(self) and False

    monkeypatch.setattr(zmq_memory, "_COPY_BYTES", 1000)
    monkeypatch.setattr(zmq_memory.Borrowing, "copy", once)
    with near_job() as (backend, rogue):
        rogue.introduce()
        array = rogue.array(value=2)
        rogue.lend(array)
        catch_up(backend, rogue)
        copies.clear()
        out, pending = post(backend)
        assert (out[:1000] == 2).all()
        assert (out[1000:] == 1).all()
        assert not pending.cancel()
        monkeypatch.setattr(zmq_memory.Borrowing, "copy", original)
        assert rogue.taken() == (NUMBER, SIZE)
        catch_up(backend, rogue)
        assert (out[1000:] == 1).all()


def test_pieces_of_a_receive_that_was_given_up_are_acknowledged() -> None:
    with near_job() as (backend, rogue):
        rogue.introduce()
        out, pending = post(backend)
        place = rogue.place(rogue.array(value=2))
        rogue.tell(LEND, place, SIZE, 1000)
        rogue.taken()
        assert not pending.cancel()
        rogue.tell(PIECE, place, SIZE - 1000, 1000)
        assert rogue.taken() == (NUMBER, SIZE)
        assert (out[1000:] == 1).all()


def test_a_large_array_is_copied_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_memory, "_COPY_BYTES", 70_000)
    with near_job() as (backend, rogue):
        rogue.introduce()
        array = rogue.array()
        out, pending = post(backend)
        rogue.lend(array)
        assert pending.join(PATIENCE)
        assert (out == array).all()


# Sending.


def read_place(data: bytes) -> tuple[int, int]:
    segment, offset = struct.unpack("<QQ", data[48:64])
    return segment, offset


class Reader:
    """Reads what rank 0 lends."""

    def __init__(self, rogue: Lender) -> None:
        introduction = rogue.read(MEMORY)[48:]
        self.memory_peer = rogue.memory.memory_peer(introduction)

    def read(self, data: bytes, size: int) -> Any:
        return self.memory_peer.bytes(*read_place(data), size).copy()


def size_and_offset(data: bytes) -> tuple[int, int]:
    size, offset = struct.unpack("<QQ", data[32:48])
    return size, offset


def test_an_array_of_empty_is_lent_until_it_is_taken() -> None:
    with near_job() as (backend, rogue):
        data = backend.empty(2 * SIZE, np.uint8)[100 : 100 + SIZE]
        data[...] = np.arange(SIZE) % 251
        pending = backend.post_send(data, 1, HERE)
        reader = Reader(rogue)
        offer = rogue.read(LEND)
        assert size_and_offset(offer) == (SIZE, SIZE)
        assert backend.memory is not None
        assert read_place(offer) == backend.memory.locate(data)
        assert (reader.read(offer, SIZE) == data).all()
        catch_up(backend, rogue)
        assert not pending.finished
        rogue.send(frame(TAKEN, message=_numbers(offer)[0], offset=SIZE))
        assert pending.join(PATIENCE)


def test_pieces_are_bounded_and_wait_for_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_memory, "_PIECE_BYTES", 100_000)
    monkeypatch.setattr(zmq_memory, "_AHEAD_BYTES", 50_000)
    data = (np.arange(SIZE) % 251).astype(np.uint8)
    kept = data.copy()
    with near_job() as (backend, rogue):
        pending = backend.post_send(data, 1, HERE)
        reader = Reader(rogue)
        offer = rogue.read(LEND)
        number = _numbers(offer)[0]
        assert size_and_offset(offer) == (SIZE, 50_000)
        assert (reader.read(offer, 50_000) == kept[:50_000]).all()
        rogue.send(frame(TAKEN, message=number, offset=50_000))
        rogue.send(frame(GRANT, message=number))
        end = 50_000
        waiting: list[bytes] = []
        while end < SIZE:
            for _ in range(zmq_memory._PIECES - len(waiting)):
                if end < SIZE:
                    waiting.append(rogue.read(PIECE))
                    size, offset = size_and_offset(waiting[-1])
                    assert offset == end
                    end += size
            # All that may wait does, so what comes now is not a piece.
            backend.post_send(np.zeros(3, np.uint8), 1, Envelope(0, 5))
            assert rogue.next_message()[5] == EAGER
            if end < SIZE:
                assert not pending.finished
            piece = waiting.pop(0)
            size, offset = size_and_offset(piece)
            assert (reader.read(piece, size) == kept[offset : offset + size]).all()
            rogue.send(frame(TAKEN, message=number, offset=offset + size))
        assert pending.join(PATIENCE)
        data[:] = 0  # it is in the blocks now
        for piece in waiting:
            size, offset = size_and_offset(piece)
            assert (reader.read(piece, size) == kept[offset : offset + size]).all()
            rogue.send(frame(TAKEN, message=number, offset=offset + size))
        catch_up(backend, rogue)


@pytest.mark.parametrize("lent", [True, False])
def test_a_refused_message_comes_over_the_connection_and_so_do_later_ones(lent: bool) -> None:
    with near_job() as (backend, rogue):
        data = backend.empty(SIZE, np.uint8) if lent else np.empty(SIZE, np.uint8)
        data[...] = np.arange(SIZE) % 251
        pending = backend.post_send(data, 1, HERE)
        number = _numbers(rogue.read(LEND))[0]
        rogue.send(frame(REFUSE, message=number))
        found = b""
        while len(found) < SIZE:
            found += rogue.read(DATA)[48:]
        assert found == data.tobytes()
        assert pending.join(PATIENCE)
        again = backend.post_send(data, 1, HERE)
        offer = rogue.next_message()
        assert offer[5] == OFFER
        rogue.send(frame(GRANT, message=_numbers(offer)[0]))
        assert again.join(PATIENCE)


def test_a_refusal_is_an_error_where_memory_is_required() -> None:
    with near_job(shm="on") as (backend, rogue):
        pending = backend.post_send(np.empty(SIZE, np.uint8), 1, HERE)
        rogue.send(frame(REFUSE, message=_numbers(rogue.read(LEND))[0]))
        fails(pending, r"shm=on, but rank 1 of this host cannot share", ConfigError)


@pytest.mark.parametrize("first", [GRANT, REFUSE])
@pytest.mark.parametrize("second", [GRANT, REFUSE])
def test_two_answers(first: int, second: int) -> None:
    with near_job() as (backend, rogue):
        pending = backend.post_send(np.zeros(1 << 26, np.uint8), 1, HERE)
        number = _numbers(rogue.read(LEND))[0]
        rogue.send(frame(first, message=number), frame(second, message=number))
        fails(pending, "a second time")


def test_a_refusal_of_what_was_not_lent() -> None:
    with near_job(shm="off") as (backend, rogue):
        pending = backend.post_send(np.zeros(1 << 26, np.uint8), 1, HERE)
        rogue.send(frame(REFUSE, message=_numbers(rogue.read(OFFER))[0]))
        fails(pending, "a second time")


def test_acknowledgements_of_nothing_change_nothing() -> None:
    with near_job() as (backend, rogue):
        data = backend.empty(SIZE, np.uint8)
        pending = backend.post_send(data, 1, HERE)
        number = _numbers(rogue.read(LEND))[0]
        for message, offset in ((99, SIZE), (number, SIZE - 1), (number, 0), (number, 2**64 - 1)):
            rogue.send(frame(TAKEN, message=message, offset=offset))
        catch_up(backend, rogue)
        assert not pending.finished
        rogue.send(frame(TAKEN, message=number, offset=SIZE))
        assert pending.join(PATIENCE)


@pytest.mark.parametrize("lent", [True, False])
def test_a_send_that_is_given_up_is_revoked_before_its_array_may_change(lent: bool) -> None:
    with near_job() as (backend, rogue):
        data = backend.empty(SIZE, np.uint8) if lent else np.zeros(SIZE, np.uint8)
        pending = backend.post_send(data, 1, HERE)
        reader = Reader(rogue)
        number = _numbers(rogue.read(LEND))[0]
        assert not reader.memory_peer.revoked(number)
        assert not pending.cancel()
        assert reader.memory_peer.revoked(number)
        # What the peer had read before is no error, and others still get through.
        rogue.send(frame(TAKEN, message=number, offset=SIZE))
        another = backend.post_send(np.ones(SIZE, np.uint8), 1, HERE)
        offer = rogue.read(LEND)
        assert not reader.memory_peer.revoked(_numbers(offer)[0])
        assert (reader.read(offer, SIZE) == 1).all()
        rogue.send(frame(TAKEN, message=_numbers(offer)[0], offset=SIZE))
        assert another.join(PATIENCE)


def test_closing_waits_until_lent_arrays_are_taken() -> None:
    with near_job() as (backend, rogue):
        pending = backend.post_send(np.ones(SIZE, np.uint8), 1, HERE)
        reader = Reader(rogue)
        offer = rogue.read(LEND)
        answers: list[Any] = []

        def answer() -> None:
            time.sleep(0.2)
            answers.append(reader.read(offer, SIZE))
            rogue.send(frame(TAKEN, message=_numbers(offer)[0], offset=SIZE))
            rogue.send(frame(SEEN))

        thread = threading.Thread(target=answer)
        thread.start()
        backend.close()
        thread.join()
        assert pending.finished
        assert pending.error is None
        assert (answers[0] == 1).all()


def test_without_more_memory_the_rest_goes_over_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_memory, "_AHEAD_BYTES", 50_000)
    monkeypatch.setattr(zmq_memory, "_PIECE_BYTES", 100_000)
    data = (np.arange(SIZE) % 251).astype(np.uint8)
    with near_job() as (backend, rogue):
        pending = backend.post_send(data, 1, HERE)
        number = _numbers(rogue.read(LEND))[0]
        monkeypatch.setattr(SharedMemory, "empty", lambda self, nbytes: None)
        rogue.send(frame(GRANT, message=number))
        found = b""
        while len(found) < SIZE - 50_000:
            part = rogue.read(DATA)
            assert size_and_offset(part)[1] == 50_000 + len(found)
            found += part[48:]
        assert found == data[50_000:].tobytes()
        assert pending.join(PATIENCE)
        more = backend.post_send(data, 1, HERE)
        offer = rogue.next_message()
        assert offer[5] == OFFER
        rogue.send(frame(GRANT, message=_numbers(offer)[0]))
        assert more.join(PATIENCE)


def test_a_message_counts_as_granted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the memory runs out after the grant, and the first bytes are taken after that."""
    with near_job(segment_bytes=1 << 24) as (backend, rogue):  # more than the connection holds
        backend.post_send(np.ones(14 << 20, np.uint8), 1, HERE)
        offer = rogue.read(LEND)
        monkeypatch.setattr(SharedMemory, "empty", lambda self, nbytes: None)
        rogue.send(frame(GRANT, message=_numbers(offer)[0]))
        rogue.send(frame(TAKEN, message=_numbers(offer)[0], offset=zmq_memory._AHEAD_BYTES))
        catch_up(backend, rogue)
        assert backend.control.peers[1].channel.granted == 1


def test_a_rank_that_has_no_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("out of descriptors")

    for shm in ("auto", "on"):
        with near_job(shm=shm) as (backend, rogue), monkeypatch.context() as broken:
            broken.setattr(os, "memfd_create", refuse)
            if shm == "on":
                with pytest.raises(ConfigError, match=r"rank 0.*: out of descriptors"):
                    backend.post_send(np.zeros(SIZE, np.uint8), 1, HERE)
                continue
            pending = backend.post_send(np.zeros(SIZE, np.uint8), 1, HERE)
            rogue.send(frame(GRANT, message=_numbers(rogue.read(OFFER))[0]))
            assert pending.join(PATIENCE)
