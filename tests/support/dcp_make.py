"""Distributed checkpoints as PyTorch writes them, and what is in them, in NumPy.

The one in ``tests/data/dcp`` was written by two processes, with PyTorch 2.13::

    PYTHONPATH=tests python -m support.dcp_make tests/data/dcp
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np

DATA = Path(__file__).parent.parent / "data" / "dcp"

OBJECTS = {"optim.step"}


def arrays():
    """What is in the checkpoint, by name."""
    return {
        "model.rows": np.arange(15, dtype=np.float32).reshape(5, 3),
        "model.columns": np.arange(28, dtype=np.int32).reshape(4, 7),
        "model.turned": np.arange(12, dtype=np.float64).reshape(3, 4).T,
        "model.half": np.array([1.5, -2.0, np.inf], ml_dtypes.bfloat16),
        "model.eighth": np.array([0.5, 448.0, -1.0], ml_dtypes.float8_e4m3fn),
        "optim.scalar": np.array(2.5, np.float32),
    }


def state_of(mesh):
    """The same for PyTorch, as this process has it."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    def tensor(array):
        # PyTorch knows no types of ml_dtypes.
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == ml_dtypes.float8_e4m3fn:
            return torch.from_numpy(array.view(np.int8)).view(torch.float8_e4m3fn)
        return torch.from_numpy(array)

    found = {name: tensor(array) for name, array in arrays().items()}
    for name, axis in (("model.rows", 0), ("model.columns", 1)):
        if mesh is not None:
            found[name] = distribute_tensor(found[name], mesh, [Shard(axis)])
    return {"optim": {"step": 7}, **found}


def trained(mesh):
    """A model and AdamW after a step under FSDP2, as DCP saves them, and all of it in NumPy."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    params, state = get_state_dict(model, optimizer)
    found = {f"model.{name}": each for name, each in params.items()}
    for name, entry in state["state"].items():
        found |= {f"optim.state.{name}.{kind}": each for kind, each in entry.items()}
    full = {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).numpy()
        for name, each in found.items()
    }
    return {"model": params, "optim": state}, full


def write(rank, world, folder, model=False):
    """Write the checkpoint, as one of ``world`` processes."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")  # of writes that a single process makes
    mesh = None
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path.cwd()}/{folder}.met", rank=rank, world_size=world
        )
        mesh = dist.init_device_mesh("cpu", (world,))
    if model:
        state, full = trained(mesh)
        if rank == 0:
            np.savez(f"{folder}.npz", **full)
    else:
        state = state_of(mesh)
    dcp.save(state, checkpoint_id=folder)
    if world > 1:
        dist.destroy_process_group()


def main(folder, world=2, model=False):
    import torch.multiprocessing as processes

    folder = folder.absolute()
    os.chdir(folder.parent)  # as the checkpoint has the path that it was given
    processes.spawn(write, (world, folder.name, model), nprocs=world)
    Path(f"{folder}.met").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2] if sys.argv[2:] else 2), model="model" in sys.argv)
