"""The arrays of one case on one rank: input, output, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpcore.bench import oracle
from fsdpcore.bench.cases import Case
from fsdpcore.bench.contestants import Contestant
from fsdpcore.core.buffers import Array


@dataclass(frozen=True)
class Buffers:
    """Flat arrays; None where the rank has no input, or no output.

    In place, the smaller of the two is a part of the larger one, or they are the same.
    """

    case: Case
    rank: int
    source: Array | None
    output: Array | None

    @classmethod
    def allocate(cls, case: Case, contestant: Contestant) -> Buffers:
        """Make the arrays in the contestant's memory, and write to every page of them."""
        rank, dtype = contestant.rank, case.numpy_dtype
        given, taken = case.source_count(rank), case.output_count(rank)

        def array(count: int) -> Array | None:
            return contestant.empty(count, dtype) if count else None

        if not case.in_place:
            made = cls(case, rank, array(given), array(taken))
        elif taken > given > 0:
            output = contestant.empty(taken, dtype)
            made = cls(case, rank, output[rank * case.count :][: case.count], output)
        elif given == 0 or taken == 0:
            made = cls(case, rank, array(given), array(taken))
        else:
            source = contestant.empty(given, dtype)
            part = source
            if case.operation == "reduce_scatter":
                part = contestant.part(case, source)
            elif case.operation == "scatter":
                part = source[rank * case.count :][: case.count]
            made = cls(case, rank, source, part)
        made.settle()
        return made

    def settle(self) -> None:
        """Fill with values that stay as they are however often they are reduced."""
        for array in (self.output, self.source):
            if array is not None:
                array.fill(1 if self.case.op == "prod" else 0)

    def pose(self) -> None:
        """Write this rank's input, and zeros, which no result has, to the output."""
        for array in (self.output, self.source):
            if array is not None:
                array.fill(0)
        if self.source is not None:
            oracle.fill(self.case, self.rank, self.source)

    def wrong(self) -> int:
        """How many elements of the output are wrong, and of an input that had to stay."""
        found = 0
        if self.output is not None:
            found += oracle.count_wrong(self.case, self.rank, self.output)
        if self.source is not None and not self.case.in_place:
            found += oracle.count_changed(self.case, self.rank, self.source)
        return found
