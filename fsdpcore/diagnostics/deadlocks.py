"""Why an operation has timed out: who has not come, what they do instead, and the likely cause.

The rank whose deadline has passed asks the others and follows what they say: a missing rank may
itself wait for another one, which waits for a third. Such a chain ends at the culprit, or it comes
back to where it began: then the ranks call their operations in different orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from fsdpcore.core.text import name_ranks, rank_list
from fsdpcore.core.wildcard import ANY_NUMBER
from fsdpcore.diagnostics.status import (
    WORLD_CHANNEL,
    Group,
    OpenOperation,
    Status,
    ordinal,
)

# Asks ranks how far they are on a channel; those that do not answer are left out.
Ask = Callable[[Iterable[int], int], Mapping[int, Status]]

SLOW = "; every rank has begun it: the data is slow, raise the timeout"
_SILENT = (
    "no answer; gone, short of processor time, or busy in code that does not let other threads run"
)
_MAX_STEPS = 8
_MAX_FOLLOWED = 3
_MAX_CHARACTERS = 350
MAX_SHOWN = 8
"""Of the ranks that are missing, or that may send a message which any of them may."""
_CYCLE = (
    "the ranks call these operations in different orders; call them in the same order on all "
    "ranks, or start them with async_op=True (isend, irecv)"
)


def missing(me: int, group: Group, sequence: int, ask: Ask) -> str:
    """Say which ranks have not begun a collective, and why.

    Args:
        me: the rank that has waited for it, in the whole job.
        group: whose collective it is.
        sequence: its number.
        ask: gets the status of ranks, of ``me`` too.

    Returns:
        The rest of a message that begins with the operation, starting with its punctuation.
    """
    ranks = [rank for rank in group.ranks if rank != me]
    chains = _Chains(me, ask)
    known = chains.ask(ranks, group.channel)
    late = [rank for rank in ranks if rank not in known or known[rank].entered < sequence]
    if not late:
        return SLOW
    said, more = _said(late, known)
    lines = [f"  {name_ranks(ranks)} {_are(ranks)} missing: {text}" for text, ranks in said]
    if more:
        lines.append(f"  and so {_are(more)} {name_ranks(more)}")
    causes = [
        chains.other_group(rank, group) or chains.follow(rank) for rank in late[:_MAX_FOLLOWED]
    ]
    return "\n".join([":", *lines, *_listed(causes)])


def unmatched(me: int, peers: Sequence[int], channel: int, ask: Ask) -> str:
    """Say what the ranks do that a message which has timed out may be from or to; see ``missing``.

    Args:
        me: the rank that has waited for it, in the whole job.
        peers: the one rank at its other end, or all that may be.
        channel: of its group.
        ask: as of ``missing``.
    """
    peers = [peer for peer in peers if peer != me]
    if not peers:
        return f": nobody but rank {me} itself can send it"
    chains = _Chains(me, ask)
    known = chains.ask(peers, channel)
    said, more = _said(peers, known)
    lines = [f"  {name_ranks(ranks)}: {text}" for text, ranks in said]
    if more:
        lines.append(f"  and {len(more)} more rank{'s' * (len(more) > 1)}")
    causes = []
    if not any(chains.meet(me, peer) for peer in peers) and chains.all_wait(peers):
        causes = [chains.follow(peer) for peer in peers[:_MAX_FOLLOWED]]
    return "\n".join([":", *lines, *_listed(causes)])


def _said(
    ranks: Sequence[int], known: Mapping[int, Status]
) -> tuple[list[tuple[str, list[int]]], list[int]]:
    """Return what ranks do, those together that do the same; and the ranks that are too many."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(_text(known, rank), []).append(rank)
    said = list(groups.items())
    if len(ranks) > MAX_SHOWN:
        ends = itertools.accumulate(map(len, groups))
        said = said[: max(1, sum(end <= _MAX_CHARACTERS for end in ends))][:MAX_SHOWN]
    told = {rank for _, together in said for rank in together}
    return said, [rank for rank in ranks if rank not in told]


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _text(known: Mapping[int, Status], rank: int) -> str:
    return known[rank].text if rank in known else _SILENT


def _listed(causes: Sequence[str]) -> list[str]:
    return [f"  likely cause: {cause}" for cause in dict.fromkeys(causes) if cause]


