"""PyTorch's ranks: the process group of all peers that need one."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
device_mesh: Any = importlib.import_module("torch.distributed.device_mesh")


class Group:
    """All ranks, on the gloo backend over the loopback interface."""

    def __init__(self, rank: int, world_size: int, store: str, threads: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Linear layers return views, of which nothing here changes any in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        torch.set_num_threads(threads)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        self.rank, self.world_size = rank, world_size
        self.device = "cpu"
        self.mesh = device_mesh.init_device_mesh(self.device, (world_size,))
        self.policy: dict[str, Any] = {}  # further options of ``fully_shard``
        self.versions = {"torch": str(torch.__version__)}

    @classmethod
    def of(cls, options: Any) -> Group:
        """The group of a rank that was started with these options."""
        return cls(options["rank"], options["world_size"], options["store"], options["threads"])

    def barrier(self) -> None:
        """Block until all ranks are here."""
        dist.barrier()

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()
