"""Where the parameters of a unit lie, and what the ranks agree on before they read or write them.

``ShardedStorage``: every rank holds its shard, and gathers the others' into a buffer of the pool.
After the forward pass it may keep a larger part, so that fewer ranks gather for the backward pass.

``ReplicatedStorage``: every rank holds all parameters, and gathers them after they were written.

``PinnedReplicaStorage``: the same where a GPU computes, but the host's memory holds them: they are
copied into a buffer of the pool while they are used.

``SharedWindowStorage``: all ranks are on one host and map one window, in which the flat buffer lies
once. A rank's shard is its slice of it; it writes there only, and reads all of it while the unit is
not SHARDED. No bytes move, but two things must never happen: that a rank reads what another has not
finished writing, and that it writes what another still reads. Both follow from collectives: in
shared memory no rank leaves one before all have entered it, which messages alone do not promise.

1. *Reading*. Before a rank reads a unit, all ranks must have met since the unit was last written.
   They had written whatever they write when they entered, so one meeting serves all units
   (``WindowMeetings``): that of the first ``unshard`` after an update.
2. *Writing* needs a collective since the last ``unshard`` which every rank has entered with the
   unit SHARDED, that is, with reading ended. A rank that reads again has called ``unshard`` again.
   All ranks make the same calls, so the writer has noted it, too (``exposed``). The reduction of
   the unit's gradients is such a collective if the unit was resharded before; whether it was is
   part of what the ranks compare. So training, which ends a backward pass by ``reshard`` and then
   the reduction, pays nothing for it. Where there was none, ``claim`` is one of its own.

Ranks that make other calls must be found out before one of them writes what another reads. Before
an update they compare their passes. Where they do not, ``claim`` is a collective in any case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.core.work import Work
from fsdpcore.fsdp.sharding.placement import StorageKind, all_gather_sends
from fsdpcore.fsdp.units.views import Params, Places, read_only
from fsdpcore.fsdp.units.wire import QuantisedGather


class ParameterStorage(ABC):
    """The parameters of one unit, or some of them, as one rank has them.

    Args:
        kind: where they are.
        shards: the ranks that have different shards.
        places: as the attribute, and ``own``.

    Attributes:
        places: where each parameter lies.
        own: this rank's shard, flat, padding included; to be written after ``claim`` only.
        shard: the same, read-only.
        stale: ``gather`` would get data from other ranks.
        gathered_bytes: what a gathering takes from the pool.
        quantised: how it is gathered, if not as it is; set by ``make_storage``.
    """

    quantised: QuantisedGather | None = None

    def __init__(self, kind: StorageKind, shards: Backend, places: Places, own: Array) -> None:
        layout, rank = places.layout, shards.rank
        self.places = places
        self.own = own
        self.shard = read_only(own)
        self.stale = kind.moves
        full = layout.padded_size * layout.dtype.itemsize
        self.gathered_bytes = full if kind.takes_buffer else 0
        self._kind = kind
        self._shards = shards
        own[layout.valid_size(rank) :] = 0

    @property
    def shown(self) -> Array | None:
        """All parameters, where they lie all the time; None where they are gathered."""
        return None

    @property
    def windowed(self) -> bool:
        """Whether the ranks of a host hold the parameters together, in a window."""
        return self._kind.shared

    @property
    def fetched(self) -> bool:
        """Whether ``gather`` would move data, so that it pays to begin ahead."""
        return self.stale or self._kind.takes_buffer

    @property
    def sends(self) -> int:
        """Bytes that this rank sends in ``gather``, at the least that is possible."""
        if self.stale and self._quantises is not None:
            return self._quantises.sends
        return all_gather_sends(self.places.layout, self._group.world_size) if self.stale else 0

    @property
    def _quantises(self) -> QuantisedGather | None:
        """How the next gathering quantises; None if it does not."""
        return self.quantised

    @property
    def lags(self) -> bool:
        """Whether ``own`` is what all ranks have of the master shard, which is apart."""
        return self.quantised is not None and self._kind.keeps

    def follow(self, master: Array) -> None:  # noqa: B027 - most need not know
        """Take note of the master shard, where ``lags``."""

    def rewritten(self) -> None:  # noqa: B027 - most need not know
        """Take note that ``own`` is about to be written anew, not by an update; on all ranks."""

    @property
    def fills(self) -> bool:
        """Whether ``gather`` would write to what this rank holds all the time."""
        return self.stale and not self._kind.takes_buffer

    @property
    def _group(self) -> Backend:
        """The ranks that gather together."""
        return self._shards

    @abstractmethod
    def gather(self, what: str, *, async_op: bool) -> Work | None:
        """Have all parameters readable; a collective, maybe in the background.

        On a GPU it always is: so all that an engine moves there goes one after the other through
        one stream, and groups of ranks need not wait for each other in two orders at once.

        Args:
            what: the user's word for it, which the ranks compare.
            async_op: do not wait for the end.

        Returns:
            What is to be waited for; None where they are readable.
        """

    @property
    @abstractmethod
    def params(self) -> Params:
        """All parameters; after ``gather``, until ``free``."""

    @abstractmethod
    def free(self, *, again: bool) -> None:
        """End reading, ``again`` if the backward pass is still to come; not a collective."""

    @abstractmethod
    def claim(self, *, agreed: bool) -> None:
        """Have all ranks end reading before this one writes to ``own``; called by all of them.

        ``agreed`` says that they have compared their passes since.
        """

    def end_writing(self) -> None:  # noqa: B027 - most need not know
        """Take note that writing to ``own`` has ended, after ``claim``."""

    def reduced(self) -> None:  # noqa: B027 - most need not know
        """Take note that all ranks entered the reduction of the gradients with the unit SHARDED."""


def place_of(flat: Array, layout: FlatLayout, rank: int) -> Array:
    """Return the shard of a rank in a flat buffer."""
    start, stop = layout.shard_bounds(rank)
    return flat[start:stop]
