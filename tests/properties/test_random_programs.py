"""Random programs of collectives, messages and groups agree with carrying them out in sequence.

A program is made from its seed, so a failure is repeated with
``carry_out(backend, [seed], False)`` on as many ranks. The error lists the program.
"""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
from support import oracle, program_maker, sabotage, spmd
from support.bodies.random_programs import carry_out
from support.cases import COSTLY, jobs
from support.program_steps import Batch, Call, Many, Split, Step, Sub
from support.spmd import TRANSPORTS

from fsdpcore.collectives.selection.table import ALGORITHMS

SIZES = (2, 3, 4, 5)


def _run(transport: str, size: int, seeds: range, timeout: float) -> None:
    """Carry out one program per seed; how the transport is set changes with the first seed."""
    chance = random.Random(f"{seeds[0]} on {size}")
    delays = chance.random() < 0.5
    options: dict[str, Any] = {}
    if transport == "sim":
        options["eager_bytes"] = chance.choice([0, 100, 4096])
        options["hosts"] = chance.randint(1, size)
        options["max_delay"] = chance.choice([0.0, 0.0, 0.0002])
        options["seed"] = seeds[0]
    elif transport == "zmq":
        options["shm"] = chance.choice(["auto", "off"])
    if chance.random() < 0.3:
        options.update(TRANSPORTS[transport].tight)
    arguments = (list(seeds), delays)
    spmd.run(
        carry_out,
        transport=transport,
        world_size=size,
        args=arguments,
        timeout=timeout,
        **options,
    )


@pytest.mark.parametrize("size", [1, *SIZES, 7])
def test_programs(size: int) -> None:
    for first in range(1000 * size, 1000 * size + 30, 15):
        _run("sim", size, range(first, first + 15), 60)


@jobs(3, 4, on=COSTLY)
def test_programs_of_processes(transport: str, world_size: int) -> None:
    for first in range(1000 * world_size + 100, 1000 * world_size + 120, 10):
        _run(transport, world_size, range(first, first + 10), 60)


@pytest.mark.campaign
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_programs(transport: str, size: int) -> None:
    """2500 programs for each number of ranks: 10,000 in all, and those of further transports."""
    count = {"sim": 2300}.get(transport, 200)
    for first in range(10_000, 10_000 + count, 20):
        _run(transport, size, range(first, first + 20), 300)


BROKEN = [
    sabotage.DropsLastByte,
    sabotage.SwapsMessages,
    sabotage.ConfusesTags,
    sabotage.MixesGroups,
    sabotage.MixesMessagesAndCollectives,
    sabotage.SharesTheSendersArray,
    sabotage.ReceivesTooEarly,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_programs_notice(broken: type[Any]) -> None:
    """Some of the programs fail on a transport that is wrong, and say what they are."""
    with pytest.raises(spmd.RanksFailed, match=r"in seed \d+ on 3 ranks"):
        spmd.run_on(
            broken,
            carry_out,
            world_size=3,
            args=(list(range(100)), False),
            op_timeout=0.5,
            timeout=20,
        )


def test_programs_have_everything() -> None:
    """Every kind of step and collective occurs, with every dtype, reduction and way of out."""
    programs = [program_maker.make(seed, 4) for seed in range(300)]
    steps = [step for program in programs for step in program.steps]
    kinds = {type(step) for step in steps}
    assert kinds == set(get_args(Step))
    calls = [step for step in steps if isinstance(step, Call)]
    calls += [call for step in steps if isinstance(step, Batch | Many) for call in step.calls]
    assert {call.kind for call in calls} == set(program_maker.KINDS)
    assert {call.options.get("op", "sum") for call in calls} == set(oracle.OPS)
    assert {call.out for call in calls} == {"new", "given", "strided", "in place", "own chunk"}
    arrays = [array for call in calls for array in call.inputs.values() if array is not None]
    assert {array.dtype for array in arrays} == set(oracle.DTYPES)
    assert {0, 1} <= {array.size for array in arrays}
    assert any(call.source is not None for call in calls)
    algorithms = {(c.kind, c.options.get("algorithm")) for c in calls}
    assert {("all_gather", name) for name in ALGORITHMS["all_gather"]} <= algorithms
    nested = [step for step in steps if isinstance(step, Sub | Split) and step.parent.number]
    assert nested
