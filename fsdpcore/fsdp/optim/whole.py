"""Optimizers that have to look at a whole parameter, of which each rank holds a part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from numpy.typing import DTypeLike

from fsdpcore.core.errors import UnsupportedError
from fsdpcore.fsdp.optim.base import Optimizer
from fsdpcore.fsdp.optim.pieces import Reduce, ShardPiece


@dataclass(frozen=True)
class WholeParameterOptimizer(Optimizer):
    """An optimizer that is not elementwise: it knows parameters, their shapes, and other ranks.

    It is used through ``init_pieces`` and ``update_pieces``; ``init_state`` and ``update`` raise
    UnsupportedError, as a range of a shard does not say what it belongs to. A new one is a frozen
    dataclass that gives ``state_names``, ``state_shapes`` and ``update_pieces``. One that
    ``has_owners`` gets a ``Ranks`` as ``reduce``, which brings each whole parameter to one rank and
    back.

    Args:
        lr: the learning rate, a finite number of at least 0, or a ``Schedule`` of it. It counts
            where ``update_pieces`` gets no ``lr``.
    """

    elementwise: ClassVar[bool] = False

    @abstractmethod
    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state array of a whole parameter.

        Args:
            shape: of the whole parameter.

        Returns:
            The shapes by the names of the state arrays. An array of the parameter's own shape is
            sharded as the parameter is. Any other is smaller, and every rank holds all of it.
        """

    @abstractmethod
    def update_pieces(
        self,
        pieces: Sequence[ShardPiece],
        *,
        step: int,
        reduce: Reduce,
        lr: float | None = None,
        grad_scale: float = 1.0,
    ) -> None:
        """Take one step on parts of parameters, of which the ranks hold the rest; a collective.

        Args:
            pieces: one for every parameter that this optimizer updates in a unit, in the same
                order on all ranks, also where this rank holds nothing of it. ``param``, ``state``
                and ``out`` of each are written.
            step: the number of this step, from 1.
            reduce: sums a float64 array over the ranks that share the parameters. A ``Ranks``,
                which can do more, where the optimizer ``has_owners``.
            lr: replaces the configured learning rate for this step; None keeps that.
            grad_scale: the gradients count as ``grad * grad_scale``.

        Raises:
            ArgumentError: an argument is wrong. Other ranks then wait for this one in ``reduce``.
        """

    def init_state(self, size: int, dtype: DTypeLike) -> NoReturn:
        """Not possible: raises UnsupportedError, whatever ``size`` and ``dtype`` are."""
        self._refuse("init_pieces")

    def update(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """Not possible: raises UnsupportedError, whatever ``arguments`` and ``keywords`` are."""
        self._refuse("update_pieces")

    def update_block(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """Not possible: raises UnsupportedError, whatever ``arguments`` and ``keywords`` are."""
        self._refuse("update_pieces")

    def _refuse(self, method: str) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__} needs the shapes of the parameters and their other parts, so "
            f"it cannot update a range of a shard; use {method}"
        )
