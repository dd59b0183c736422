"""Checkpoints: each rank writes its share, and any number of ranks reads what it needs of them.

``save`` and ``load`` are collectives; ``AsyncCheckpointer`` saves while training goes on.
``latest``, ``read`` and the command ``fsdpcore ckpt`` need no ranks.
"""

from fsdpcore.checkpoint.async_save import AsyncCheckpointer, CheckpointFuture
from fsdpcore.checkpoint.committing import Saved
from fsdpcore.checkpoint.load import Loaded, load
from fsdpcore.checkpoint.read import read
from fsdpcore.checkpoint.retention import Retention
from fsdpcore.checkpoint.save import save
from fsdpcore.checkpoint.shards import BoxShard
from fsdpcore.checkpoint.steps import Latest, latest, steps

__all__ = [
    "AsyncCheckpointer",
    "BoxShard",
    "CheckpointFuture",
    "Latest",
    "Loaded",
    "Retention",
    "Saved",
    "latest",
    "load",
    "read",
    "save",
    "steps",
]
