"""``Mail``: what an agent sends to the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdpcore.elastic.decree import read_ballot_message
from fsdpcore.elastic.generation import Generation
from fsdpcore.elastic.peers import Peers
from fsdpcore.elastic.reports import Report

Message = dict[str, Any]


@dataclass(frozen=True)
class Letter:
    """What a message says.

    Attributes:
        job: of the sender; empty if it does not know it.
        sequence: grows with every message of a sender.
        report: what the sender says of itself.
        decided: the newest generation, if the receiver may not know it.
        ballot: on the next generation, for a ``Decree``; None if it is about none.
    """

    job: str
    sequence: int
    report: Report
    decided: Generation | None
    ballot: Message | None

    @classmethod
    def decode(cls, message: Message) -> Letter:
        """Read what ``Mail`` has made.

        Raises:
            LookupError, TypeError, ValueError, OverflowError, AttributeError: it is something else.
        """
        decided = message.get("decided")
        return cls(
            str(message["job"]),
            int(message["sequence"]),
            Report.decode(message["report"]),
            Generation.decode(decided) if decided else None,
            read_ballot_message(message) if message.get("number") is not None else None,
        )


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
