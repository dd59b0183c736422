"""The numbers that name ranks, tags and groups: checked, and put together."""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Iterable, Mapping, Set

import numpy as np

from fsdpcore.core.errors import ArgumentError

MAX_TAG = 2**31 - 1


def check_rank(value: object, world_size: int, what: str) -> int:
    """Return ``value`` as a rank of a group of ``world_size``.

    Raises:
        ArgumentError: it is not an integer, or out of range.
    """
    try:
        rank = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"{what}: a rank is an integer, got {value!r}") from None
    if isinstance(value, bool):
        raise ArgumentError(f"{what}: a rank is an integer, got the flag {value}")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"{what}: rank {rank} is not in 0..{world_size - 1}")
    return rank


def check_tag(tag: object) -> int:
    """Return ``tag`` as the tag of a message.

    Raises:
        ArgumentError: it is not an integer, or out of range.
    """
    try:
        number = operator.index(tag)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"a tag is an integer, got {tag!r}") from None
    if not 0 <= number <= MAX_TAG:
        raise ArgumentError(f"tag {number} is not in 0..{MAX_TAG}")
    return number


def check_members(ranks: object, world_size: int) -> tuple[int, ...]:
    """Return ``ranks`` as members of a group of ``world_size``, in their order.

    Raises:
        ArgumentError: no sequence of ranks, or one is named twice.
    """
    # Text and bytes are sequences too, and a set has no order to number its members by.
    if isinstance(ranks, (str, bytes, bytearray, Set, Mapping)) or not isinstance(ranks, Iterable):
        raise ArgumentError(f"sub(): the members are a sequence of ranks, got {ranks!r}")
    listed = list(ranks)
    if any(isinstance(rank, (bool, np.bool_)) for rank in listed):
        raise ArgumentError(f"sub(): the members are ranks, not flags, got {listed}")
    members = tuple(check_rank(rank, world_size, "sub(): no such member") for rank in listed)
    if len(set(members)) != len(members):
        raise ArgumentError(f"sub(): a rank is named twice in {list(members)}")
    return members


def check_int64(value: object, what: str) -> int:
    """Return ``value`` as an integer of 64 bits.

    Raises:
        ArgumentError: it is none; names it ``what``.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not -(2**63) <= number < 2**63:
        raise ArgumentError(f"{what} must be an integer of 64 bits, got {value!r}")
    return number


def channel_of(parent: int, members: tuple[int, ...], count: int, name: str) -> int:
    """Name a group by how it was made, so that its members agree without communication.

    Always even; a group's collectives use the odd number that follows, apart from user messages.
    """
    seed = struct.pack(f"<QQQ{len(members)}Q", parent, count, len(members), *members)
    seed += name.encode(errors="backslashreplace")
    digest = hashlib.blake2b(seed, digest_size=8).digest()
    return int.from_bytes(digest, "little") & ~1
