"""One rank played for all: what its collectives give where every other rank does as it does.

Where ranks cannot differ, playing one of them tells of all. A collective then takes the time that
``Alike.take_part`` says, and gives what it would give if all inputs were this rank's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import Movement
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.collectives.spec import Layout
from fsdpcore.comm.backend import Backend
from fsdpcore.core.algorithm import Algorithm
from fsdpcore.core.buffers import Array
from fsdpcore.simulation.abstract import AbstractArray


@dataclass(frozen=True)
class Use:
    """What one kind of collective takes, and how often there was one.

    Attributes:
        collective, algorithm, ranks, nbytes: which kind.
        seconds: of one, between all groups like this one at the same time.
        carried: bytes that each link carries in one, by its name; empty where that is not known.
        formula: a cost formula told the time.
        calls: how many there were.
    """

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    seconds: float
    carried: Mapping[str, int]
    formula: bool
    calls: int


class Alike(Protocol):
    """How long the collectives take of ranks that all do the same at the same time."""

    def drain(self) -> list[Use]:
        """Return all collectives since this was called last."""

    def take_part(
        self,
        group: Backend,
        collective: str,
        algorithm: str = "",
        nbytes: int = 0,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """Let the time of a collective pass.

        Args:
            group: that takes part in it.
            collective, algorithm: which; without an algorithm, a barrier.
            nbytes: the n of the cost formulas.
            dtype: of the arrays.
        """


class LoneContext(CollectiveContext):
    """What an algorithm sees of a group of which this rank alone is played."""

    def __init__(self, backend: Backend, alike: Alike) -> None:
        super().__init__(backend)
        self._alike = alike

    def enter(self) -> None:
        self._met = False
        if self.spec.meets:
            self.meet()

    def meet(self) -> None:
        """Take the others to have begun the same, with the same rows."""
        self._met = True
        self.rows = [self.spec.rows] * self.size
        self._alike.take_part(self._backend, "barrier")

    def take_part(self, collective: str, algorithm: str, array: Array) -> None:
        """Let the time of a collective pass; ``array`` is its largest."""
        self._alike.take_part(self._backend, collective, algorithm, array.nbytes, array.dtype)


def algorithms() -> dict[str, Mapping[str, Algorithm]]:
    """The algorithms of the table, each as one that gives what it would if all inputs were equal.

    They are chosen by the same costs.
    """
    return {
        collective: {
            name: known._replace(move=functools.partial(_move, collective, name))
            for name, known in named.items()
        }
        for collective, named in ALGORITHMS.items()
    }


def _move(
    collective: str,
    algorithm: str,
    context: LoneContext,
    movement: Movement,
    layout: Layout,
    source: Array | None,
    out: Array | None,
) -> None:
    """Carry a collective out; the arguments but the first two are those of ``Algorithm.move``."""
    me, p = context.rank, context.size
    bounds = layout.bounds
    given = source if source is not None else out
    arrays = [each for each in (source, out) if each is not None]
    context.take_part(collective, algorithm, max(arrays, key=lambda array: array.nbytes))
    if out is None or given is None or isinstance(out, AbstractArray):
        return
    if collective in ("reduce_scatter", "scatter", "all_to_all"):
        given = given[bounds[me] : bounds[me + 1]]
    if collective in ("all_gather", "gather", "all_to_all"):
        out.reshape(p, -1)[...] = given.reshape(1, -1)
    elif layout.reduction is not None:
        # Of a scan, the ranks up to this one; of an exclusive one, those before it.
        count = {"scan": me + 1, "exscan": me}.get(collective, p)
        layout.reduction.reduce([given] * count, out)
    elif given is not out:
        out[...] = given
