"""``AgentLinks``: how the agents of an elastic job, one on each host, tell each other things."""

from __future__ import annotations

from typing import Any, Protocol

Message = dict[str, Any]


class AgentLinks(Protocol):
    """An agent's links to the others of its job. A transport makes them: ``Transport.link_agents``.

    A message may be lost, or come late, when an agent or the network between two fails. None is
    taken from who doesn't know the job's secret. All is for one thread.

    Attributes:
        address: where the others reach this agent, ``HOST:PORT``.
    """

    address: str

    def send(self, address: str, message: Message) -> None:
        """Send a message, of values of JSON, to the agent at ``HOST:PORT``; never blocks."""

    def take(self) -> list[tuple[str, Message]]:
        """What has come since the last call: messages, each with its sender's address.

        Call it whenever one of ``watched`` is readable, and once before the first wait. It never
        blocks.
        """

    def refused(self) -> set[str]:
        """The addresses where somebody listens who has another secret, or is no agent."""

    def watched(self) -> list[int]:
        """Descriptors that become readable when there is something to take."""

    def close(self) -> None:
        """End the links. What was sent last has a moment to go out."""
