"""What a collective call is before any data moves: its ``Operation``, and its ``CallSpec``.

An ``Operation`` is what all calls of a collective have in common. Two facts say most of it: whether
axis 0 of the input is *split* over the ranks, and whether the result *joins* what the ranks send.
Bounds, shapes, sizes, the overlap that is allowed and the way into a batch follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from fsdpcore.collectives.fingerprint import Fingerprint
from fsdpcore.collectives.movements import Movement
from fsdpcore.core.algorithm import Algorithm, Comparison
from fsdpcore.core.buffers import Array, kept_bounds, row_size, split_sizes
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.reductions import Reduction
from fsdpcore.diagnostics.entries import CollectiveRecord

Shape = tuple[int, ...]


class Declined(Enum):
    """The type of ``DECLINED``."""

    DECLINED = 0


DECLINED = Declined.DECLINED
# Input and ``out``, both of any shape, to the result; DECLINED to go the ordinary way. The input is
# None in a call that moves no data.
FastPath = Callable[["Array | None", "Array | None"], "Array | Declined | None"]


class Choice(NamedTuple):
    """An algorithm that was chosen.

    Attributes:
        name: of the algorithm.
        algorithm: the algorithm; None for a call that needs none.
        fallback: of an algorithm that uses arrays in place where all ranks can see them, the one
            that is faster for others.
    """

    name: str
    algorithm: Algorithm | None = None
    fallback: Choice | None = None

    @property
    def comparison(self) -> Comparison:
        """How the ranks' calls are compared while it moves data."""
        return Comparison.BY_MESSAGES if self.algorithm is None else self.algorithm.comparison

    def start(
        self,
        context: Any,
        operation: Operation,
        layout: Layout,
        source: Array | None,
        out: Array | None,
    ) -> None:
        """Carry a collective out.

        Args:
            context: the ``CollectiveContext`` of the group, in which the call has begun.
            operation: which collective.
            layout: of the call.
            source, out: flat and contiguous, and the same array or apart but for
                ``Operation.own_parts``. The input is None on ranks that have none, ``out`` on those
                that get no result.
        """
        algorithm = self.algorithm
        assert algorithm is not None, "no algorithm was chosen for this call"
        if algorithm.move is not None:
            algorithm.move(context, operation.movement, layout, source, out)
        else:
            operation.call(algorithm.module, context, layout, source, out)


class Layout(NamedTuple):
    """What an algorithm is told of a call besides its arrays.

    Attributes:
        root: the root rank, or -1.
        reduction: of a collective that reduces.
        bounds: where the ranks' chunks lie in the flat input that is split, or else in the flat
            result that joins them.
        arriving: where they lie in the flat result of a collective that splits and joins.
    """

    root: int = -1
    reduction: Reduction | None = None
    bounds: Sequence[int] = ()
    arriving: Sequence[int] = ()


_WHOLE = slice(None)


@dataclass(frozen=True, eq=False)
class Operation:
    """A collective that moves data: what all its calls have in common.

    Attributes:
        name: of the public function; algorithms carry it out under this name.
        call: ``call(module, context, layout, source, out)`` calls an algorithm's function of it;
            the arguments are those of ``Choice.start``.
        movement: what moves where in memory that the ranks share.
        splits: axis 0 of the input is split over the ranks.
        joins: the result joins along axis 0 what the ranks send.
        reduces: values of the ranks are combined by an op.
        rooted: one rank, the root, sends or receives all of it.
        to_root: only the root gets a result.
        starts_empty: rank 0 gets what a reduction of nothing gives.
    """

    name: str
    call: Callable[..., None]
    movement: Movement
    splits: bool = False
    joins: bool = False
    reduces: bool = False
    rooted: bool = False
    to_root: bool = False
    starts_empty: bool = False

    def gives(self, rank: int, layout: Layout) -> bool:
        """Whether a rank gets a result."""
        return not self.to_root or rank == layout.root

    def own_parts(self, layout: Layout, rank: int) -> tuple[slice, slice] | None:
        """The part of the flat input, and of the flat result, that may be the same memory.

        That is what the rank has itself of the result. None where no overlap is allowed.
        """
        if self.splits and self.joins:
            return None
        if not self.splits and not self.joins:
            return _WHOLE, _WHOLE
        chunk = slice(layout.bounds[rank], layout.bounds[rank + 1])
        return (chunk, _WHOLE) if self.splits else (_WHOLE, chunk)

    def sizes(self, shape: Shape, world_size: int) -> list[int]:
        """The rows of each rank's chunk, by default.

        Raises:
            ArgumentError: there is no axis 0 to split.
        """
        if self.splits:
            if not shape:
                raise ArgumentError(f"{self.name} splits axis 0, which a 0-d array does not have")
            return split_sizes(shape[0], world_size)
        return [shape[0] if shape else 1] * world_size if self.joins else []

    def layout(
        self,
        shape: Shape,
        sizes: Sequence[int],
        rank: int,
        *,
        root: int = -1,
        reduction: Reduction | None = None,
    ) -> Layout:
        """The layout for inputs of ``shape``, of which ``sizes`` rows are each rank's chunk."""
        row = row_size(shape) if shape else 1
        bounds = kept_bounds(tuple(sizes), row) if sizes else ()
        arriving: Sequence[int] = ()
        if self.splits and self.joins:
            arriving = kept_bounds((sizes[rank],) * len(sizes), row)
        return Layout(root, reduction, bounds, arriving)

    def out_shape(self, shape: Shape, sizes: Sequence[int], rank: int) -> Shape:
        """The shape of the result."""
        if self.splits:
            rows = sizes[rank] * len(sizes) if self.joins else sizes[rank]
            return rows, *shape[1:]
        return (sum(sizes), *shape[1:]) if self.joins else shape

    def size(self, nbytes: int, world_size: int) -> int:
        """The n of the cost formulas for an input of ``nbytes``."""
        return nbytes * world_size if self.joins and not self.splits else nbytes


