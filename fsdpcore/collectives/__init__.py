"""Collective operations over any ``Backend``.

``api`` and ``ragged`` hold the operations, one file per algorithm moves the data, ``select``
chooses among them, ``fingerprint`` makes sure that the ranks agree, ``call`` runs it all.
``coalesce`` and ``bucketed`` put many small operations into few messages.
"""

from fsdpcore.collectives.api import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    reduce_scatter,
)
from fsdpcore.collectives.bucketed import all_reduce_many
from fsdpcore.collectives.coalesce import Batch, coalesce
from fsdpcore.collectives.ragged import (
    all_gather_v,
    all_to_all_v,
    gather_v,
    reduce_scatter_v,
    scatter_v,
)
from fsdpcore.collectives.rooted import broadcast, gather, reduce, scatter

__all__ = [
    "Batch",
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_reduce_many",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "coalesce",
    "gather",
    "gather_v",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_v",
    "scatter",
    "scatter_v",
]
