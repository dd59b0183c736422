"""Ranks of an elastic job that are threads of this process."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from fsdpcore.comm.place import RankPlace
from fsdpcore.comm.transport import Transport
from fsdpcore.core.errors import RendezvousError
from fsdpcore.elastic.channel import Message
from fsdpcore.launch.config import Config

_LOOK_SECONDS = 0.02


class QueueChannel:
    """Both ends of a channel between an agent and a rank that is a thread.

    Args:
        sent: where a rank's messages go.
        number: of the seat, which goes with them.
    """

    def __init__(self, sent: queue.SimpleQueue[tuple[int, Message]], number: int) -> None:
        self._sent, self._number = sent, number
        self._received: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._ended = False

    def send(self, message: Message) -> None:
        """Tell the agent; see ``Channel``."""
        if not self._ended:
            self._sent.put((self._number, message))

    def receive(self, timeout: float | None) -> Message | None:
        """Wait for the next message; see ``Channel``."""
        try:
            message = self._received.get(timeout=timeout)
        except queue.Empty:
            return None
        if message is None:
            raise EOFError("the channel was closed")
        return message

    def tell(self, message: Message) -> None:
        """Tell the rank."""
        self._received.put(message)

    def close(self) -> None:
        """End the channel, in both directions."""
        self._ended = True
        self._received.put(None)


@dataclass
class _Gathering:
    """Those who meet for one generation."""

    ranks: list[Transport]
    came: set[int] = field(default_factory=set)
    went: int = 0


class Gatherings:
    """Where threads meet, generation by generation.

    Args:
        config: of their transport.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._news = threading.Condition()
        self._gatherings: dict[str, _Gathering] = {}

    def meet(self, place: RankPlace) -> Transport:
        """Become a rank; blocks until all are there.

        Raises:
            RendezvousError: ``place.given_up`` says why.
        """
        assert place.given_up is not None
        with self._news:
            found = self._gatherings.get(place.job)
            if found is None:
                made = self._config.transport_class.threads(place.world_size, self._config)
                found = self._gatherings[place.job] = _Gathering(made)
            found.came.add(place.rank)
            self._news.notify_all()
            while len(found.came) < place.world_size:
                if why := place.given_up():
                    found.came.discard(place.rank)
                    if not found.came:
                        self._gatherings.pop(place.job, None)
                    raise RendezvousError(why)
                self._news.wait(_LOOK_SECONDS)
            found.went += 1
            if found.went == place.world_size:
                del self._gatherings[place.job]
            return found.ranks[place.rank]
