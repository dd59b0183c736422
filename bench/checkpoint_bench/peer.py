"""PyTorch's distributed checkpoint (DCP) of a plain sharded state, on Gloo.

Every array is a ``DTensor`` that is sharded by rows, with memory of its own, as ``fully_shard``
keeps parameters. ``FileSystemWriter`` syncs its files unless told not to (``sync_files=True``), but
not the directory. Saves in the background have a stager that lives on, so that only the first one
makes memory, and a process group of their own.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch_group
from torch_group import torch

from checkpoint_bench import model
from checkpoint_bench.cases import Case
from checkpoint_bench.job import OwnPart, StateJob, Wait

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
tensors: Any = importlib.import_module("torch.distributed.tensor")


class Group(torch_group.Group):
    """With a process group for saves in the background."""

    def __init__(self, rank: int, world_size: int, store: str, threads: int) -> None:
        super().__init__(rank, world_size, store, threads)
        self.background = torch_group.dist.new_group(backend="gloo")


class PeerJob(StateJob):
    """The same arrays, in DTensors."""

    def __init__(self, case: Case, group: Group) -> None:
        # That it may be changed one day, and that a process of one rank needs no group.
        warnings.filterwarnings("ignore", module="torch.distributed")
        self._group = group
        self._stager: Any = None
        self._state = {
            name: self._sharded(shape)
            for name, shape in model.arrays(case.nbytes, case.layers).items()
        }
        self.fill()

    def _sharded(self, shape: model.Shape) -> Any:
        start, stop = self._rows(shape)
        strides = torch.empty(shape, device="meta").stride()
        return tensors.DTensor.from_local(
            torch.zeros((stop - start, *shape[1:])),
            self._group.mesh,
            [tensors.Shard(0)],
            run_check=False,
            shape=torch.Size(shape),
            stride=strides,
        )

    def _rows(self, shape: model.Shape) -> tuple[int, int]:
        share = -(-shape[0] // self._group.world_size)
        start = min(shape[0], share * self._group.rank)
        return start, min(shape[0], start + share)

    def barrier(self) -> None:
        self._group.barrier()

    def save(self, folder: Path, step: int) -> None:
        writer = dcp.FileSystemWriter(
            folder / str(step), sync_files=True, thread_count=self.threads
        )
        dcp.save(self._state, storage_writer=writer)

    def load(self, folder: Path, step: int) -> None:
        dcp.load(self._state, storage_reader=dcp.FileSystemReader(folder / str(step)))

    def save_async(self, folder: Path, step: int) -> Wait:
        if self._stager is None:
            # Neither pinned nor shared memory; staged before it returns, not by a thread.
            plain = staging.StagingOptions(False, False, False, False)
            self._stager = staging.DefaultStager(plain)
        future = dcp.async_save(
            self._state,
            checkpoint_id=folder / str(step),
            process_group=self._group.background,
            async_stager=self._stager,
        )
        wait: Wait = future.result
        return wait

    def parts(self) -> Iterator[OwnPart]:
        for name, tensor in self._state.items():
            start, _ = self._rows(tensor.shape)
            row = tensor.shape[1:].numel()
            yield OwnPart(name, start * row, tensor.to_local().view(-1).numpy())

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
