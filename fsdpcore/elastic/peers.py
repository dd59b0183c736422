"""``Peers``: what an agent knows of the others, and whom it hears."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fsdpcore.elastic.generation import Generation
from fsdpcore.elastic.reports import Report


@dataclass
class Peer:
    """Another agent: its newest report, the number of that message, and when it came."""

    report: Report
    sequence: int
    heard: float


class Peers:
    """The other agents of a job, and those that ask to be taken along.

    Args:
        me: the id of this agent.
        lost_after: seconds of silence after which an agent is lost.

    Attributes:
        lost_after: as given.
        generation: the newest that was decided, as far as this agent knows.
    """

    def __init__(self, me: str, lost_after: float) -> None:
        self._me, self.lost_after = me, lost_after
        self._peers: dict[str, Peer] = {}
        self.generation = Generation(0, (), ())
        self._since: dict[str, float] = {}  # when agents came into the job, by their ids
        self._last_call: float | None = None

    def install(self, generation: Generation, now: float) -> None:
        """Look at the agents of a generation; forget others of which nothing is heard."""
        self.generation = generation
        hosts = {card.id for card in generation.hosts}
        self._since = {host: self._since.get(host, now) for host in hosts}
        self._peers = {
            host: peer
            for host, peer in self._peers.items()
            if host in hosts or self._is_heard(peer, now)
        }

    def catch_up(self, now: float) -> None:
        """Forgive the others the time in which this agent itself stood still."""
        last, self._last_call = self._last_call, now
        stood = 0.0 if last is None else now - last - self.lost_after / 2
        if stood > 0:
            for peer in self._peers.values():
                peer.heard += stood

    def note(self, report: Report, sequence: int, now: float) -> bool:
        """Take in what an agent says; returns whether it is newer than what it said before."""
        peer = self._peers.get(report.card.id)
        if peer and sequence <= peer.sequence:
            return False
        self._peers[report.card.id] = Peer(report, sequence, now)
        return True

    def reports(self) -> dict[str, Report]:
        """The newest report of each agent, those first that came first."""
        return {host: peer.report for host, peer in self._peers.items()}

    def address(self, host: str) -> str:
        """Where an agent is reached; empty if that is not known."""
        for card in self.generation.hosts:
            if card.id == host:
                return card.address
        return self._peers[host].report.card.address if host in self._peers else ""

    def is_behind(self, host: str) -> bool:
        """Whether an agent may not know the newest generation."""
        peer = self._peers.get(host)
        return peer is None or peer.report.generation < self.generation.number

    def hears(self, now: float) -> frozenset[str]:
        """The agents from which something came lately, or may still come."""
        heard = {host for host, peer in self._peers.items() if self._is_heard(peer, now)}
        heard |= {
            host for host in self._since if host not in self._peers and self._is_new(host, now)
        }
        return frozenset(heard - {self._me})

    def of_job(self, now: float) -> list[Report]:
        """What those agents say that can take others along, and that are heard."""
        heard = [self._peers[host].report for host in self.hears(now) & {*self._peers}]
        return [report for report in heard if report.is_of_job]

    def linked(self, now: float) -> frozenset[str]:
        """This agent, and those that it hears and that hear it."""
        found = {self._me}
        for host in self.hears(now):
            peer = self._peers.get(host)
            waits = self.is_behind(host) and self._is_new(host, now)
            if waits or (peer and self._me in peer.report.hears):
                found.add(host)
        return frozenset(found)

    def all_finished(self, hosts: Collection[str], now: float) -> bool:
        """Whether all of these that are heard know that the job is finished."""
        known = [self._peers[host] for host in hosts if host in self._peers]
        return all(peer.report.finished or not self._is_heard(peer, now) for peer in known)

    def _is_heard(self, peer: Peer, now: float) -> bool:
        return now < peer.heard + self.lost_after

    def _is_new(self, host: str, now: float) -> bool:
        """Whether an agent came into the job so lately that it may not know it yet."""
        return host in self._since and now < self._since[host] + self.lost_after
