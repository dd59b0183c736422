"""Collective operations over any ``Backend``.

====================================  ============================================================
``operations``                        one file per operation: its record, its public function
``spec``, ``arguments``               what follows from a call's arguments: ``CallSpec``
``run``, ``output``, ``on_device``    how a call runs: in order, checked, in time; its result
``context``                           the group, as an algorithm sees it during one call
``agreement``, ``fingerprint``        how ranks that call different things find out
``algorithms``                        one file per algorithm that sends messages, with its formula
``shared``                            memory that ranks share: that they agree, and the algorithm
``hierarchy``                         two levels: memory inside of hosts, messages between them
``selection``                         which algorithm "auto" takes; what users and tables say of it
``batch``                             many small operations in few messages
====================================  ============================================================

ARCHITECTURE.md follows one call through them.
"""

from fsdpcore.collectives.batch.bucketed import all_reduce_many
from fsdpcore.collectives.batch.coalesce import Batch, coalesce
from fsdpcore.collectives.methods import CollectiveMethods
from fsdpcore.collectives.operations.table import *  # noqa: F403
from fsdpcore.collectives.operations.table import __all__ as _operations
from fsdpcore.comm.backend import provide_collectives

__all__ = ["Batch", "all_reduce_many", "coalesce", *_operations]

provide_collectives(CollectiveMethods)
