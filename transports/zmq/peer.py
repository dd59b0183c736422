"""Another rank, as a rank of the ``zmq`` transport sees it."""

from __future__ import annotations

from .channel import PeerChannel


class Peer:
    """Another rank; used with the lock of the links held.

    Attributes:
        rank: its number in the job.
        channel: the messages from and to it.
        closed_or_failed: it has said that it leaves, or failed: no new message will come from it.
        told: this rank has said to it that it fails or leaves.
        has_seen: it has read that.
        link_broken: the link to it has broken.
        answered: it was told that all it had to send has come.
    """

    def __init__(self, rank: int, channel: PeerChannel) -> None:
        self.rank = rank
        self.channel = channel
        self.closed_or_failed = False
        self.told = False
        self.has_seen = False
        self.link_broken = False
        self.answered = False

    @property
    def idle(self) -> bool:
        """Whether everything for this peer is on its way and wanted, or the peer is lost."""
        return self.link_broken or self.channel.idle

    @property
    def has_read_all(self) -> bool:
        """Whether the peer has read this rank's last words, or never will."""
        return self.has_seen or not self.told or self.link_broken
