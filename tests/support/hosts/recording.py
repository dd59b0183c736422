"""What a lab has recorded: the words of each connection, as a listener on the cable has them."""

from __future__ import annotations

import socket
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_IPV4, _TCP = 0x0800, 6


class Direction(NamedTuple):
    """Who speaks, and to whom: addresses and ports."""

    source: str
    source_port: int
    target: str
    target_port: int


def words(path: Path) -> dict[Direction, bytes]:
    """The bytes that each direction of each connection carried."""
    pieces = defaultdict[Direction, dict[int, bytes]](dict)
    for frame in _frames(path.read_bytes()):
        if (segment := _segment(frame)) is not None:
            direction, sequence, payload = segment
            kept = pieces[direction]
            if len(payload) > len(kept.get(sequence, b"")):  # what is sent again counts once
                kept[sequence] = payload
    return {direction: _joined(found) for direction, found in pieces.items()}


def _frames(content: bytes) -> Iterator[bytes]:
    at = 24
    while at + 16 <= len(content):
        (size,) = struct.unpack_from("<I", content, at + 8)
        yield content[at + 16 : at + 16 + size]
        at += 16 + size


def _segment(frame: bytes) -> tuple[Direction, int, bytes] | None:
    """Direction, sequence number and payload of a frame; None if there is none."""
    if int.from_bytes(frame[12:14], "big") != _IPV4 or frame[23] != _TCP:
        return None
    packet = frame[14 : 14 + int.from_bytes(frame[16:18], "big")]
    source, target = (socket.inet_ntoa(packet[at : at + 4]) for at in (12, 16))
    segment = packet[(packet[0] & 15) * 4 :]
    source_port, target_port, sequence = struct.unpack_from(">HHI", segment)
    payload = segment[(segment[12] >> 4) * 4 :]
    return (
        (Direction(source, source_port, target, target_port), sequence, payload)
        if payload
        else None
    )


def _joined(pieces: dict[int, bytes]) -> bytes:
    start = min(pieces)
    if max(pieces) - start > 1 << 31:  # the numbers began anew in between
        start = min(sequence for sequence in pieces if sequence > 1 << 31)
    found = bytearray()
    for sequence in sorted(pieces, key=lambda each: (each - start) % (1 << 32)):
        at = (sequence - start) % (1 << 32)
        found[at : at + len(pieces[sequence])] = pieces[sequence]
    return bytes(found)
