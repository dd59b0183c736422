"""What went wrong, read from the flight recorders of all ranks: who stopped where."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.text import name_ranks
from fsdpcore.diagnostics.status import WORLD_CHANNEL, Group
from fsdpcore.diagnostics.trace_file import TracedOperation, TraceDump, file_name

# An operation that was running for less than this when the file was written may just be slow.
_SLOW_SECONDS = 1.0
_MAX_ORDERS = 10

_SHOWN = 8  # findings of one kind


@dataclass(frozen=True)
class Finding:
    """One thing to tell; ``wrong`` unless it is only worth knowing."""

    text: str
    wrong: bool = True

    def __str__(self) -> str:
        return self.text


def findings(dumps: Sequence[TraceDump]) -> list[Finding]:
    """Say which ranks have left no file, which rank stopped where, and whose orders differ."""
    stuck = _stuck(dumps)
    found = [*_absent(dumps), *_failures(dumps), *_collectives(dumps, stuck)]
    found += [*_messages(stuck), *_cycles(dumps, stuck), *_orders(dumps)]
    return found


def _absent(dumps: Sequence[TraceDump]) -> Iterator[Finding]:
    missing = sorted(set(range(dumps[0].world_size)) - {dump.rank for dump in dumps})
    if missing:
        names = ", ".join(file_name(rank) for rank in missing[:4]) + ", ..." * (len(missing) > 4)
        yield Finding(
            f"{name_ranks(missing)}: no file ({names}): killed before it could write one, or it "
            "wrote to another host's directory"
        )
    latest = max(dump.started for dump in dumps)
    older = [dump for dump in dumps if dump.written < latest]
    for dump in older[:_SHOWN]:
        yield Finding(
            f"rank {dump.rank}: its file is older than the job of the other ranks (written "
            f"{_clock(dump.written)}, they started at {_clock(latest)}): from another run"
        )
    if more := [dump.rank for dump in older[_SHOWN:]]:
        yield Finding(f"{name_ranks(more)}: older files, too")


def _failures(dumps: Sequence[TraceDump]) -> Iterator[Finding]:
    """Every rank's first cause in one line; ranks that say the same together."""
    said: dict[str, list[int]] = {}
    for dump in dumps:
        if dump.failure:
            said.setdefault(_one_line(dump.failure), []).append(dump.rank)
    for text, ranks in said.items():
        yield Finding(f"{name_ranks(ranks)} failed: {text}")


def _stuck(dumps: Sequence[TraceDump]) -> dict[int, list[TracedOperation]]:
    """The operations that each rank did not get out of."""
    return {dump.rank: [op for op in dump.operations if _is_stuck(dump, op)] for dump in dumps}


def _is_stuck(dump: TraceDump, op: TracedOperation) -> bool:
    if op.state == "done":
        return False
    if not op.collective:
        # A message may be posted long before it is needed, and a receive may be tried in vain.
        last = bool(dump.failure) or op is dump.operations[-1]
        return op.state != "started" and last
    if op.state != "started":
        return True
    return bool(dump.failure) or dump.written - op.start > _SLOW_SECONDS


def _collectives(
    dumps: Sequence[TraceDump], stuck: dict[int, list[TracedOperation]]
) -> Iterator[Finding]:
    by_rank = {dump.rank: dump for dump in dumps}
    waiting: dict[tuple[int, int], list[tuple[int, TracedOperation]]] = {}
    for rank, operations in stuck.items():
        for op in operations:
            if op.collective:
                waiting.setdefault(op.key, []).append((rank, op))
    for key, waiters in sorted(waiting.items(), key=lambda item: item[1][0][1].start):
        op = min((op for _, op in waiters), key=lambda op: op.start)
        late = [rank for rank in op.group.ranks if _is_late(by_rank.get(rank), key, op)]
        known = [rank for rank in late if rank in by_rank]
        if known:
            for rank in known[:_SHOWN]:
                yield Finding(_never_began(by_rank[rank], waiters, op, stuck[rank]))
            if more := known[_SHOWN:]:
                yield Finding(f"{name_ranks(more)} never began {op} either")
        elif not late and all(by_rank[rank].failure for rank, _ in waiters):
            early = [r for r in op.group.ranks if by_rank[r].entered.get(key[0], 0) < key[1]]
            yield Finding(_too_early(waiters, op, early) if early else _all_began(waiters, op))
        elif late:
            who = name_ranks([rank for rank, _ in waiters])
            yield Finding(f"{who} stopped in {op}; {name_ranks(late)} left no file that says more")


