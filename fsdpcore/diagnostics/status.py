"""What a rank is doing, in words for people and in data for the ranks that ask.

A rank whose deadline has passed asks the others, and ``deadlocks.py`` draws conclusions from what
they say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from fsdpcore.core.text import rank_list

WORLD_CHANNEL = 0

# A rank may run operations of many groups at once; the oldest say enough.
MAX_WAITS = 4
_MAX_TEXT = 2000  # characters of what another rank says that it is doing


_DEVICE = "GPU arrays"


class Group(NamedTuple):
    """The name of a group: everything by which its members tell it from others.

    Attributes:
        channel: identifies its messages; 0 for all ranks.
        ranks: the members' numbers in the whole job, in the order of the group.
        position: how many groups of equal members and name its parent had made before.
        name: as given to ``sub()``.
        on_device: it is what moves a group's arrays of GPUs.
    """

    channel: int
    ranks: tuple[int, ...]
    position: int = 0
    name: str = ""
    on_device: bool = False

    def __str__(self) -> str:
        if self.channel == WORLD_CHANNEL:
            return "all ranks"
        words = f"group {rank_list(self.ranks)}"
        if self.name:
            words += f" {self.name!r}"
        return f"{words} (the {ordinal(self.position + 1)} of these)" if self.position else words

    def for_device(self, channel: int) -> Group:
        """The name of what moves this group's arrays of GPUs, so that messages tell them apart."""
        name = f"{self.name}, {_DEVICE}" if self.name else _DEVICE
        return self._replace(channel=channel, name=name, on_device=True)


class ComparedCall(Protocol):
    """What a rank calls, as far as all ranks must call alike; in words: ``str``."""

    @property
    def digest(self) -> int:
        """64 bits that are equal where the calls fit together."""

    @property
    def policy(self) -> str:
        """How algorithms are chosen, in words."""


class CallAnswer(NamedTuple):
    """What a rank has called as the collective of some number in a group.

    Attributes:
        before: a digest of all the group's calls before it.
        digest, words, policy: of the call; the words are cut off if they are many.
    """

    before: int
    digest: int
    words: str
    policy: str


@dataclass(frozen=True)
class OpenOperation:
    """An operation that a rank is in, or that was the last one that it could not finish.

    Attributes:
        text: the operation in words, with its group.
        seconds: since it began or, if it is ``over``, since it failed.
        over: it has failed.
        op: name of the collective, or ``send``, ``recv`` or ``probe``.
        sequence: number of the collective in its group; 0 for a message.
        peer, tag: of a message; -1 for any, and for a collective.
        channel, ranks, position, name, on_device: the ``Group``.
    """

    text: str
    seconds: float
    over: bool
    op: str
    sequence: int
    peer: int
    tag: int
    channel: int
    ranks: tuple[int, ...]
    position: int
    name: str
    on_device: bool

    @property
    def open(self) -> bool:
        """Whether it waits for a message from any rank."""
        return not self.sequence and self.peer < 0

    @property
    def group(self) -> Group:
        """Whose operation it is."""
        return Group(self.channel, self.ranks, self.position, self.name, self.on_device)

    def __str__(self) -> str:
        if self.over:
            return f"failed in {self.text} {self.seconds:.1f} s ago"
        return f"in {self.text} for {self.seconds:.1f} s"


@dataclass(frozen=True)
class Status:
    """What a rank is doing: in words, how far it is on one channel, and what it waits in.

    Attributes:
        text: for an error's message.
        entered: the last collective that it has begun on the channel asked about; 0 for none.
        member: it has made the group with that channel.
        waits: the operations that it is in, the oldest first.
        call: the collective on that channel whose number was asked for; None for no number, or for
            one that it has not come to, or has forgotten.
    """

    text: str
    entered: int
    member: bool = True
    waits: tuple[OpenOperation, ...] = ()
    call: CallAnswer | None = None

    def as_json(self) -> dict[str, Any]:
        """Encode for the wire, in types that JSON has."""
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Status:
        """Decode; what is not as it should be is left out, since it only goes into messages."""
        entered = content.get("entered")
        waits = content.get("waits")
        return Status(
            str(content.get("text", ""))[:_MAX_TEXT],
            entered if isinstance(entered, int) else 0,
            content.get("member") is not False,
            tuple(w for item in _listed(waits)[:MAX_WAITS] if (w := _wait(item)) is not None),
            _call(content.get("call")),
        )


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _call(content: Any) -> CallAnswer | None:
    try:
        before, digest, words, policy = content
        return CallAnswer(int(before), int(digest), str(words), str(policy))
    except (TypeError, ValueError, OverflowError):
        return None


def _wait(content: Any) -> OpenOperation | None:
    try:
        ranks = tuple(int(rank) for rank in content["ranks"])
        return OpenOperation(
            str(content["text"]),
            float(content["seconds"]),
            bool(content["over"]),
            str(content["op"]),
            int(content["sequence"]),
            int(content["peer"]),
            int(content["tag"]),
            int(content["channel"]),
            ranks,
            int(content["position"]),
            str(content["name"]),
            bool(content["on_device"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, ..."""
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else last}"
