"""``Mail``: what an agent sends to the others."""

from __future__ import annotations

from typing import Any

from fsdpcore.elastic.peers import Peers
from fsdpcore.elastic.reports import Report

Message = dict[str, Any]


class Mail:
    """Messages that wait to be sent, each with what its sender says of itself.

    Args:
        peers: the others; who doesn't know the newest generation is told it with any message.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._waiting: list[tuple[str, Message]] = []
        self._sequence = 0

    def to(self, host: str, message: Message | None = None) -> None:
        """Send to an agent; without a message, what is to be said anyway."""
        if address := self._peers.address(host):
            newest = self._peers.generation
            behind = newest.number and self._peers.is_behind(host)
            self.to_address(
                address, {**(message or {}), **({"decided": newest.encode()} if behind else {})}
            )

    def to_address(self, address: str, message: Message | None = None) -> None:
        """Send to whoever is reached there."""
        self._waiting.append((address, {"kind": "state", **(message or {})}))

    def take(self, job: str, report: Report) -> list[tuple[str, Message]]:
        """Return what waits, with the addresses, and forget it."""
        waiting, self._waiting = self._waiting, []
        told = report.encode() if waiting else {}
        sent = []
        for address, message in waiting:
            self._sequence += 1
            envelope = {"job": job, "sequence": self._sequence, "report": told}
            sent.append((address, {**message, **envelope}))
        return sent