def _is_late(dump: TraceDump | None, key: tuple[int, int], op: TracedOperation) -> bool:
    """Whether a rank had not begun a collective that others have waited in."""
    if dump is None:
        return True
    channel, sequence = key
    if dump.entered.get(channel, 0) >= sequence:
        return False
    # A file written on request may simply be older than the collective.
    return bool(dump.failure) or dump.closed or dump.written > op.start + _SLOW_SECONDS


def _never_began(
    dump: TraceDump,
    waiters: Sequence[tuple[int, TracedOperation]],
    op: TracedOperation,
    stuck: Sequence[TracedOperation],
) -> str:
    ranks = [rank for rank, _ in waiters]
    # Who has returned may hear, while it takes its leave, that the others have failed of that.
    if dump.returned or (dump.closed and not dump.failure):
        how = f"returned from {dump.returned}" if dump.returned else "left the job"
        called = dump.entered.get(op.group.channel, 0)
        calls = f"{called} collective{'' if called == 1 else 's'} of {op.group}"
        return (
            f"rank {dump.rank} {how} after {calls} and never began {op}, in which "
            f"{name_ranks(ranks)} waited since {_clock(op.start)}"
        )
    verb = "waits" if len(ranks) == 1 else "wait"
    text = f"rank {dump.rank} never began {op} ({name_ranks(ranks)} {verb} in it since "
    text += f"{_clock(op.start)}); {_last_words(dump, op.start, stuck)}"
    other = _twin(dump, op.group)
    if op.group.channel not in dump.groups and other is not None:
        text += (
            f"; it has no such group, but {other}: such groups have to be made in the same order "
            "and with the same names on all ranks"
        )
    return text


def _twin(dump: TraceDump, group: Group) -> Group | None:
    """A group of the same ranks that is another one."""
    members = set(group.ranks)
    for other in dump.groups.values():
        if other.channel not in (WORLD_CHANNEL, group.channel) and set(other.ranks) == members:
            return other
    return None


def _last_words(dump: TraceDump, since: float, stuck: Sequence[TracedOperation]) -> str:
    if stuck:
        first = stuck[0]
        return f"it stopped in {first} itself, begun at {_clock(first.start)}"
    ended = [op for op in dump.operations if op.end is not None]
    if not ended:
        return "it has begun no operation at all"
    last = max(ended, key=lambda op: op.end or 0.0)
    assert last.end is not None
    return f"its last operation was {last}, ended at {_clock(last.end)} ({_apart(last.end, since)})"


def _apart(moment: float, other: float) -> str:
    seconds = other - moment
    return f"{abs(seconds):.1f} s {'before' if seconds >= 0 else 'after'}"


def _too_early(
    waiters: Sequence[tuple[int, TracedOperation]], op: TracedOperation, early: Sequence[int]
) -> str:
    files = "the file was" if len(early) == 1 else "the files were"
    return (
        f"{name_ranks([rank for rank, _ in waiters])} stopped in {op}; whether "
        f"{name_ranks(early)} began it is not known: {files} written too early"
    )


def _all_began(waiters: Sequence[tuple[int, TracedOperation]], op: TracedOperation) -> str:
    ranks = [rank for rank, _ in waiters]
    why = next((_one_line(op.error) for _, op in waiters if op.error), "")
    calls = sorted({str(called) for _, called in waiters})
    where = f"in {op}, which every rank had begun"
    if len(calls) > 1:
        where = f"where they called different things ({'; '.join(calls)})"
    return f"{name_ranks(ranks)} stopped {where}" + f": {why}" * bool(why)


