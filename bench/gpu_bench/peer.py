"""PyTorch's FSDP2 on NCCL: the process group. The model is that of ``fsdp_bench.peer_training``."""

from __future__ import annotations

import os
import warnings
from typing import Any

from fsdp_bench.peer_exchange import fsdp
from fsdp_bench.peer_training import PeerTraining
from torch_group import Group, device_mesh, dist, torch

__all__ = ["GpuGroup", "PeerTraining", "peak", "reset_peak"]


class GpuGroup(Group):
    """All ranks, with a GPU each or one in common.

    Args:
        rank, world_size: of this process.
        store: file through which the ranks meet.
        share_gpu: they are all on the first GPU.
    """

    def __init__(self, rank: int, world_size: int, store: str, *, share_gpu: bool) -> None:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        if share_gpu:  # NCCL must not find out: see WAYS in probe_two.py
            os.environ.setdefault("NCCL_HOSTID", f"rank{rank}")
            os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        index = 0 if share_gpu else rank
        torch.cuda.set_device(index)
        dist.init_process_group(
            "nccl", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        self.rank, self.world_size = rank, world_size
        self.device = f"cuda:{index}"
        self.mesh = device_mesh.init_device_mesh("cuda", (world_size,))
        self.policy: dict[str, Any] = {}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        self.versions = {"torch": str(torch.__version__), "torch's nccl": nccl}

    @classmethod
    def of(cls, options: Any) -> GpuGroup:
        store, share_gpu = options["store"], options["share_gpu"]
        return cls(options["rank"], options["world_size"], store, share_gpu=share_gpu)

    def barrier(self) -> None:
        """Block until all ranks are here, and their GPUs have done what they were given."""
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def choose(self, precision: str) -> None:
        """Take a precision for the models that are made from now on."""
        if precision == "bf16":
            mixed = fsdp.MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
            self.policy = {"mp_policy": mixed}
        else:
            self.policy = {}


def reset_peak() -> None:
    """Begin a new peak of what PyTorch has allocated on the GPU."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    """Bytes that PyTorch had from CUDA at most, since ``reset_peak``."""
    return int(torch.cuda.max_memory_reserved())
