"""What a process reads of another's memory: only what that has made, and not what it took back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fsdpcore.transports.memory.shared import SharedMemory, memory_sharing

from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import ProtocolError

pytestmark = pytest.mark.skipif(
    not SharedMemory.available, reason="this system has no memfd_create"
)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory()
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[SharedMemory]:
    made = SharedMemory()
    yield made
    made.close()


def empty(memory: SharedMemory, nbytes: int) -> Bytes:
    array = memory.empty(nbytes)
    assert array is not None
    return array


def place(memory: SharedMemory, array: Bytes) -> tuple[int, int]:
    found = memory.own(array)
    assert found is not None
    return found


def test_parts_of_what_the_other_made(memory: SharedMemory, other: SharedMemory) -> None:
    memory_peer = other.memory_peer(memory.introduce())
    for nbytes in (1, 5000, 5 << 20):
        array = empty(memory, nbytes)
        array[...] = 3
        seen = memory_peer.bytes(*place(memory, array), nbytes)
        assert seen.tolist() == [3] * nbytes if nbytes < 10 else (seen == 3).all()
        array[-1] = 9
        assert seen[-1] == 9
        again = memory_peer.bytes(*place(memory, array[nbytes - 1 :]), 1)
        assert again.tolist() == [9]


def test_only_what_a_process_made_is_its_own(memory: SharedMemory, other: SharedMemory) -> None:
    array = empty(memory, 5000)
    number, offset = place(memory, array)
    seen = other.attach(number)[offset : offset + 5000]
    assert other.locate(seen) == (number, offset)
    assert other.own(seen) is None
    assert memory.own(np.zeros(5000, np.uint8)) is None
    memory.close()
    assert memory.own(array) is None


def test_what_collectives_have_mapped_is_checked_as_well(
    memory: SharedMemory, other: SharedMemory
) -> None:
    third = SharedMemory()
    array = empty(third, 5000)
    number, offset = place(third, array)
    other.attach(number)
    memory_peer = other.memory_peer(memory.introduce())
    with pytest.raises(ProtocolError, match="memory of another process is named"):
        memory_peer.bytes(number, offset, 5000)
    third.close()


@pytest.mark.parametrize("excess", [1, 1 << 40, 2**64 - 1])
def test_nothing_behind_the_end(memory: SharedMemory, other: SharedMemory, excess: int) -> None:
    memory_peer = other.memory_peer(memory.introduce())
    number, _ = place(memory, empty(memory, 5000))
    size = memory.attach(number).size
    assert memory_peer.bytes(number, size, 0).size == 0
    assert memory_peer.bytes(number, size - 7, 7).size == 7
    for offset, nbytes in ((size, excess), (excess, size), (0, size + excess)):
        with pytest.raises(ProtocolError, match="ends before"):
            memory_peer.bytes(number, offset, nbytes)


def test_a_closed_memory_is_out_of_reach(memory: SharedMemory, other: SharedMemory) -> None:
    memory_peer = other.memory_peer(memory.introduce())
    number, offset = place(memory, empty(memory, 5000))
    memory.close()
    with pytest.raises(ProcessLookupError, match="the process is gone"):
        memory_peer.bytes(number, offset, 5000)


def test_introductions_that_are_none(memory: SharedMemory) -> None:
    for content in (b"", bytes(15), bytes(17), memory.introduce()):
        with pytest.raises(ProtocolError, match="introduce"):
            memory.memory_peer(content)
    with pytest.raises(OSError, match=r".+"):
        memory.memory_peer(bytes(16))
    with pytest.raises(OSError, match="shm=off"):
        memory_sharing("off").memory_peer(memory.introduce())
