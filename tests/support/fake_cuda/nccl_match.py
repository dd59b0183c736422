"""How calls of NCCL of several ranks find each other, and what they do then.

A *clique* is what the communicators of one unique id are together. What a rank calls on it becomes
*launches*: a call of its own, or all calls of a group. A launch begins when its stream has come to
it and the launch before it, on whatever stream, has ended. Then its calls are posted. A collective
happens when the same call in the order of calls is posted on every rank; a send happens when the
receive is posted that is as many-th between the two ranks. What does not fit never happens.

The root of a broadcast waits for nobody: its part has ended when it is posted. The others take the
array from a copy that is the root's, and goes with its communicator.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from support.fake_cuda.errors import NcclError, SwitchedOff
from support.fake_cuda.nccl_moves import (
    BROADCASTS,
    MOVES,
    Host,
    broadcast_at_root,
    transfer,
)

if TYPE_CHECKING:
    from support.fake_cuda.machine import Machine


@dataclass(eq=False)
class Call:
    """One call of one rank.

    Attributes:
        signature: what must be the same on all ranks.
        peer: of a send or a receive.
        index: in the order of the rank's collectives.
        send: what it reads. receive: what it writes.
    """

    name: str
    rank: int
    signature: tuple[Any, ...]
    send: Host | None
    receive: Host | None
    op: int = 0
    root: int = 0
    peer: int = -1
    index: int = -1
    done: bool = False

    @property
    def is_p2p(self) -> bool:
        return self.peer >= 0


@dataclass(eq=False)
class Member:
    """A rank of a clique."""

    rank: int
    device: int
    gone: bool = False
    async_error: int = 0
    issued: int = 0
    finished: int = 0
    collectives: int = 0
    splits: int = 0


@dataclass
class _Split:
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)
    made: dict[int, tuple[Clique, int]] = field(default_factory=dict)


class Clique:
    """The ranks of one communicator."""

    def __init__(self, machine: Machine, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.changed = threading.Condition()
        self.members: dict[int, Member] = {}
        self._machine = machine
        self._collectives: dict[int, dict[int, Call]] = {}
        self._sends: dict[tuple[int, int], deque[Call]] = {}
        self._receives: dict[tuple[int, int], deque[Call]] = {}
        self._splits: dict[int, _Split] = {}

    def join(self, rank: int, device: int, size: int) -> Member:
        """Come in, and wait for the others; raises ``NcclError`` if they cannot be a clique."""
        with self.changed:
            if rank in self.members or size != self.size or not 0 <= rank < size:
                raise NcclError(4)
            member = self.members[rank] = Member(rank, device)
            self.changed.notify_all()
            self._wait(lambda: len(self.members) == self.size, f"rank {rank} makes a communicator")
        faults = self._machine.faults
        gpus = {faults.uuids[other.device] for other in self.members.values()}
        if len(gpus) < self.size and not faults.shared_gpu:
            raise NcclError(5)
        return member

    def _wait(self, what: Callable[[], bool], who: str) -> None:
        self.changed.wait_for(lambda: what() or self._machine.closing)
        if not what():
            raise SwitchedOff(who)

    def execute(self, member: Member, number: int, calls: list[Call]) -> None:
        """Do the launch of a rank; called by the thread of its stream."""
        with self.changed:
            self._wait(lambda: member.gone or member.finished == number, "a launch")
            if not member.gone:
                for call in calls:
                    self._post(call)
                self._wait(lambda: member.gone or all(call.done for call in calls), "a call")
            for call in calls:
                if not call.done:
                    self._withdraw(call)
            member.finished = max(member.finished, number + 1)
            self.changed.notify_all()

    def leave(self, member: Member) -> None:
        """Abort: whatever of the rank is under way ends, and has done anything or nothing."""
        with self.changed:
            self._vanish(member)

    def drain(self, member: Member) -> None:
        """Wait for all launches of the rank."""
        with self.changed:
            self._wait(lambda: member.gone or member.finished == member.issued, "destroy")
            self._vanish(member)

    def _vanish(self, member: Member) -> None:
        member.gone = True
        for posted in self._collectives.values():
            posted.pop(member.rank, None)
        self.changed.notify_all()

    def wake(self) -> None:
        """Let everybody look again."""
        with self.changed:
            self.changed.notify_all()

    def _post(self, call: Call) -> None:
        if call.is_p2p:
            self._post_p2p(call)
            return
        posted = self._collectives.setdefault(call.index, {})
        posted[call.rank] = call
        if call.name in BROADCASTS and call.rank == call.root:
            broadcast_at_root(call)
            self._finish(call)
        if len(posted) < self.size:
            return
        calls = [posted[rank] for rank in range(self.size)]
        if len({other.signature for other in calls}) > 1:
            said = "; ".join(f"rank {c.rank}: {c.signature}" for c in calls)
            self._machine.mismatches.append(f"call {call.index} of clique {self.number}: {said}")
            return
        del self._collectives[call.index]
        MOVES[call.name](calls)
        self._finish(*calls)

    def _post_p2p(self, call: Call) -> None:
        sends = call.name == "send"
        pair = (call.rank, call.peer) if sends else (call.peer, call.rank)
        (self._sends if sends else self._receives).setdefault(pair, deque()).append(call)
        if not self._sends.get(pair) or not self._receives.get(pair):
            return
        send, receive = self._sends[pair].popleft(), self._receives[pair].popleft()
        if send.signature != receive.signature:
            said = f"{send.signature} is received as {receive.signature}"
            self._machine.mismatches.append(f"{pair} of clique {self.number}: {said}")
            return
        transfer(send, receive)
        self._finish(send, receive)

    def _finish(self, *calls: Call) -> None:
        for call in calls:
            call.done = True
        self.changed.notify_all()

    def _withdraw(self, call: Call) -> None:
        for waiting in (self._sends, self._receives):
            for calls in waiting.values():
                if call in calls:
                    calls.remove(call)
        if call.receive is not None:
            call.receive.view("u1").fill(0xFF)

    def split(self, member: Member, color: int, key: int) -> tuple[Clique, int] | None:
        """Wait until all ranks split, and return the clique of a color and the rank in it."""
        with self.changed:
            number = member.splits
            member.splits += 1
            split = self._splits.setdefault(number, _Split())
            split.answers[member.rank] = (color, key)
            if len(split.answers) == self.size:
                self._divide(split)
                self.changed.notify_all()
            full = lambda: len(split.answers) == self.size  # noqa: E731
            self._wait(lambda: member.gone or full(), "commSplit")
            if not full():
                raise NcclError(3)
            return split.made.get(member.rank)

    def _divide(self, split: _Split) -> None:
        for color in sorted({c for c, _ in split.answers.values() if c >= 0}):
            ranks = [rank for rank, (c, _) in split.answers.items() if c == color]
            ranks.sort(key=lambda rank: (split.answers[rank][1], rank))
            clique = self._machine.cliques.new(len(ranks))
            for new, old in enumerate(ranks):
                clique.members[new] = Member(new, self.members[old].device)
                split.made[old] = (clique, new)


class Cliques:
    """All of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._by_id: dict[bytes, Clique] = {}
        self._all: list[Clique] = []
        self._launched: dict[int, list[int]] = {}

    def named(self, unique_id: bytes, size: int) -> Clique:
        """The clique of a unique id."""
        with self._lock:
            found = self._by_id.get(unique_id)
        if found is None:
            made = self.new(size)
            with self._lock:
                found = self._by_id.setdefault(unique_id, made)
        return found

    def new(self, size: int) -> Clique:
        """A new one."""
        with self._lock:
            made = Clique(self._machine, next(self._numbers), size)
            self._all.append(made)
        return made

    def launched(self, clique: Clique, device: int) -> None:
        """Note that a GPU was given collectives of a clique."""
        with self._lock:
            self._launched.setdefault(device, []).append(clique.number)

    def crossed(self) -> list[str]:
        """Pairs of GPUs that were given collectives of the same cliques in different orders.

        On different streams they can wait for each other for ever, as a GPU that runs one need not
        have room for another.
        """
        with self._lock:
            places = [{m.device for m in clique.members.values()} for clique in self._all]
            found = []
            for a, b in itertools.combinations(sorted(self._launched), 2):
                common = {n for n, devices in enumerate(places) if {a, b} <= devices}
                orders = [[n for n in self._launched[d] if n in common] for d in (a, b)]
                if any(one != other for one, other in zip(*orders, strict=False)):
                    found.append(f"GPU {a}: {orders[0]}, GPU {b}: {orders[1]}")
            return found

    def wake(self) -> None:
        """Let everybody look again."""
        with self._lock:
            every = list(self._all)
        for clique in every:
            clique.wake()
