"""Random programs: what they consist of. ``program_maker`` makes them, a body carries them out.

A program is a list of steps that every rank goes through in order, taking part in those of which
it is a member. Ranks are those of the job; values and groups are numbered through the program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.arrays import Array

Members = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Ranks of the job, in the order of the group; number 0 is all of them."""

    number: int
    members: Members

    def __str__(self) -> str:
        return f"group {self.number} {list(self.members)}"


@dataclass
class Call:
    """A collective.

    Attributes:
        inputs, expected: of each member, by rank of the job; None where there is none.
        options: keywords of the call.
        counts: positional argument of a ragged collective, by rank.
        out: "new", "given", "strided", "in place" (the input), "own chunk" (of the whole).
        source: the value that the inputs are, if they are results of an earlier call.
        value: number of the result.
        started: with ``async_op``.
    """

    kind: str
    group: Group
    inputs: dict[int, Any]
    expected: dict[int, Array | None]
    options: dict[str, Any]
    counts: dict[int, list[int]] = field(default_factory=dict)
    out: str = "new"
    source: int | None = None
    value: int = -1
    started: bool = False

    @property
    def members(self) -> Members:
        return self.group.members

    def __str__(self) -> str:
        given = [a for a in self.inputs.values() if a is not None]
        shapes = list(dict.fromkeys(a.shape for a in given))
        words = [f"v{self.value} = {self.kind} in {self.group}"]
        if given:
            words.append(f"of {given[0].dtype} {', '.join(map(str, shapes))}")
        words += [f"{name}={value}" for name, value in self.options.items()]
        words += [f"counts {self.counts}"] if self.counts else []
        words += [f"from v{self.source}"] if self.source is not None else []
        words += [f"out {self.out}"] if self.out != "new" else []
        return " ".join([*words, "(started)"] if self.started else words)


@dataclass
class Batch:
    """Calls that are coalesced."""

    group: Group
    calls: list[Call]
    started: bool

    @property
    def members(self) -> Members:
        return self.group.members

    def __str__(self) -> str:
        lines = "".join(f"\n      {call}" for call in self.calls)
        return f"coalesced in {self.group}{' (started)' if self.started else ''}{lines}"


@dataclass
class Many:
    """``all_reduce_many``; each of ``calls`` is one array of the list."""

    group: Group
    calls: list[Call]
    bucket_bytes: int
    op: str

    @property
    def members(self) -> Members:
        return self.group.members

    def __str__(self) -> str:
        lines = "".join(f"\n      {call}" for call in self.calls)
        return f"all_reduce_many in {self.group}, buckets of {self.bucket_bytes}{lines}"


@dataclass
class Beside:
    """Calls of two groups, on two threads of each rank that is in both."""

    sides: tuple[list[Call], list[Call]]

    @property
    def members(self) -> Members:
        return tuple({rank for side in self.sides for call in side for rank in call.members})

    def __str__(self) -> str:
        sides = [
            f"\n      thread {n}: {call}" for n, side in enumerate(self.sides) for call in side
        ]
        return f"beside each other{''.join(sides)}"


@dataclass(frozen=True, eq=False)
class Message:
    """A message; ``src`` and ``dst`` are ranks of the group."""

    number: int
    group: Group
    src: int
    dst: int
    tag: int
    array: Array
    sender_first: bool

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What it is matched by."""
        return self.group.number, self.src, self.dst, self.tag


@dataclass(frozen=True)
class Half:
    """One side of a message: its sender's or its receiver's call."""

    message: Message
    sends: bool
    blocks: bool

    @property
    def members(self) -> Members:
        message = self.message
        return (message.group.members[message.src if self.sends else message.dst],)

    def __str__(self) -> str:
        m = self.message
        verb = {(1, 1): "send", (1, 0): "isend", (0, 1): "recv", (0, 0): "irecv"}
        return (
            f"message {m.number}: {verb[self.sends, self.blocks]} {m.src}->{m.dst} in {m.group}, "
            f"tag {m.tag}, {m.array.dtype} {m.array.shape}"
        )


@dataclass(frozen=True)
class Sub:
    """``sub``; ``ranks`` are those of the parent."""

    parent: Group
    ranks: Members
    made: Group

    @property
    def members(self) -> Members:
        return self.made.members

    def __str__(self) -> str:
        return f"{self.made} = sub {list(self.ranks)} of {self.parent}"


@dataclass(frozen=True)
class Split:
    """``split``; one color and key for each rank of the parent."""

    parent: Group
    colors: tuple[int | None, ...]
    keys: tuple[int, ...]
    made: tuple[Group, ...]

    @property
    def members(self) -> Members:
        return self.parent.members

    def __str__(self) -> str:
        made = ", ".join(map(str, self.made))
        return f"{made or 'nothing'} = split {self.parent}, colors {self.colors} keys {self.keys}"


@dataclass(frozen=True)
class MakeMesh:
    """``Mesh``; the groups along each choice of axes."""

    parent: Group
    axes: dict[str, int]
    made: tuple[tuple[tuple[str, ...], Group], ...]

    @property
    def members(self) -> Members:
        return self.parent.members

    def __str__(self) -> str:
        made = ", ".join(f"{'+'.join(axes)}: {group}" for axes, group in self.made)
        return f"{made} = mesh {self.axes} of {self.parent}"


@dataclass(frozen=True)
class Close:
    """A group is closed."""

    group: Group

    @property
    def members(self) -> Members:
        return self.group.members

    def __str__(self) -> str:
        return f"close {self.group}"


@dataclass(frozen=True)
class Wait:
    """Every rank waits for some of what it has started, each for its own choice."""

    members: Members
    share: float

    def __str__(self) -> str:
        return f"wait for {self.share:.0%} of what was started"


Step = Call | Batch | Many | Beside | Half | Sub | Split | MakeMesh | Close | Wait


@dataclass
class Program:
    """Steps for ``size`` ranks, made from a seed."""

    seed: int
    size: int
    steps: list[Step]

    def __str__(self) -> str:
        lines = [f"  {number:3} {step}" for number, step in enumerate(self.steps)]
        return "\n".join([f"seed {self.seed} on {self.size} ranks:", *lines])
