"""How far a step has come through the virtual ranks of its rank."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fsdpcore.core.errors import StateError
from fsdpcore.fsdp.sharding.virtual_ranks import Leaves
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit


class LeafPass(NamedTuple):
    """A pass that was made for a virtual rank.

    Attributes:
        kind: what was entered.
        unit: whose pass it was; None for all of them.
        recompute: see ``Step.forward``.
        synchronising: it was outside of ``no_sync``.
    """

    kind: Literal["forward", "backward", "whole"]
    unit: ShardedUnit | None
    recompute: bool
    synchronising: bool


class LeafPasses:
    """The virtual ranks that one step goes through.

    Args:
        leaves: of the engine.
        training: whether there are backward passes.
    """

    def __init__(self, leaves: Leaves, training: bool) -> None:
        self._leaves = leaves
        self._training = training
        self._round = -1
        self._open = self._ended = False
        self._log: list[LeafPass] = []

    @property
    def virtual(self) -> bool:
        """Whether the user has asked for virtual ranks."""
        return self._leaves.virtual

    @property
    def given(self) -> range:
        """The leaves of this rank."""
        return self._leaves.mine

    @property
    def last(self) -> bool:
        """Whether no rank has another leaf after this one."""
        return self._round == self._leaves.rounds - 1

    @property
    def lacks_one(self) -> bool:
        """Whether others have one leaf more."""
        return len(self.given) < self._leaves.rounds

    def begin(self) -> None:
        """Begin with the first leaf."""
        if self._round >= 0:
            raise StateError("step.leaves() is gone through once in a step")
        self.next()

    def next(self) -> list[LeafPass]:
        """Go on to the next leaf; return the passes of the one before."""
        self._round += 1
        self._open = True
        log, self._log = self._log, []
        return log

    def end(self) -> None:
        """Have done with all of them."""
        self._open, self._ended = False, True

    def note(self, made: LeafPass) -> None:
        """Take note of a pass that is about to be made, on a rank that will make it again."""
        if self._open:
            if self.lacks_one:
                self._log.append(made)
        elif self._training:
            raise StateError(
                f"this engine has virtual ranks, of which this rank computes {len(self.given)}; "
                "make its passes inside of 'for leaf in step.leaves()'"
            )

    def check_ended(self, what: str) -> None:
        """Refuse what needs all gradients before the passes of all virtual ranks were made."""
        if self.virtual and not self._ended:
            raise StateError(
                f"{what} before all virtual ranks were computed; go through step.leaves() to its "
                "end first"
            )
