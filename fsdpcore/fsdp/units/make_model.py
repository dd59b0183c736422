"""What an engine makes of the units that it gets: they are checked, laid out, and get memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdpcore.collectives import all_gather
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.geometry.leaf_tree import LeafTree
from fsdpcore.fsdp.offload.offload_store import OffloadFile
from fsdpcore.fsdp.offload.stores import open_stores
from fsdpcore.fsdp.optim.groups import Given
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.sharding.tensor_group import checked_tensor, everyone_of
from fsdpcore.fsdp.sharding.virtual_ranks import LEAF_BLOCK, Leaves
from fsdpcore.fsdp.units.agree_units import check_same, exchange_tilings
from fsdpcore.fsdp.units.arithmetic import agree_on_arithmetic
from fsdpcore.fsdp.units.binding import Binding
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.check_units import check_optimizers, check_order, check_units
from fsdpcore.fsdp.units.model import EngineStatus, ShardedModel
from fsdpcore.fsdp.units.optimizers import Optimizers
from fsdpcore.fsdp.units.options import EngineOptions
from fsdpcore.fsdp.units.persistent import persistent_of
from fsdpcore.fsdp.units.precision import Scaler
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit
from fsdpcore.fsdp.units.unit import Unit, hand_over
from fsdpcore.fsdp.units.window import WindowMeetings, open_window
from fsdpcore.fsdp.units.wire import Wire, check_composes
from fsdpcore.fsdp.units.wire import check_units as check_quantised


def make_model(
    units: Sequence[Unit],
    backend: Backend,
    options: EngineOptions,
    optimizer: Given | None,
    tensor: Backend | None,
) -> ShardedModel:
    """Lay units out that all ranks have alike, without memory; a collective.

    The arguments, and what it raises, are those of ``FSDP``.
    """
    placement = options.strategy.place(backend.world_size)
    tensor = checked_tensor(tensor, backend)
    check_units(units, backend.device, has_tensor=tensor is not None)
    compression = options.compression
    if compression is not None:
        check_composes(compression, options, tensor)
    optimizers = None if optimizer is None else Optimizers(optimizer, units)
    everyone = everyone_of(backend, tensor)
    check_same(units, backend, everyone, repr((optimizers, options)))
    groups = ProcessGroups.of(backend, placement, everyone, tensor)
    if tensor is not None:
        exchange_tilings(units, tensor, backend.device)
        check_optimizers(units, optimizers)
    virtual = options.virtual_ranks is not None
    if virtual:
        check_order(units, optimizers)
        agree_on_arithmetic(everyone)
    tree = LeafTree(options.virtual_ranks or backend.world_size)
    leaves = Leaves(tree, placement, backend.rank, virtual)
    shards, block = groups.shards.world_size, LEAF_BLOCK if virtual else 1
    wire = None if compression is None else Wire(compression, groups, options.algorithm)
    lags = wire is not None and wire.travel.lags
    sharded = tuple(
        ShardedUnit(unit, options.precision, shards, block, lags=lags) for unit in units
    )
    if compression is not None:
        check_quantised(compression, sharded)
    scaler = Scaler(options.precision.scaling)
    return ShardedModel(sharded, groups, options, optimizers, scaler, EngineStatus(), leaves, wire)


@dataclass(frozen=True)
class ModelMemory:
    """Where the arrays of an engine's units are.

    Attributes:
        file: that they are offloaded to; None in memory.
        window_bytes: of the window that the parameters are in; 0 where there is none.
        all_windowed: those of all other copies and boxes are in a window, too.
    """

    file: OffloadFile | None
    window_bytes: int
    all_windowed: bool

    @property
    def windowed(self) -> bool:
        """Whether the parameters are in a window."""
        return self.window_bytes > 0


def make_memory(model: ShardedModel, units: Sequence[Unit], pool: BufferPool) -> ModelMemory:
    """Make the memory of all units: in a window, in files, or of their own; a collective.

    Args:
        model: what was made of ``units``, which it takes over.
        units: as they were declared.
        pool: of gathered parameters and full gradients.
    """
    groups, options = model.groups, model.options
    quantised = model.wire is not None and model.wire.travel.gathers
    wanted = options.window and options.offload is None and not quantised
    parts = [part for unit in model.units for part in unit.flat_parameters]
    window = open_window([part.layout for part in parts], groups.shards) if wanted else None
    windowed = all_windowed = window is not None
    if wanted and groups.everyone is not groups.shards and groups.device.on_host:
        all_windowed = bool(all_gather(windowed, groups.everyone, label="windows").all())
    persistent = [
        persistent_of(
            unit, groups.placement, groups.shards.rank, model.optimizers, windowed=windowed
        )
        for unit in model.units
    ]
    stores = open_stores(options.offload, persistent, groups)
    flats: Iterator[Array | None] = iter(window.flats if window else [None] * len(parts))
    binding = Binding(
        groups,
        pool,
        model.optimizers,
        options.strategy.name,
        options.algorithm,
        options.seed,
        model.leaves,
        model.wire,
        WindowMeetings(),
        [0] * groups.shards.world_size,
    )
    for unit, sharded, store in zip(units, model.units, stores.each, strict=True):
        sharded.bind(binding, [next(flats) for _ in sharded.flat_parameters], store)
        hand_over(unit, sharded)
    for sharded in model.units:
        sharded.owners = {name: model[tie.unit] for name, tie in sharded.ties.items()}
    return ModelMemory(stores.file, window.nbytes if window else 0, all_windowed)
