"""What is sharded, over which ranks, and how long gathered parameters stay.

Pure: names and numbers, no arrays and no communication.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")


class Keep(enum.Enum):
    """How long the gathered parameters of a unit stay."""

    USE = "while it is used, in each pass anew"
    BACKWARD = "from the forward to the end of the backward pass"
    UPDATE = "until the update"


@dataclass(frozen=True)
class Strategy:
    """How a model is spread over the ranks; the same on all of them.

    ==================  ==========  =========  =========  ==========================================
    name                parameters  gradients  optimizer  moved per step and unit
    ==================  ==========  =========  =========  ==========================================
    ``full_shard``      sharded     sharded    sharded    gathered for the forward and for the
                                                          backward pass, gradients reduce-scattered
    ``shard_grad_op``   replicated  sharded    sharded    gathered after an update,
                                                          gradients reduce-scattered
    ``hybrid_shard``    sharded in groups of ranks,       as ``full_shard`` inside a group; shards
                        replicated over the groups        of gradients all-reduced over the groups
    ``no_shard``        replicated  replicated replicated gradients all-reduced
    ==================  ==========  =========  =========  ==========================================

    (ZeRO-3, ZeRO-2, ZeRO-3 inside groups, and data parallelism.)

    Args:
        name: one of these.
        reshard_after_forward: of ``full_shard`` and ``hybrid_shard``: True frees parameters after
            the forward pass of their unit; False keeps them until its backward pass, which then
            gathers nothing; a number of ranks g keeps 1/g of them on each of g neighbouring ranks,
            among which the backward pass gathers. It divides the number of ranks that share a copy.
        shard_group_size: of ``hybrid_shard``: how many neighbouring ranks share a copy.

    Raises:
        ArgumentError: a name, or an option for it, that does not exist.
    """

    name: str = "full_shard"
    reshard_after_forward: bool | int = True
    shard_group_size: int | None = None

    def __post_init__(self) -> None:
        if self.name not in STRATEGIES:
            raise ArgumentError(
                f"unknown strategy {self.name!r}; known: {', '.join(map(repr, STRATEGIES))}"
            )
        hybrid = self.name == "hybrid_shard"
        if self.shard_group_size is not None:
            as_int(self.shard_group_size, "shard_group_size", minimum=1)
        if hybrid is (self.shard_group_size is None):
            raise ArgumentError(
                "hybrid_shard needs shard_group_size, the number of neighbouring ranks that share "
                "a copy of the model: Strategy('hybrid_shard', shard_group_size=8)"
                if hybrid
                else f"shard_group_size belongs to 'hybrid_shard', not to {self.name!r}"
            )
        if not isinstance(self.reshard_after_forward, bool):
            as_int(self.reshard_after_forward, "reshard_after_forward", minimum=1)
        if self.name in ("shard_grad_op", "no_shard") and self.reshard_after_forward is not True:
            raise ArgumentError(
                f"{self.name!r} keeps its parameters; reshard_after_forward belongs to "
                "'full_shard' and 'hybrid_shard'"
            )

    def place(self, world_size: int) -> Placement:
        """Apply the strategy to so many ranks.

        Raises:
            ArgumentError: a group's size does not divide them.
        """
        shards = {"no_shard": 1, "hybrid_shard": self.shard_group_size}.get(self.name, world_size)
        assert shards is not None
        if world_size % shards:
            raise ArgumentError(f"shard_group_size {shards} does not divide the {world_size} ranks")
        keep, regather = Keep.USE, shards
        if self.name in ("shard_grad_op", "no_shard"):
            keep = Keep.UPDATE
        elif self.reshard_after_forward is False:
            keep = Keep.BACKWARD
        elif self.reshard_after_forward is not True:
            regather = self.reshard_after_forward
            if shards % regather:
                raise ArgumentError(
                    f"reshard_after_forward={regather} does not divide the {shards} ranks that "
                    "share a copy of the parameters"
                )
            keep = Keep.BACKWARD if regather == 1 else Keep.USE
        if keep is Keep.BACKWARD:
            regather = shards
        return Placement(shards, world_size // shards, regather, keep)


@dataclass(frozen=True)
class Placement:
    """A strategy for a certain number of ranks.

    Attributes:
        shards: ranks that share one copy of parameters, gradients and optimizer state; neighbours.
        replicas: how many such groups there are.
        regather: ranks among which the backward pass gathers; ``shards``, or fewer where each rank
            keeps a larger part after the forward pass.
        keep: how long gathered parameters stay.
    """

    shards: int
    replicas: int
    regather: int
    keep: Keep

    @property
    def gathers(self) -> bool:
        """Whether there is anything to gather."""
        return self.shards > 1
