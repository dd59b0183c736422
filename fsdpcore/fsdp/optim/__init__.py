"""Optimizers on flat shards: frozen policies whose state the caller owns."""

from fsdpcore.fsdp.optim.adamw import AdamW
from fsdpcore.fsdp.optim.base import Optimizer
from fsdpcore.fsdp.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "Optimizer"]
