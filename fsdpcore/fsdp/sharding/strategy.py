"""The strategies by name, their options, and the placement that each comes to.

Pure: names and numbers, no arrays and no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.text import nearest
from fsdpcore.fsdp.sharding.placement import Keep, Placement


@dataclass(frozen=True)
class StrategyKind:
    """What the name of a strategy stands for.

    Attributes:
        sharded: each rank updates a shard; else each updates everything.
        grouped: over groups of ranks, of ``shard_group_size``, and not over all of them.
        keep: how long gathered parameters stay; None where ``reshard_after_forward`` says it.
        whole_gradients: as of ``Placement``.
    """

    sharded: bool = True
    grouped: bool = False
    keep: Keep | None = None
    whole_gradients: bool = False


STRATEGIES: Mapping[str, StrategyKind] = {
    "full_shard": StrategyKind(),
    "shard_grad_op": StrategyKind(keep=Keep.UPDATE),
    "shard_optimizer": StrategyKind(keep=Keep.UPDATE, whole_gradients=True),
    "hybrid_shard": StrategyKind(grouped=True),
    "no_shard": StrategyKind(sharded=False, keep=Keep.UPDATE),
}


@dataclass(frozen=True)
class Strategy:
    """How a model is spread over the ranks; the same on all of them.

    ===================  ==========  ==========  ==========  =======================================
    name                 parameters  gradients   optimizer   moved per step and unit
    ===================  ==========  ==========  ==========  =======================================
    ``full_shard``       sharded     sharded     sharded     gathered for each pass,
                                                             gradients reduce-scattered
    ``shard_grad_op``    replicated  sharded     sharded     gathered after an update,
                                                             gradients reduce-scattered
    ``shard_optimizer``  replicated  replicated  sharded     gathered after an update,
                                                             gradients all-reduced
    ``hybrid_shard``     sharded in  sharded in  sharded in  as ``full_shard`` in a group of ranks;
                         a group     a group     a group     shards of gradients are all-reduced
                                                             over the groups
    ``no_shard``         replicated  replicated  replicated  gradients all-reduced
    ===================  ==========  ==========  ==========  =======================================

    (ZeRO-3, ZeRO-2, ZeRO-1, ZeRO-3 inside groups, and data parallelism.)

    Args:
        name: one of these.
        reshard_after_forward: of ``full_shard`` and ``hybrid_shard``: True frees parameters after
            the forward pass of their unit; False keeps them until its backward pass, which then
            gathers nothing; a number of ranks g keeps 1/g of them on each of g neighbouring ranks,
            among which the backward pass gathers. It divides the number of ranks that share a copy.
        shard_group_size: of ``hybrid_shard``: how many neighbouring ranks share a copy.

    Raises:
        ArgumentError: a name, or an option for it, that does not exist.

    Example::

        fc.FSDP(units, backend, strategy=fc.Strategy("hybrid_shard", shard_group_size=8))
    """

    name: str = "full_shard"
    reshard_after_forward: bool | int = True
    shard_group_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in STRATEGIES:
            known = ", ".join(map(repr, STRATEGIES))
            hint = nearest(self.name, STRATEGIES) if isinstance(self.name, str) else ""
            raise ArgumentError(f"unknown strategy {self.name!r}{hint}; known: {known}")
        if self.shard_group_size is not None:
            size = as_int(self.shard_group_size, "shard_group_size", minimum=1)
            object.__setattr__(self, "shard_group_size", size)
        if self._kind.grouped is (self.shard_group_size is None):
            raise ArgumentError(
                f"{self.name} needs shard_group_size, the number of neighbouring ranks that share "
                f"a copy of the model: Strategy({self.name!r}, shard_group_size=8)"
                if self._kind.grouped
                else f"shard_group_size belongs to {_those(lambda kind: kind.grouped)}, "
                f"not to {self.name!r}"
            )
        if not isinstance(self.reshard_after_forward, bool):
            kept = as_int(self.reshard_after_forward, "reshard_after_forward", minimum=1)
            object.__setattr__(self, "reshard_after_forward", kept)
        if self._kind.keep is not None and self.reshard_after_forward is not True:
            raise ArgumentError(
                f"{self.name!r} keeps its parameters; reshard_after_forward belongs to "
                f"{_those(lambda kind: kind.keep is None)}"
            )

    @property
    def _kind(self) -> StrategyKind:
        """What the name stands for."""
        return STRATEGIES[self.name]

    def place(self, world_size: int) -> Placement:
        """Say what the strategy comes to for a number of ranks.

        Args:
            world_size: how many ranks there are.

        Returns:
            How many shards and replicas there are, and how long gathered parameters stay.

        Raises:
            ArgumentError: ``shard_group_size`` does not divide them, or ``reshard_after_forward``
                those that share a copy.
        """
        shards = (self.shard_group_size or world_size) if self._kind.sharded else 1
        if world_size % shards:
            raise ArgumentError(f"shard_group_size {shards} does not divide the {world_size} ranks")
        keep, regather = self._kept(shards)
        replicas = world_size // shards
        return Placement(shards, replicas, regather, keep, self._kind.whole_gradients)

    def _kept(self, shards: int) -> tuple[Keep, int]:
        """How long gathered parameters stay, and how many ranks the backward pass gathers among."""
        if self._kind.keep is not None:
            return self._kind.keep, shards
        if isinstance(self.reshard_after_forward, bool):
            return Keep.USE if self.reshard_after_forward else Keep.BACKWARD, shards
        regather = self.reshard_after_forward
        if shards % regather:
            raise ArgumentError(
                f"reshard_after_forward={regather} does not divide the {shards} ranks that "
                "share a copy of the parameters"
            )
        # A part of all parameters for each of one rank is all of them.
        return (Keep.BACKWARD, shards) if regather == 1 else (Keep.USE, regather)


def _those(chosen: Callable[[StrategyKind], bool]) -> str:
    """Names of some strategies, for messages."""
    return " and ".join(repr(name) for name, kind in STRATEGIES.items() if chosen(kind))