def _messages(stuck: dict[int, list[TracedOperation]]) -> Iterator[Finding]:
    for rank, operations in stuck.items():
        for op in operations:
            if not op.collective:
                why = _one_line(op.error)
                yield Finding(f"rank {rank} stopped in {op}, begun at {_clock(op.start)}: {why}")


def _cycles(
    dumps: Sequence[TraceDump], stuck: dict[int, list[TracedOperation]]
) -> Iterator[Finding]:
    """Ranks that wait for each other, each in an operation that the next has not begun."""
    waits = _waits(dumps, stuck)
    done: set[int] = set()
    for first in waits:
        path: list[int] = []
        rank = first
        while rank in waits and rank not in path and rank not in done:
            path.append(rank)
            rank = waits[rank][0]
        if rank in path:
            links = path[path.index(rank) :]
            few = [f"rank {r} in {waits[r][1]} for rank {waits[r][0]}" for r in links[:_SHOWN]]
            told = ", ".join(few) + ", ..." * (len(links) > _SHOWN)
            yield Finding(
                f"{name_ranks(sorted(links))} wait for each other: {told}; they call these "
                "operations in different orders"
            )
        done.update(path)


def _waits(
    dumps: Sequence[TraceDump], stuck: dict[int, list[TracedOperation]]
) -> dict[int, tuple[int, TracedOperation]]:
    """For each rank, one that it waits for, and the operation."""
    by_rank = {dump.rank: dump for dump in dumps}
    waits: dict[int, tuple[int, TracedOperation]] = {}
    for rank, operations in stuck.items():
        for op in operations:
            late = [op.peer] if op.peer >= 0 else []
            if op.collective:
                late = [r for r in op.group.ranks if _is_late(by_rank.get(r), op.key, op)]
            # One that is stuck as well leads on, where there is one.
            late.sort(key=lambda r: (not stuck.get(r), r))
            if late and rank not in waits:
                waits[rank] = (late[0], op)
    return waits


def _orders(dumps: Sequence[TraceDump]) -> Iterator[Finding]:
    """Ranks that did two collectives one after the other, but not in the same order.

    It went well, since they did not wait for all ranks, but with more data it may not.
    """
    told = 0
    for number, one in enumerate(dumps):
        for other in dumps[number + 1 :]:
            pair = _inverted(one, other)
            if pair is not None and told < _MAX_ORDERS:
                told += 1
                first, second = pair
                yield Finding(
                    f"rank {one.rank} did {first} before {second}, rank {other.rank} the other "
                    "way round: that can be a deadlock",
                    wrong=False,
                )


def _inverted(one: TraceDump, other: TraceDump) -> tuple[TracedOperation, TracedOperation] | None:
    theirs = {op.key: op for op in other.operations if op.collective and op.state == "done"}
    shared = [op for op in one.operations if op.key in theirs and op.state == "done"]
    if not shared or not other.operations:
        return None
    start, end = _times(shared)
    their_start, their_end = _times([theirs[op.key] for op in shared])
    wrong = (end[:, None] <= start[None, :]) & (their_end[None, :] <= their_start[:, None])
    found = np.argwhere(wrong)
    return (shared[found[0][0]], shared[found[0][1]]) if len(found) else None


def _times(operations: Sequence[TracedOperation]) -> tuple[NDArray[Any], NDArray[Any]]:
    start = np.array([op.start for op in operations])
    return start, np.array([op.end or np.inf for op in operations])


def _one_line(error: str) -> str:
    """An error in one line; of a timeout the first line only, since the rest is said here."""
    first, *more = error.split("\n")
    if "MismatchError" not in first:
        return first
    return " ".join([first, "; ".join(line.strip() for line in more)]).strip()


def _clock(moment: float) -> str:
    """Local time of day, to the millisecond."""
    whole = time.strftime("%H:%M:%S", time.localtime(moment))
    return f"{whole}.{int(moment % 1 * 1000):03d}"
