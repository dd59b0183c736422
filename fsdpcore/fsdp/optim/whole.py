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
    UnsupportedError, as a range of a shard does not say what it belongs to. One of its own gives
    ``state_names``, ``state_shapes`` and ``update_pieces``. ``lr`` is the learning rate, or a
    ``Schedule`` of it. One that ``has_owners`` gets a ``Ranks`` as ``reduce``, which brings each
    whole parameter to one rank and back.
    """

    elementwise: ClassVar[bool] = False

    @abstractmethod
    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """See ``Optimizer.state_shapes``."""

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
        """See ``Optimizer.update_pieces``; a collective."""

    def init_state(self, size: int, dtype: DTypeLike) -> NoReturn:
        """Not possible."""
        self._refuse("init_pieces")

    def update(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """Not possible."""
        self._refuse("update_pieces")

    def update_block(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """Not possible."""
        self._refuse("update_pieces")

    def _refuse(self, method: str) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__} needs the shapes of the parameters and their other parts, so "
            f"it cannot update a range of a shard; use {method}"
        )
