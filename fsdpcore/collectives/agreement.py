"""Ranks that call different things find out, though nothing is exchanged ahead of the data.

Ranks that call different things would hang or, worse, mix up each other's data. So every message
of a collective carries a *mark*: a digest of all that this rank has called in the group so far,
cut to the size of a tag. Messages with different marks never match. Nobody's array gets a byte of
another call, and who calls something else, or has before, waits.

Who has waited for a while asks the ranks that it waits for what they have called under the same
number (``CollectiveContext.look``). If that is something else, it asks all ranks of the group,
goes back to the first call in which they differ, and tells all. Every rank raises the same
``MismatchError``; one that has only sent, and has gone on, at its next call.

A rank does not run away from the others: they *meet* at least once in ``FREE_CALLS`` calls, so that
not more messages than those of so many calls wait at a rank that is late.

Ranks with a shared region compare their calls there, in the first step of each: see
``shared.region``. GPUs compare theirs as ``on_device`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from fsdpcore.comm.job import Job
from fsdpcore.core.disagreement import check_same
from fsdpcore.core.errors import MismatchError
from fsdpcore.diagnostics.status import CallAnswer, Group

FREE_CALLS = 64

# Seconds in a call after which a rank asks first; then after twice as many, and so on.
PATIENCE = 0.5
# How long a rank that has found a difference waits for those that have not come to the call.
_GRACE, _PAUSE = 1.0, 0.01

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15  # odd, so that no call is lost by being multiplied
_TAG_BITS = 31


def add_call(before: int, digest: int) -> int:
    """Return the digest of all calls up to one, from that of those before it and its own."""
    return (before * _MIX + digest + 1) & _MASK


def tag_of(history: int) -> int:
    """Return the mark of messages: the highest bits, on which all others have had their effect."""
    return history >> (64 - _TAG_BITS)


def differ(calls: Mapping[int, CallAnswer]) -> bool:
    """Whether ranks have called something else under one number, or before it."""
    return len({(each.before, each.digest) for each in calls.values()}) > 1


def refuse(job: Job, group: Group, sequence: int) -> NoReturn:
    """Raise the error of ranks that differ in a call, or before it, in words.

    Args:
        job, group: whose ranks they are.
        sequence: the number of the call.

    Raises:
        MismatchError: in the same words on every rank that raises it by itself.
        CommunicationError: the job was broken meanwhile, maybe because of the same.
    """
    calls = _calls_of_all(job, group, sequence)
    while len({each.before for each in calls.values()}) > 1:
        earlier = _calls(job, group, sequence - 1)
        if not differ(earlier):
            break
        calls, sequence = earlier, sequence - 1
    same_policy = len({each.policy for each in calls.values()}) == 1
    # The digest tells apart what the words, cut off, do not.
    said = [
        (each.digest, each.words if same_policy else f"{each.words}, {_chosen_by(each)}")
        for each in calls.values()
    ]
    check_same(
        [[call] for call in said],
        list(calls),
        lambda found: found.lines(f"collective #{sequence}"),
        words=lambda call: str(call[1]),
    )
    raise MismatchError(
        f"the collectives of {group} do not fit together: its ranks differ in #{sequence} or before"
    )


def _chosen_by(call: CallAnswer) -> str:
    return f"algorithms chosen by: {call.policy}"


def _calls_of_all(job: Job, group: Group, sequence: int) -> dict[int, CallAnswer]:
    """Get the calls of all ranks of a group; those that do not come to it soon are left out."""
    end = job.clock.now() + _GRACE
    while True:
        calls = _calls(job, group, sequence)
        if len(calls) == len(group.ranks) or job.clock.now() > end:
            return calls
        job.check_usable()
        job.clock.sleep(_PAUSE)


def _calls(job: Job, group: Group, sequence: int) -> dict[int, CallAnswer]:
    """Get the calls of a group's ranks, in its order."""
    calls = job.calls_of(group.ranks, group.channel, sequence)
    return {rank: calls[rank] for rank in group.ranks if rank in calls}