def _other_group(rank: int, wait: OpenOperation, group: Group, both: bool) -> str:
    """Whether a rank is in a collective of another group that was meant to be this one.

    Args:
        rank: who is in the collective.
        wait: that collective.
        group: whose collective is waited for.
        both: this rank and that one are members of both groups, so that the groups may just as
            well be used in different orders.
    """
    other = wait.group
    if not wait.sequence or WORLD_CHANNEL in (group.channel, other.channel):
        return ""
    if other.channel == group.channel or set(other.ranks) != set(group.ranks):
        return ""
    if other.on_device != group.on_device:  # it may well be the same group, by another way
        return ""
    how = ""
    if other.ranks != group.ranks and not both:
        how = (
            f"{rank_list(other.ranks)} there and {rank_list(group.ranks)} here: give sub() the "
            "ranks in the same order everywhere"
        )
    elif other.name != group.name and not both:
        how = f"named {other.name!r} there and {group.name!r} here: give both the same name"
    elif (other.ranks, other.name) == (group.ranks, group.name):
        there, here = ordinal(other.position + 1), ordinal(group.position + 1)
        if there != here:
            how = (
                f"the {there} made there and the {here} made here: each rank tells such groups "
                "apart by the order in which it makes them; make them, and call their "
                "collectives, in the same order on all ranks"
            )
    return f"rank {rank} is in another group of the same ranks, {how}" if how else ""


class _Chains:
    """Follows who waits for whom, and remembers what the ranks have answered."""

    def __init__(self, me: int, ask: Ask) -> None:
        self._me = me
        self._ask = ask
        self._known: dict[int, Status] = {}
        self._silent: set[int] = set()

    def ask(self, ranks: Iterable[int], channel: int) -> Mapping[int, Status]:
        """Ask those that have answered so far; each of the others costs a while."""
        asked = [rank for rank in ranks if rank not in self._silent]
        answers = self._ask(asked, channel)
        self._known.update(answers)
        self._silent.update(rank for rank in asked if rank not in answers)
        return answers

    def other_group(self, rank: int, group: Group) -> str:
        """Whether ``rank`` is in a group that was meant to be ``group``, in words."""
        status = self._status(rank)
        for wait in status.waits:
            own = self._ask([self._me], wait.channel)[self._me]
            words = _other_group(rank, wait, group, status.member and own.member)
            if words:
                return words
        return ""

    def follow(self, rank: int) -> str:
        """Say where the chain that begins with ``rank`` ends; empty if it waits for nobody."""
        links: list[tuple[int, OpenOperation, int]] = []
        while len(links) < _MAX_STEPS:
            step = self._step(rank)
            if step is None:
                break
            wait, following = step
            links.append((rank, wait, following))
            if following == self._me:
                return (
                    f"rank {self._me} waits here for rank {links[0][0]}, {_told(links)}: {_CYCLE}"
                )
            if any(following == before for before, _, _ in links):
                return f"{_told(links)}: among these, {_CYCLE}"
            rank = following
        if not links:
            return ""
        return f"{_told(links)}; rank {rank}: {_text(self._known, rank)}"

    def _step(self, rank: int) -> tuple[OpenOperation, int] | None:
        """The operation that keeps ``rank``, and who has not come to it; best this one."""
        status = self._known.get(rank)
        for wait in status.waits if status is not None else ():
            late = self._late(rank, wait)
            if late:
                return wait, self._me if self._me in late else late[0]
        return None

    def _late(self, rank: int, wait: OpenOperation) -> list[int]:
        """Who has not come to an operation that ``rank`` is in."""
        if wait.open:
            return self._senders(rank, wait)
        if wait.peer >= 0:
            self.ask([wait.peer], wait.channel)
            return [] if self.meet(rank, wait.peer) else [wait.peer]
        others = [other for other in wait.ranks if other != rank]
        known = self.ask(others, wait.channel)
        return [r for r in others if r not in known or known[r].entered < wait.sequence]

    def _senders(self, rank: int, wait: OpenOperation) -> list[int]:
        """Who could send what ``rank`` waits for from any rank; nobody if one of them still may."""
        others = [other for other in wait.ranks if other != rank]
        self.ask([other for other in others if other not in self._known], wait.channel)
        meets = any(self.meet(rank, other) for other in others)
        return others if self.all_wait(others) and not meets else []

    def all_wait(self, ranks: Sequence[int]) -> bool:
        """Whether each of these ranks waits for something; of one alone, ``follow`` says it."""
        waiting = (rank == self._me or self._status(rank).waits for rank in ranks)
        return not ranks[1:] or all(waiting)

    def meet(self, one: int, other: int) -> bool:
        """Whether two ranks are at the two ends of one message."""
        ends = [
            [wait for wait in self._status(rank).waits if wait.peer == peer or wait.open]
            for rank, peer in ((one, other), (other, one))
        ]
        return any(
            a.channel == b.channel
            and (a.tag == b.tag or ANY_NUMBER in (a.tag, b.tag))
            and (a.op == "send") != (b.op == "send")
            for a in ends[0]
            for b in ends[1]
        )

    def _status(self, rank: int) -> Status:
        if rank == self._me and rank not in self._known:
            self.ask([rank], WORLD_CHANNEL)
        return self._known.get(rank, Status("", 0))


def _told(links: Sequence[tuple[int, OpenOperation, int]]) -> str:
    return ", ".join(f"rank {r} waits in {wait.text} for rank {late}" for r, wait, late in links)