def _unchosen(size: int) -> Choice:
    raise AssertionError("no algorithm was chosen for this call")


UNCHOSEN = Choice("")


class CallSpec:
    """One kind of call: all that follows from it without its data, and without communication.

    A training loop makes few kinds of calls many times over, so a group remembers them.

    Attributes:
        fingerprint: what the ranks must agree on.
        operation, dtype, shape, root, digest, rows, ragged: of the fingerprint.
        definition: what calls of the collective have in common; None where it moves no data.
        layout, reduction, bounds: what an algorithm is told besides the arrays.
        out_shape: of the result on this rank.
        record: what the flight recorder keeps.
        nbytes: of this rank's array.
        size: the n of the cost formulas; 0 where it follows only from what ranks tell each other.
        choose: gives the algorithm for a size in bytes, as the cost formulas count them.
        choice: the algorithm, chosen when the first such call runs.
        chosen, sized: what such calls have chosen and laid out, by what the ranks tell each other.
        fast_path: a shorter way for blocking calls with the default deadline, if there is one.
        chooses_late: there is no ``choice``: the body takes ``context.choose(size)``, or needs
            none.
        meets: no rank moves data before all have begun the call and have told their rows, which not
            all know. Of other calls it depends on the algorithm: see ``CollectiveContext.enter``.
        met: of arrays of a GPU: the ranks have met for such a call, and need not again.
    """

    def __init__(
        self,
        fingerprint: Fingerprint,
        definition: Operation | None = None,
        size: int | None = None,
        *,
        layout: Layout | None = None,
        out_shape: Shape = (),
        choose: Callable[[int], Choice] = _unchosen,
    ) -> None:
        self.fingerprint = fingerprint
        self.operation = fingerprint.operation
        self.dtype = fingerprint.dtype
        self.shape = fingerprint.shape
        self.root = fingerprint.root
        self.digest = fingerprint.digest
        self.rows = fingerprint.rows
        self.ragged = fingerprint.ragged
        self.definition = definition
        itemsize = self.dtype.itemsize if self.dtype is not None else 0
        self.nbytes = math.prod(self.shape) * itemsize
        self.record = CollectiveRecord(
            self.operation,
            self.dtype,
            self.shape,
            self.nbytes,
            fingerprint.algorithm,
            fingerprint.label,
        )
        self.size = size or 0
        self.layout = layout if layout is not None else Layout(fingerprint.root)
        self.reduction = self.layout.reduction
        self.bounds = self.layout.bounds
        self.out_shape = out_shape
        self.choose = choose
        self.choice = UNCHOSEN
        self.chosen: dict[int, Choice] = {}
        self.sized: dict[tuple[Shape, tuple[int, ...]], tuple[Layout, Shape]] = {}
        self.fast_path: FastPath | None = None
        self.meets = definition is None or (self.ragged and not fingerprint.counts)
        self.met = False
        self.chooses_late = size is None

    @property
    def collective(self) -> str:
        """The one whose algorithms carry the call out; empty for none."""
        return self.definition.name if self.definition is not None else ""
