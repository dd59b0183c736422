"""``Envelope``: what a message carries beside its data."""

from __future__ import annotations

from typing import NamedTuple


class Envelope(NamedTuple):
    """What a message is matched by (``channel``, ``tag``) and checked against (``signature``).

    Messages of one sender with equal channel and tag are received in the order they were sent.
    """

    channel: int
    tag: int
    signature: bytes = b""
