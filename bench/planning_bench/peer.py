"""PyTorch's DCP, planning for the same pieces: each a chunk of a tensor, written by its rank."""

from __future__ import annotations

import importlib
import pickle
import time
from dataclasses import dataclass
from typing import Any

from fsdpcore.core.geometry.regions import Range, Region
from planning_bench.layouts import Layout


@dataclass(frozen=True)
class PeerMeasured:
    """Seconds to plan a save, to make and write down the metadata, and to read that."""

    plan: float
    metadata: float
    load: float

    @property
    def save(self) -> float:
        """Of the coordinator, in all."""
        return self.plan + self.metadata


def measure_dcp(layout: Layout) -> PeerMeasured:
    """Plan once; raises ImportError without PyTorch."""
    info = _dcp("filesystem")._StorageInfo
    plans = [_plan(layout, rank) for rank in range(layout.ranks)]
    planner = _dcp("default_planner").DefaultSavePlanner(flatten_state_dict=False)
    began = time.perf_counter()
    made, metadata = planner.create_global_plan(plans)
    planned = time.perf_counter() - began
    # What the writers of all ranks send back.
    results = [
        [(item.index, info(f"__{rank}_0.distcp", 0, 1)) for item in plan.items]
        for rank, plan in enumerate(made)
    ]
    began = time.perf_counter()
    metadata.storage_data = {index: told for each in results for index, told in each}
    data = pickle.dumps(metadata)
    written = time.perf_counter() - began
    del plans, made, metadata, results, planner
    began = time.perf_counter()
    pickle.loads(data)  # noqa: S301  # what this function has pickled
    return PeerMeasured(planned, written, time.perf_counter() - began)


def _plan(layout: Layout, rank: int) -> Any:
    torch, metadata, planner = importlib.import_module("torch"), _dcp("metadata"), _dcp("planner")
    properties = metadata.TensorProperties(dtype=torch.float32)
    items = []
    for array in layout.holding(rank):
        for piece in array.pieces:
            offsets, sizes, size = _chunk(piece.region, array.shape)
            chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = planner.TensorWriteData(chunk, properties, torch.Size(size))
            index = metadata.MetadataIndex(array.name, torch.Size(offsets))
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
    return planner.SavePlan(items)


def _dcp(name: str) -> Any:
    return importlib.import_module(f"torch.distributed.checkpoint.{name}")


def _chunk(region: Region, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return offsets, sizes and the tensor's size; where pieces are ranges the tensor is flat."""
    if not isinstance(region, Range):
        return region.start, region.shape, shape
    size = 1
    for extent in shape:
        size *= extent
    return (region.start,), (region.size,), (size,)
