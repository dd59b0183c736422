"""A training step whose passes do nothing, or what they are given to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import fsdpcore as fc
from fsdpcore.fsdp.plan.make_plan import Sync


def train(
    engine: fc.FSDP,
    microbatches: int,
    sync: Sync,
    compute: Callable[[int], object] = lambda factor: None,
) -> None:
    """Make a step, with no gradients written.

    Args:
        engine: which makes it.
        microbatches, sync: as of ``make_plan``.
        compute: called in each pass of a unit, with how many forward passes that counts for.
    """
    with engine.step() as step:
        for number in (each for _ in step.leaves() for each in range(microbatches)):
            kept = sync == "last" and number < microbatches - 1
            with step.no_sync() if kept else contextlib.nullcontext():
                for unit in engine.units:
                    with step.forward(unit):
                        compute(1)
                for unit in reversed(engine.units):
                    with step.backward(unit):
                        compute(2)
        step.update()
