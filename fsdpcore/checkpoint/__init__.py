"""Checkpoints: each rank writes its share, and any number of ranks reads what it needs of them.

``save`` and ``load`` are collectives; ``AsyncCheckpointer`` saves while training goes on.
``latest``, ``read`` and the command ``fsdpcore ckpt`` need no ranks.
"""

from fsdpcore.checkpoint.async_save import AsyncCheckpointer, CheckpointFuture
from fsdpcore.checkpoint.cleaning import Cleaned, clean
from fsdpcore.checkpoint.diff import Difference, diff
from fsdpcore.checkpoint.distributed import (
    ShardMetadata,
    TensorShardSpec,
    compute_shard_sizes,
    flat_shard_metadata,
    load_distributed,
    reshard,
    save_distributed,
)
from fsdpcore.checkpoint.export import Exported, export_safetensors
from fsdpcore.checkpoint.finding import Latest, latest
from fsdpcore.checkpoint.importing import import_safetensors
from fsdpcore.checkpoint.load import Loaded, load
from fsdpcore.checkpoint.protocol import Saved
from fsdpcore.checkpoint.read import read
from fsdpcore.checkpoint.regions import Box, Range
from fsdpcore.checkpoint.retention import Retention
from fsdpcore.checkpoint.rewrite import rewrite
from fsdpcore.checkpoint.save import save
from fsdpcore.checkpoint.steps import steps
from fsdpcore.checkpoint.verify import Problem, Verified, verify
from fsdpcore.fsdp.boxes import ArrayBox, BoxShard

__all__ = [
    "ArrayBox",
    "AsyncCheckpointer",
    "Box",
    "BoxShard",
    "CheckpointFuture",
    "Cleaned",
    "Difference",
    "Exported",
    "Latest",
    "Loaded",
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
    "import_safetensors",
    "latest",
    "load",
    "load_distributed",
    "read",
    "reshard",
    "rewrite",
    "save",
    "save_distributed",
    "steps",
    "verify",
]
