"""Collective communication with pluggable transports, and fully sharded training.

``launch`` starts ranks that each get a ``Backend``; collectives are functions of an array and a
backend; ``FSDP`` shards a model over one. README.md shows all three.
"""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from fsdpcore import errors
from fsdpcore.backend import Backend, Capabilities, SubBackend
from fsdpcore.collectives import (
    Batch,
    all_gather,
    all_gather_v,
    all_reduce,
    all_reduce_many,
    all_to_all,
    all_to_all_v,
    barrier,
    broadcast,
    coalesce,
    gather,
    gather_v,
    reduce,
    reduce_scatter,
    reduce_scatter_v,
    scatter,
    scatter_v,
)
from fsdpcore.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    CommTimeoutError,
    CommunicationError,
    ConfigError,
    CorruptCheckpointError,
    FsdpcoreError,
    MismatchError,
    MissingDependencyError,
    NonFiniteGradientError,
    PeerFailedError,
    ProtocolError,
    RankFailedError,
    RendezvousError,
    StateError,
    UnknownTransportError,
    UnsupportedError,
)
from fsdpcore.launch import init, launch
from fsdpcore.mesh import Mesh
from fsdpcore.recorder import dump_trace
from fsdpcore.reduce_ops import ReduceOp
from fsdpcore.work import Work

if TYPE_CHECKING:
    from fsdpcore import adapters, checkpoint, parallel
    from fsdpcore.adapters.fully_shard import ShardedLayers, fully_shard
    from fsdpcore.adapters.function import train_step
    from fsdpcore.adapters.layers import Chain, Layer, LayerStack
    from fsdpcore.fsdp import initializers, optim
    from fsdpcore.fsdp.boxes import BoxShard
    from fsdpcore.fsdp.engine import FSDP
    from fsdpcore.fsdp.estimate import MemoryEstimate, memory_estimate
    from fsdpcore.fsdp.offload import Offload
    from fsdpcore.fsdp.plan import Plan, make_plan
    from fsdpcore.fsdp.plan_sizes import UnitSize
    from fsdpcore.fsdp.precision import LossScale, Precision
    from fsdpcore.fsdp.report import Report
    from fsdpcore.fsdp.schedule import Prefetch
    from fsdpcore.fsdp.spec import Spec
    from fsdpcore.fsdp.special import Tied
    from fsdpcore.fsdp.state import ArrayPiece, EngineState, ShardedArray
    from fsdpcore.fsdp.step import Step
    from fsdpcore.fsdp.strategy import Strategy
    from fsdpcore.fsdp.unit import Unit

__version__ = _version("fsdpcore")

__all__ = [
    "FSDP",
    "ArgumentError",
    "ArrayPiece",
    "Backend",
    "Batch",
    "BoxShard",
    "Capabilities",
    "Chain",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ClosedError",
    "CommTimeoutError",
    "CommunicationError",
    "ConfigError",
    "CorruptCheckpointError",
    "EngineState",
    "FsdpcoreError",
    "Layer",
    "LayerStack",
    "LossScale",
    "MemoryEstimate",
    "Mesh",
    "MismatchError",
    "MissingDependencyError",
    "NonFiniteGradientError",
    "Offload",
    "PeerFailedError",
    "Plan",
    "Precision",
    "Prefetch",
    "ProtocolError",
    "RankFailedError",
    "ReduceOp",
    "RendezvousError",
    "Report",
    "ShardedArray",
    "ShardedLayers",
    "Spec",
    "StateError",
    "Step",
    "Strategy",
    "SubBackend",
    "Tied",
    "Unit",
    "UnitSize",
    "UnknownTransportError",
    "UnsupportedError",
    "Work",
    "adapters",
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_reduce_many",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "checkpoint",
    "coalesce",
    "dump_trace",
    "errors",
    "fully_shard",
    "gather",
    "gather_v",
    "init",
    "initializers",
    "launch",
    "make_plan",
    "memory_estimate",
    "optim",
    "parallel",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_v",
    "scatter",
    "scatter_v",
    "train_step",
]

# What a rank that only communicates has no use for, and what takes as long to import as all the
# rest: modules by the names that are imported from them when they are first asked for.
_LATER = {
    "ArrayPiece": "fsdp.state",
    "BoxShard": "fsdp.boxes",
    "Chain": "adapters.layers",
    "EngineState": "fsdp.state",
    "FSDP": "fsdp.engine",
    "Layer": "adapters.layers",
    "LayerStack": "adapters.layers",
    "LossScale": "fsdp.precision",
    "MemoryEstimate": "fsdp.estimate",
    "Offload": "fsdp.offload",
    "Plan": "fsdp.plan",
    "Precision": "fsdp.precision",
    "Prefetch": "fsdp.schedule",
    "Report": "fsdp.report",
    "ShardedArray": "fsdp.state",
    "ShardedLayers": "adapters.fully_shard",
    "Spec": "fsdp.spec",
    "Step": "fsdp.step",
    "Strategy": "fsdp.strategy",
    "Tied": "fsdp.special",
    "Unit": "fsdp.unit",
    "UnitSize": "fsdp.plan_sizes",
    "adapters": "adapters",
    "checkpoint": "checkpoint",
    "fully_shard": "adapters.fully_shard",
    "initializers": "fsdp.initializers",
    "make_plan": "fsdp.plan",
    "memory_estimate": "fsdp.estimate",
    "optim": "fsdp.optim",
    "parallel": "parallel",
    "train_step": "adapters.function",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _import_module(f"{__name__}.{_LATER[name]}")
        found = globals()[name] = getattr(module, name, module)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
