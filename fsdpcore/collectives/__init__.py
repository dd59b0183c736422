"""Collective operations over any ``Backend``.

==========================================  ======================================================
``api``, ``rooted``, ``ragged``             the operations: arguments in, ``Call`` and body out
``coalesce``, ``packs``, ``bucketed``       many small operations in few messages
``call``, ``lane``, ``output``              how a call runs: in order, checked, in time; its result
``fingerprint``, ``area``                   that the ranks agree: by messages, or in shared memory
``link``                                    the group, as an algorithm sees it during one call
``star``, ``direct``, ``ring``, ``tree``,   one file per algorithm, with its cost formula, over the
``doubling``, ``halving``, ``bruck``,       messages of a ``CollectiveContext``
``rabenseifner``, ``scatter_gather``,
``hierarchical``
``shared``                                  the algorithm that works in an ``SharedRegion``
``algorithms``, ``traffic``                 the table of algorithms and their costs
``select``, ``overrides``, ``costs``        which one "auto" takes; what the user, tables say of it
``measure``                                 what ``fsdpcore tune`` runs on every rank
==========================================  ======================================================

ARCHITECTURE.md follows one call through them.
"""

from fsdpcore.collectives.batch.bucketed import all_reduce_many
from fsdpcore.collectives.batch.coalesce import Batch, coalesce
from fsdpcore.collectives.methods import CollectiveMethods
from fsdpcore.collectives.operations.api import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    reduce_scatter,
)
from fsdpcore.collectives.operations.ragged import (
    all_gather_v,
    all_to_all_v,
    gather_v,
    reduce_scatter_v,
    scatter_v,
)
from fsdpcore.collectives.operations.rooted import broadcast, gather, reduce, scatter
from fsdpcore.comm.backend import provide_collectives

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

provide_collectives(CollectiveMethods)
