"""Very many operations under way, on every transport."""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import bounded
from support.cases import NOT_MPI, bodies, jobs
from support.spmd import TRANSPORTS, run

pytestmark = pytest.mark.side_by_side("transport")


@jobs(1, 2, 3, 7)
@bodies(
    bounded.not_waited_for,
    bounded.hundreds_of_messages,
    bounded.sent_before_received,
    bounded.messages_between_collectives,
)
def test_under_way(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(3, on=NOT_MPI)
def test_more_than_fit(transport: str, world_size: int) -> None:
    run(bounded.more_than_fit, transport=transport, world_size=world_size)


@jobs(2, 3)
@bodies(bounded.hundreds_of_messages, bounded.sent_before_received)
def test_messages_the_long_way(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size, **TRANSPORTS[transport].tight)
