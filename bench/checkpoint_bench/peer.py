"""PyTorch's distributed checkpoint (DCP) of a plain sharded state, on Gloo.

Every array is a ``DTensor`` that is sharded by rows, with memory of its own, as ``fully_shard``
keeps parameters. ``FileSystemWriter`` syncs its files unless told not to (``sync_files=True``), but
not the directory. Saves in the background have a stager that lives on, so that only the first one
makes memory, and a process group of their own.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint_bench import model
from checkpoint_bench.cases import Case
from checkpoint_bench.job import Job, Part, Wait

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")
staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
tensors: Any = importlib.import_module("torch.distributed.tensor")
device_mesh: Any = importlib.import_module("torch.distributed.device_mesh")


class Group:
    """All ranks, on the gloo backend over the loopback interface."""

    def __init__(self, rank: int, world_size: int, store: str, threads: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(threads)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        self.rank, self.world_size = rank, world_size
        self.mesh = device_mesh.init_device_mesh("cpu", (world_size,))
        self.background = dist.new_group(backend="gloo")
        self.versions = {"torch": str(torch.__version__)}

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()


class PeerJob(Job):
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
        dist.barrier()

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

    def parts(self) -> Iterator[Part]:
        for name, tensor in self._state.items():
            start, _ = self._rows(tensor.shape)
            row = tensor.shape[1:].numel()
            yield Part(name, start * row, tensor.to_local().view(-1).numpy())

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
