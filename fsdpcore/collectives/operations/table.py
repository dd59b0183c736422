"""The collectives that move data, and the public functions of all."""

from fsdpcore.collectives.operations.all_gather import ALL_GATHER, all_gather, all_gather_v
from fsdpcore.collectives.operations.all_reduce import ALL_REDUCE, all_reduce
from fsdpcore.collectives.operations.all_to_all import ALL_TO_ALL, all_to_all, all_to_all_v
from fsdpcore.collectives.operations.barrier import barrier
from fsdpcore.collectives.operations.broadcast import BROADCAST, broadcast
from fsdpcore.collectives.operations.exscan import EXSCAN, exscan
from fsdpcore.collectives.operations.gather import GATHER, gather, gather_v
from fsdpcore.collectives.operations.reduce import REDUCE, reduce
from fsdpcore.collectives.operations.reduce_scatter import (
    REDUCE_SCATTER,
    reduce_scatter,
    reduce_scatter_v,
)
from fsdpcore.collectives.operations.scan import SCAN, scan
from fsdpcore.collectives.operations.scatter import SCATTER, scatter, scatter_v
from fsdpcore.collectives.spec import Operation

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        ALL_REDUCE,
        REDUCE,
        REDUCE_SCATTER,
        SCAN,
        EXSCAN,
        BROADCAST,
        ALL_GATHER,
        GATHER,
        SCATTER,
        ALL_TO_ALL,
    )
}

__all__ = [
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "gather_v",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_v",
    "scan",
    "scatter",
    "scatter_v",
]
