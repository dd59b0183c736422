"""Checkpoints: each rank writes its share, and any number of ranks reads what it needs of them.

``save`` and ``load`` are collectives; ``AsyncCheckpointer`` saves while training goes on.
``latest``, ``read`` and the command ``fsdpcore ckpt`` need no ranks.
"""

from fsdpcore.checkpoint.interchange.dcp.loading import DcpLoaded, load_dcp, read_dcp
from fsdpcore.checkpoint.interchange.diff import Difference, diff
from fsdpcore.checkpoint.interchange.export import Exported, export_safetensors
from fsdpcore.checkpoint.interchange.importing import import_dcp, import_safetensors
from fsdpcore.checkpoint.interchange.rewrite import rewrite
from fsdpcore.checkpoint.interchange.verify import Problem, Verified, verify
from fsdpcore.checkpoint.load.distributed import load_distributed, reshard
from fsdpcore.checkpoint.load.finding import Latest, latest
from fsdpcore.checkpoint.load.load import Loaded, load
from fsdpcore.checkpoint.load.read import read
from fsdpcore.checkpoint.plan.kinds import PerRank
from fsdpcore.checkpoint.plan.shard_specs import (
    ShardMetadata,
    TensorShardSpec,
    compute_shard_sizes,
    flat_shard_metadata,
    flat_shard_sizes,
)
from fsdpcore.checkpoint.save.async_distributed import AsyncDistributedCheckpointer
from fsdpcore.checkpoint.save.async_save import AsyncCheckpointer
from fsdpcore.checkpoint.save.background import CheckpointFuture
from fsdpcore.checkpoint.save.distributed import save_distributed
from fsdpcore.checkpoint.save.save import save
from fsdpcore.checkpoint.save.step_folder import Saved
from fsdpcore.checkpoint.storage.cleaning import Cleaned, clean
from fsdpcore.checkpoint.storage.retention import Retention
from fsdpcore.checkpoint.storage.steps import metrics, steps
from fsdpcore.core.geometry.boxes import ArrayBox, BoxShard
from fsdpcore.core.geometry.regions import Box, Range

__all__ = [
    "ArrayBox",
    "AsyncCheckpointer",
    "AsyncDistributedCheckpointer",
    "Box",
    "BoxShard",
    "CheckpointFuture",
    "Cleaned",
    "DcpLoaded",
    "Difference",
    "Exported",
    "Latest",
    "Loaded",
    "PerRank",
    "Problem",
    "Range",
    "Retention",
    "Saved",
    "ShardMetadata",
    "TensorShardSpec",
    "Verified",
    "clean",
    "compute_shard_sizes",
    "diff",
    "export_safetensors",
    "flat_shard_metadata",
    "flat_shard_sizes",
    "import_dcp",
    "import_safetensors",
    "latest",
    "load",
    "load_dcp",
    "load_distributed",
    "metrics",
    "read",
    "read_dcp",
    "reshard",
    "rewrite",
    "save",
    "save_distributed",
    "steps",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
