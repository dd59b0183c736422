"""Messages, groups and started collectives, on every transport."""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import asynchronous, groups, point_to_point
from support.cases import bodies, jobs
from support.spmd import TRANSPORTS, run

pytestmark = pytest.mark.side_by_side("transport")


@jobs()
@bodies(
    point_to_point.every_kind_of_array,
    point_to_point.tags_in_any_order,
    point_to_point.one_tag_keeps_order,
    point_to_point.many_outstanding,
    point_to_point.sender_reuses_its_array,
    point_to_point.bad_arguments,
    point_to_point.waiting_for_work,
    point_to_point.several_threads,
)
def test_messages(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, 3)
@bodies(
    point_to_point.every_kind_of_array,
    point_to_point.tags_in_any_order,
    point_to_point.one_tag_keeps_order,
    point_to_point.many_outstanding,
)
def test_messages_the_long_way(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size, **TRANSPORTS[transport].tight)


@jobs(2, 3)
@pytest.mark.parametrize("size", [0, 3, 200_000])
def test_timeout_of_a_receive(size: int, transport: str, world_size: int) -> None:
    body = point_to_point.timeout_leaves_all_well
    run(body, transport=transport, world_size=world_size, args=(size,))


@jobs(2, 3)
@pytest.mark.parametrize("kind", point_to_point.MISMATCHES)
def test_mismatched_message(kind: str, transport: str, world_size: int) -> None:
    body = point_to_point.mismatched_message
    run(body, transport=transport, world_size=world_size, args=(kind,))


@pytest.mark.campaign
@jobs(2)
def test_beyond_32_bits(transport: str, world_size: int) -> None:
    body = point_to_point.beyond_32_bits
    run(body, transport=transport, world_size=world_size, timeout=300, op_timeout=200)


@jobs()
@bodies(
    groups.any_members_in_any_order,
    groups.several_at_once,
    groups.nested,
    groups.between_calls_of_the_parent,
    groups.equal_members_do_not_mix,
    groups.messages_and_collectives_do_not_mix,
    groups.impossible_groups,
    groups.closing_a_group,
)
def test_groups(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs()
@bodies(
    asynchronous.many_outstanding,
    asynchronous.between_blocking_calls,
    asynchronous.every_collective,
    asynchronous.into_out,
    asynchronous.not_done_before_all_came,
)
def test_started(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)
