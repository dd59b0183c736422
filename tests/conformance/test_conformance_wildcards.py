"""Messages as users of MPI know them, on every transport: any rank, any tag, and what else."""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import wildcards
from support.cases import bodies, jobs
from support.spmd import TRANSPORTS, run

pytestmark = pytest.mark.side_by_side("transport")
# In seconds. Where a failure does not become known, this deadline of every operation says so soon.
SOON = 15.0


@jobs(1, 2, 4)
@bodies(
    wildcards.from_any_rank,
    wildcards.older_receive_first,
    wildcards.older_message_first,
    wildcards.any_rank_of_a_group,
    wildcards.probing,
    wildcards.to_oneself,
    wildcards.exchanges,
    wildcards.several_works,
    wildcards.refusals,
)
def test_messages(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size, op_timeout=SOON)


@jobs(1, of_processes=(1,))
@bodies(wildcards.to_oneself)
def test_messages_of_a_rank_that_is_alone(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size, op_timeout=SOON)


@jobs(3)
@bodies(wildcards.from_any_rank, wildcards.older_message_first, wildcards.several_works)
def test_messages_the_long_way(body: Any, transport: str, world_size: int) -> None:
    options = TRANSPORTS[transport].tight
    run(body, transport=transport, world_size=world_size, op_timeout=SOON, **options)


@jobs(2)
@pytest.mark.parametrize("kind", wildcards.TOO_LITTLE)
def test_too_little_room(kind: str, transport: str, world_size: int) -> None:
    body = wildcards.too_little_room
    run(body, transport=transport, world_size=world_size, args=(kind,), op_timeout=SOON)


@jobs(3)
@pytest.mark.parametrize("call", wildcards.CALLS_FOR_ANY)
@bodies(wildcards.left_alone, wildcards.alone_before, wildcards.failed_meanwhile)
def test_nobody_left_to_send(body: Any, call: str, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size, args=(call,), op_timeout=SOON)


@jobs(2, 5)
def test_random_traffic(transport: str, world_size: int) -> None:
    for seed in range(3):
        body = wildcards.random_traffic
        run(body, transport=transport, world_size=world_size, args=(seed,), op_timeout=SOON)
