"""The suite must fail on a broken transport: here are many, and for each a body that notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from fsdpcore.transports.simulated.backend import SimBackend
from support import oracle, sabotage
from support.arrays import arrays_of, check_same
from support.bodies import (
    agreement,
    endings,
    groups,
    movement,
    point_to_point,
    reductions,
    wildcards,
)
from support.spmd import RanksFailed, run_on

import fsdpcore as fc

# Where messages are lost, they wait.
pytestmark = pytest.mark.side_by_side(8)


class Case(NamedTuple):
    """A broken transport, the body that must fail on it, and a word from how it does."""

    broken: type[SimBackend]
    body: Callable[..., Any]
    reason: str
    args: tuple[Any, ...] = ()
    ranks: int = 3


CASES = [
    Case(sabotage.DropsLastByte, reductions.every_shape, "differ"),
    Case(sabotage.DropsLastByte, point_to_point.every_kind_of_array, "differ"),
    Case(sabotage.CorruptsLongMessages, movement.large_arrays, "differ", (300_000,)),
    Case(sabotage.CorruptsLongMessages, point_to_point.every_kind_of_array, "differ"),
    Case(sabotage.ReversesBytes, point_to_point.every_kind_of_array, "differ"),
    Case(sabotage.SwapsMessages, point_to_point.one_tag_keeps_order, "differ"),
    Case(sabotage.ConfusesTags, point_to_point.tags_in_any_order, "MismatchError"),
    Case(sabotage.MixesGroups, groups.equal_members_do_not_mix, "Error"),
    Case(
        sabotage.MixesMessagesAndCollectives,
        groups.messages_and_collectives_do_not_mix,
        "MismatchError",
    ),
    Case(
        sabotage.ChecksNoSignatures,
        point_to_point.mismatched_message,
        "was not raised",
        ("same bytes",),
    ),
    Case(sabotage.SharesTheSendersArray, point_to_point.sender_reuses_its_array, "differ"),
    Case(sabotage.LosesEveryFifth, point_to_point.many_outstanding, "CommTimeoutError"),
    Case(sabotage.LosesEveryFifth, movement.barriers, "CommTimeoutError"),
    Case(sabotage.RepeatsEverySeventh, point_to_point.one_tag_keeps_order, "Error"),
    Case(sabotage.RepeatsEverySeventh, movement.every_shape, "Error"),
    Case(sabotage.ReceivesTooEarly, point_to_point.waiting_for_work, "AssertionError"),
    Case(sabotage.IgnoresTimeouts, point_to_point.timeout_leaves_all_well, "not finished", (3,)),
    Case(sabotage.ReceivesAfterTimeout, point_to_point.timeout_leaves_all_well, "timed out", (3,)),
    Case(sabotage.ForgetsThatItIsBroken, agreement.difference, "Error", ("shape",)),
    Case(sabotage.ForgetsThatItIsBroken, endings.after_close, "Error"),
    Case(sabotage.LetsMessagesOvertake, wildcards.older_message_first, "AssertionError"),
    Case(sabotage.WritesBehindTheEnd, wildcards.from_any_rank, "written behind its end"),
    Case(sabotage.WaitsForNobody, wildcards.left_alone, "CommTimeoutError", ("recv",)),
    Case(sabotage.LeavesWithoutAWord, endings.early_leaver, "CommTimeoutError", ("recv",)),
    Case(sabotage.AbortsAlone, endings.aborted, "CommTimeoutError", ("all_reduce",)),
    Case(sabotage.HidesTheReason, endings.aborted, "is not in", ("recv",)),
    Case(sabotage.BlamesTheWrongRank, endings.aborted, "is not in", ("recv",)),
    Case(sabotage.KnowsNothingOfOthers, endings.skipped_collective, "is not in"),
]


def _name(case: Case) -> str:
    return f"{case.broken.__name__}-{case.body.__name__}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_broken_transport_fails(case: Case) -> None:
    with pytest.raises(RanksFailed, match=case.reason):
        _run(case, case.broken)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_sound_transport_passes(case: Case) -> None:
    _run(case, SimBackend)


def _ring(backend: fc.Backend) -> None:
    parts = arrays_of(backend.world_size, (1000,))
    result = fc.all_reduce(parts[backend.rank], backend, algorithm="ring")
    check_same(result, oracle.reduced(parts, "sum"), "ring")


def test_another_order_of_summation_fails() -> None:
    with pytest.raises(RanksFailed, match="elements differ"):
        run_on(SimBackend, _ring, world_size=8)


def _run(case: Case, transport: type[SimBackend]) -> None:
    sound = transport is SimBackend
    limits: dict[str, object] = {"op_timeout": 60.0 if sound else 2.0}
    limits["timeout"] = 180.0 if sound else 20.0
    limits["shm"] = "off"  # the harness is to see what messages do
    if transport is sabotage.IgnoresTimeouts:
        limits["timeout"] = 3.0
    run_on(transport, case.body, world_size=case.ranks, args=case.args, **limits)
