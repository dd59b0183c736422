"""One flat buffer of a unit: its parameters of one dtype, all of which are trained, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.core.device import HOST, Device
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.offload.arrays import ArrayKind
from fsdpcore.fsdp.offload.offload_store import OffloadStore
from fsdpcore.fsdp.units.binding import Binding
from fsdpcore.fsdp.units.declaration import UnitDeclaration
from fsdpcore.fsdp.units.filling import fill
from fsdpcore.fsdp.units.precision import Dtypes
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.fsdp.units.storage import ParameterStorage
from fsdpcore.fsdp.units.storages import make_storage
from fsdpcore.fsdp.units.views import Places, read_only


class FlatParameter:
    """The parameters of one flat buffer, and this rank's shard of them.

    Args:
        unit: name of the unit.
        params: names, with the arrays or specs to begin with.
        dtypes: of the master shard and of what is gathered.
        shards: number of shards.
        block: see ``FlatLayout``.

    Attributes:
        layout: where each parameter lies.
        storage: what is gathered; made by ``bind``.
        master: this rank's shard at full precision, which ``storage.own`` is a rounded copy of, or
            the same; to be written after ``storage.claim`` only.
    """

    def __init__(
        self,
        unit: str,
        params: Mapping[str, Array | Spec],
        dtypes: tuple[np.dtype[Any], np.dtype[Any]],
        shards: int,
        block: int,
    ) -> None:
        self._unit = unit
        self._params: Mapping[str, Array | Spec] = params
        self._master_dtype, param = dtypes
        shapes = {name: value.shape for name, value in params.items()}
        self.layout = FlatLayout.build(shapes, param, shards, block)
        self.places = Places(unit, self.layout)
        self.storage: ParameterStorage
        self.master: Array
        self._device: Device = HOST
        self.rank = 0
        self.valid_size = self.layout.valid_size(0)

    def bind(
        self, binding: Binding, store: OffloadStore, flat: Array | None, *, trained: bool
    ) -> None:
        """Make the memory, and write this rank's shard of the initial values.

        Args:
            binding: of the engine.
            store: of the unit's arrays.
            flat: the place in the window, if there is one.
            trained: whether these parameters are.
        """
        self.rank, self._device = binding.groups.shards.rank, binding.groups.device
        self.valid_size = self.layout.valid_size(self.rank)
        kind = ArrayKind.TRAINED if trained else ArrayKind.FROZEN
        self.storage = make_storage(
            self.places,
            binding,
            store.allocate(kind),
            flat,
            away=kind in store.away,
            trained=trained,
        )
        if flat is not None:
            store.note(kind, self.storage.own)
        if trained:
            store.mark(ArrayKind.OWN, self.storage.own)
        if self._master_dtype == self.layout.dtype and not self.storage.lags:
            self.master = self.storage.own
        else:
            allocate = store.allocate(ArrayKind.MASTER)
            self.master = allocate(self.layout.shard_size, self._master_dtype)
            self.master[self.valid_size :] = 0
        if self.storage.lags:
            self.storage.follow(self.master)
        self._fill(binding.seed)
        self._params = {}
        self.publish()

    def _fill(self, seed: int) -> None:
        """Write the initial values."""
        for piece in self.layout.pieces(self.rank):
            value = self._params[piece.name]
            target = self.master[piece.shard_start : piece.shard_stop]
            if isinstance(value, Spec):
                name = f"{self._unit}.{piece.name}"
                fill(self._device, target, value, piece.param_start, seed=seed, name=name)
            else:
                flat = value.reshape(-1)
                self._device.assign(target, flat[piece.param_start : piece.param_stop])

    @property
    def mixed(self) -> bool:
        """Whether the master shard is apart from what is gathered."""
        return self.master is not self.storage.own

    @property
    def copy(self) -> Array | None:
        """What an update writes the rounded masters to; None where there is no such thing."""
        return self.storage.own if self.mixed and not self.storage.lags else None

    @property
    def shard(self) -> Array:
        """The master shard, read-only."""
        return read_only(self.master) if self.mixed else self.storage.shard

    def free(self) -> None:
        """Let go of all arrays, for good."""
        del self.storage, self.master

    @property
    def received(self) -> Array | None:
        """What all ranks have of the master shard, where that is no rounded copy."""
        return self.storage.own if self.storage.lags else None

    def publish(self, *, received: bool = False) -> None:
        """Round the master shard into what is gathered, after it was written.

        Args:
            received: ``received`` was written, too: it stays, but where it is nan.
        """
        self.storage.rewritten()
        if self.storage.lags and received:
            self.complete_received(self.master)
        elif self.mixed:
            self._device.assign(self.storage.own, self.master)

    def complete_received(self, values: Array) -> None:
        """Write values where ``received`` is nan."""
        xp, own = self._device.xp, self.storage.own
        xp.copyto(own, values, where=xp.isnan(own))

    def load(self, values: Mapping[str, Array]) -> None:
        """Write this rank's master shard of those parameters that ``values`` has, in full shape.

        They are arrays of the host or of the device. ``publish`` is for the caller.
        """
        for piece in self.layout.pieces(self.rank):
            if piece.name in values:
                flat = values[piece.name].reshape(-1)
                target = self.master[piece.shard_start : piece.shard_stop]
                self._device.assign(target, flat[piece.param_start : piece.param_stop])


def lay_out(
    unit: UnitDeclaration, dtypes: Dtypes, shards: int, block: int
) -> tuple[FlatParameter, ...]:
    """Fix how the parameters of a unit are sharded: what is trained, then what is frozen, by dtype.

    There is one for what is trained even if that is nothing.
    """
    initial = unit.initial
    assert initial is not None
    trained = {key: value for key, value in initial.items() if key not in unit.frozen}
    found = [FlatParameter(unit.name, trained, (dtypes.master, dtypes.param), shards, block)]
    for dtype in dict.fromkeys(initial[key].dtype for key in initial if key in unit.frozen):
        group = {k: v for k, v in initial.items() if k in unit.frozen and v.dtype == dtype}
        kept = dtypes.param if dtype == dtypes.master else dtype
        found.append(FlatParameter(unit.name, group, (kept, kept), shards, block))
    return tuple(found)
