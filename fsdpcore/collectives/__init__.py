"""Collective operations over any ``Backend``.

``api`` and ``ragged`` hold the operations, one file per algorithm moves the data, ``select``
chooses among them, ``fingerprint`` makes sure that the ranks agree, ``call`` runs it all.
"""

from fsdpcore.collectives.api import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from fsdpcore.collectives.ragged import all_gather_v, all_to_all_v, reduce_scatter_v

__all__ = [
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_v",
    "scatter",
]
