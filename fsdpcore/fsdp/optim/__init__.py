"""Optimizers on flat shards: frozen policies whose state the caller owns."""

from fsdpcore.fsdp.optim import schedules
from fsdpcore.fsdp.optim.adafactor import Adafactor
from fsdpcore.fsdp.optim.adagrad import Adagrad
from fsdpcore.fsdp.optim.adam import Adam, AdamW
from fsdpcore.fsdp.optim.average import Average
from fsdpcore.fsdp.optim.base import Optimizer
from fsdpcore.fsdp.optim.from_optax import Optax
from fsdpcore.fsdp.optim.from_torch import Torch
from fsdpcore.fsdp.optim.groups import (
    OptimizerRange,
    ParamGroups,
    elementwise_ranges,
    resolve,
    whole_parameter_specs,
)
from fsdpcore.fsdp.optim.lion import Lion
from fsdpcore.fsdp.optim.muon import Muon
from fsdpcore.fsdp.optim.nadam import NAdam
from fsdpcore.fsdp.optim.pieces import PieceSpec, Ranks, Reduce, ShardPiece
from fsdpcore.fsdp.optim.radam import RAdam
from fsdpcore.fsdp.optim.rmsprop import RMSprop
from fsdpcore.fsdp.optim.schedules import Schedule
from fsdpcore.fsdp.optim.sgd import SGD
from fsdpcore.fsdp.optim.whole import WholeParameterOptimizer

__all__ = [
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Average",
    "Lion",
    "Muon",
    "NAdam",
    "Optax",
    "Optimizer",
    "OptimizerRange",
    "ParamGroups",
    "PieceSpec",
    "RAdam",
    "RMSprop",
    "Ranks",
    "Reduce",
    "Schedule",
    "ShardPiece",
    "Torch",
    "WholeParameterOptimizer",
    "elementwise_ranges",
    "resolve",
    "schedules",
    "whole_parameter_specs",
]


def __dir__() -> list[str]:
    return __all__
