"""The contestants of a bench whose ranks are processes of their own, all of them started."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fsdpcore.bench.harness.start import RankProgram, Start
from fsdpcore.bench.harness.team import RemoteTeam
from fsdpcore.bench.harness.turns import Entrant


def starts(
    program: RankProgram,
    world_size: int,
    transport: str,
    ours: Sequence[str],
    others: Sequence[str],
    **options: Any,
) -> dict[str, Start]:
    """How to start each contestant's ranks.

    Args:
        program: that becomes a rank; it gets its ``contestant`` as an option.
        world_size: number of ranks of each.
        transport: of ours.
        ours: those on a backend.
        others: those that are started one by one.
        options: of all ranks.
    """
    found = {
        name: program.under_our_launcher(world_size, transport, contestant=name, **options)
        for name in ours
    }
    for name in others:
        found[name] = program.one_by_one(world_size, contestant=name, **options)
    return found


def start_all(stack: ExitStack, world_size: int, wanted: dict[str, Start]) -> list[Entrant]:
    """Start them one after the other; those that are up sleep meanwhile, and end with the stack."""
    return [
        Entrant(name, stack.enter_context(RemoteTeam(name, world_size, start)))
        for name, start in wanted.items()
    ]
