"""Shared: the ranks are on one host and use memory that all of them see (``SharedRegion``).

What they move is data (``movements``), which ``interpreter`` carries out with arrays that are
published, or staged. With p ranks and n bytes (in total for reduce_scatter, all_gather, gather,
scatter and all_to_all, per rank for the others), no messages are sent, and each rank copies

==============  ====================  ====================================================
collective      published             staged
==============  ====================  ====================================================
all_reduce      ((p - 1) / p) n       (2 (p - 1) / p + 1 / p) n; n of two ranks,
                                      where a staging buffer has room for 2 n
reduce          0                     ((p - 1) / p) n, the root n more; of two ranks
                                      n, not on the root
reduce_scatter  0                     ((p - 1) / p) n
scan, exscan    0                     (2 (p - 1) / p + 1 / p) n
all_gather      n                     n / p in, n out
broadcast       n, not on the root    n in on the root, n out on the others
gather          n on the root         n / p in, n out on the root
scatter         n / p                 ((p - 1) / p) n in on the root, n / p out
all_to_all      n                     ((p - 1) / p) n in, n out
==============  ====================  ====================================================

Reductions reduce n/p from p arrays, in the canonical order; where two ranks stage n, each of them
reduces n. Scans combine n/p as often as there are bits set in the numbers below p, or p - 1: p lg p
/ 2 times where p is a power of two. What "staged" tells is computed from the movement: see
``cost``, which for two ranks is that of larger arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial

from fsdpcore.collectives.movements import OUTPUT, ArrayPart, Movement
from fsdpcore.collectives.shared.interpreter import SMALL, move
from fsdpcore.collectives.shared.program import exchange, program
from fsdpcore.collectives.spec import Operation
from fsdpcore.core.algorithm import Algorithm, Comparison, CostTerms
from fsdpcore.core.policy import Costs

NAME = "shared"

# One thread copies about 10 GB/s of what is not in its cache.
COSTS = Costs(alpha=1e-6, beta=0.1e-9, gamma=0.1e-9)


def algorithms(operations: Mapping[str, Operation]) -> dict[str, dict[str, Algorithm]]:
    """What a group whose ranks share memory has for each collective."""
    return {name: {NAME: _algorithm(operation)} for name, operation in operations.items()}


def _algorithm(operation: Operation) -> Algorithm:
    costs = partial(cost, operation.movement)
    return Algorithm(
        None, costs, costs=COSTS, comparison=Comparison.IN_MEMORY, publishes=SMALL, move=move
    )


@lru_cache(maxsize=1024)
def cost(movement: Movement, p: int) -> CostTerms:
    """The steps, and the bytes copied and reduced, of arrays that are staged.

    Others do not compete. It is that of the first rank, as the root, or of the last one, whichever
    is higher: in a movement that has no root, all ranks do the same, or the last one does most.
    """
    first, last = (_cost(movement, p, rank) for rank in (0, p - 1))
    return CostTerms(*map(max, first, last))


def _cost(movement: Movement, p: int, rank: int) -> CostTerms:
    every, todo = exchange(movement, p, 0), program(movement, p, rank, 0)
    cut = every.splits and not every.divided, every.joins and not every.divided

    def size(part: ArrayPart) -> float:
        """Of a part, as a multiple of n."""
        whole = 1 / p if any(cut) and not cut[part.array == OUTPUT] else 1.0
        return whole if part.chunk is None else whole / p

    # A whole input is often the output, too: that it is copied there is not counted.
    copied = sum(size(move.targets[0]) for move in todo.own if any(cut))
    copied += sum(map(size, every.slots[rank]))
    reduced = 0.0
    for each in (each for moves in todo.staged for each in moves):
        if each.prefixes:  # every time that something is combined with what comes before it
            combined = sum(number.bit_count() for number in range(len(each.sources)))
            reduced += combined * size(each.targets[0])
        elif len(each.sources) > 1:
            reduced += sum(map(size, each.sources))
        elif each.targets[0].array == OUTPUT:
            copied += size(each.targets[0])
    return CostTerms(len(todo.staged), copied, reduced)
