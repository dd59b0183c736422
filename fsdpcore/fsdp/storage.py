"""Where the parameters of a unit lie, and what the ranks agree on before they read or write them.

``Separate``: every rank holds its shard, and gathers the others' into a buffer of the pool.

``Windowed``: all ranks are on one host and map one window, in which the flat buffer lies once. A
rank's shard is its slice of it; it writes there only, and reads all of it while the unit is not
SHARDED. No bytes move, but two things must never happen: that a rank reads what another has not
finished writing, and that it writes what another still reads. Both follow from collectives, since
no rank leaves one before all have entered it; and as the ranks compare what each collective is for,
they enter the same one.

1. *Reading* begins with a collective of no data, ``unshard``. A rank writes in state SHARDED only,
   so whatever it has written was complete when it entered, and is visible to those who leave.
2. *Writing* needs a collective since the last ``unshard`` which every rank has entered with the
   unit SHARDED, that is, with reading ended. After it nobody can have begun anew, because that
   is a collective in which the writing rank would take part. The reduction of the unit's gradients
   is such a collective if the unit was resharded before; whether it was is part of what
   the ranks compare. So training, which ends a backward pass by ``reshard`` and then the reduction,
   pays nothing for it. Where there was none (``exposed``), ``claim`` is one of its own. ``exposed``
   changes by collectives alone, so it is the same on all ranks, and they agree on whether there
   is a claim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array
from fsdpcore.collectives import all_gather, barrier
from fsdpcore.fsdp.buffers import BufferPool
from fsdpcore.fsdp.views import Params, Places, read_only


class Storage(ABC):
    """The parameters of one unit, as one rank has them.

    Attributes:
        places: where each parameter lies.
        own: this rank's shard, flat, padding included; to be written after ``claim`` only.
        shard: the same, read-only.
    """

    def __init__(self, backend: Backend, places: Places, own: Array) -> None:
        self.places = places
        self.own = own
        self.shard = read_only(own)
        self._backend = backend
        self._label = f"unit {places.unit}"
        size = places.layout.valid_size(backend.rank)
        own[size:] = 0

    @abstractmethod
    def gather(self, *, async_op: bool) -> Any:
        """Have all parameters readable; a collective. With ``async_op``, return its ``Work``."""

    @property
    @abstractmethod
    def params(self) -> Params:
        """All parameters; after ``gather``, until ``free``."""

    @abstractmethod
    def free(self) -> None:
        """End reading; not a collective."""

    @abstractmethod
    def claim(self) -> None:
        """Have all ranks end reading before this one writes to ``own``; called by all of them."""

    @abstractmethod
    def reduced(self) -> None:
        """Take note that all ranks entered the reduction of the gradients with the unit SHARDED."""


class Separate(Storage):
    """A shard on each rank, gathered into a buffer of the pool."""

    def __init__(self, backend: Backend, places: Places, algorithm: str, pool: BufferPool) -> None:
        own = backend.empty((places.layout.shard_size,), places.layout.dtype)
        super().__init__(backend, places, own)
        self._algorithm = algorithm
        self._pool = pool
        self._flat: Array | None = None
        self._params: Params | None = None

    def gather(self, *, async_op: bool) -> Any:
        layout = self.places.layout
        flat = self._pool.take(layout.padded_size, layout.dtype)
        try:
            started = all_gather(
                self.own,
                self._backend,
                out=flat,
                algorithm=self._algorithm,
                async_op=async_op,
                label=self._label,
            )
        except BaseException:
            self._pool.give(flat)
            raise
        self._flat = flat
        return started

    @property
    def params(self) -> Params:
        if self._params is None:
            assert self._flat is not None
            self._params = Params(self._flat, self.places)
        return self._params

    def free(self) -> None:
        if self._flat is not None:
            self._pool.give(self._flat)
        self._flat = self._params = None

    def claim(self) -> None:
        """Nothing to do: nobody else sees the shard outside of ``gather``."""

    def reduced(self) -> None:
        """Nothing to do."""


class Windowed(Storage):
    """A slice of the unit's flat buffer, which lies in memory that all ranks map.

    Attributes:
        exposed: the unit was unsharded since the last collective that all ranks entered with it
            sharded; the same on all ranks.
    """

    def __init__(self, backend: Backend, places: Places, flat: Array) -> None:
        start, stop = places.layout.shard_bounds(backend.rank)
        super().__init__(backend, places, flat[start:stop])
        self.exposed = False
        self._params = Params(flat, places)

    def gather(self, *, async_op: bool) -> Any:
        started = barrier(self._backend, async_op=async_op, label=self._label)
        self.exposed = True
        return started

    @property
    def params(self) -> Params:
        return self._params

    def free(self) -> None:
        """Nothing to do: the unit's state says that reading has ended."""

    def claim(self) -> None:
        if self.exposed:
            barrier(self._backend, label=f"{self._label}, to be written")
            self.exposed = False

    def reduced(self) -> None:
        self.exposed = False
