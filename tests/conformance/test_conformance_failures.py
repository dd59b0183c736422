"""Disagreement, deadlines, ranks that leave or fail: an error on every rank, never a hang."""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import agreement, endings
from support.cases import bodies, jobs
from support.spmd import run

pytestmark = pytest.mark.side_by_side("transport")
# In seconds. Where a failure does not become known, this deadline of every operation says so soon.
SOON = 15.0


@jobs(2, 3, 8)
@pytest.mark.parametrize("what", agreement.DIFFERENCES)
def test_difference(what: str, transport: str, world_size: int) -> None:
    run(agreement.difference, transport=transport, world_size=world_size, args=(what,))


@jobs(2, 4, 7)
@bodies(
    agreement.difference_in_a_group,
    agreement.unexpected_rows,
    agreement.failure_of_started_work,
    agreement.long_counts_that_differ,
)
def test_differences(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, 4)
@bodies(endings.skipped_collective, endings.started_and_skipped)
def test_skipped(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(4)
def test_skipped_in_a_group(transport: str, world_size: int) -> None:
    run(endings.skipped_in_a_group, transport=transport, world_size=world_size)


@jobs(2, 3, 8)
@pytest.mark.parametrize("call", endings.CALLS_OF_A_LEAVER)
def test_early_leaver(call: str, transport: str, world_size: int) -> None:
    body = endings.early_leaver
    run(body, transport=transport, world_size=world_size, args=(call,), op_timeout=SOON)


@jobs(2, 3, 8)
@pytest.mark.parametrize("call", endings.CALLS_BEFORE_AN_ABORT)
def test_aborted(call: str, transport: str, world_size: int) -> None:
    body = endings.aborted
    run(body, transport=transport, world_size=world_size, args=(call,), op_timeout=SOON)


@jobs(2)
def test_sends_to_a_rank_that_leaves(transport: str, world_size: int) -> None:
    body = endings.left_without_receiving
    run(body, transport=transport, world_size=world_size, op_timeout=SOON)


@jobs(2, on=("sim", "zmq"))  # MPI waits for ten seconds for what it was told will come
def test_a_send_that_has_failed(transport: str, world_size: int) -> None:
    run(endings.failed_send, transport=transport, world_size=world_size, op_timeout=SOON)


@jobs(2, 4, 7)
@bodies(
    endings.timeout_then_failure,
    endings.swallowed_failure,
    endings.left_before,
    endings.abort_of_a_group,
    endings.raised_in_a_block,
)
def test_failures(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size, op_timeout=SOON)


@jobs(1, 2, 4, 7)
@bodies(endings.after_close, endings.left_at_different_times)
def test_closing(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size, op_timeout=SOON)
