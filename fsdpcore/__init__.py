"""Collective communication with pluggable transports, and fully sharded training.

``launch`` starts ranks that each get a ``Backend``; collectives are functions of an array and a
backend; ``FSDP`` shards a model over one. README.md shows them; docs/ has a page for each.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from fsdpcore.collectives import Batch, all_reduce_many
from fsdpcore.collectives.batch.coalesce import coalesce
from fsdpcore.collectives.metrics import average_metrics
from fsdpcore.collectives.objects import (
    all_gather_object,
    broadcast_object,
    gather_object,
    recv_object,
    scatter_object,
    send_object,
)
from fsdpcore.collectives.operations.table import *  # noqa: F403
from fsdpcore.collectives.operations.table import __all__ as _operations
from fsdpcore.comm.backend import Backend, SubBackend
from fsdpcore.comm.dump_trace import dump_trace
from fsdpcore.comm.mesh import Mesh
from fsdpcore.comm.message_status import MessageStatus
from fsdpcore.core import errors
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    CommTimeoutError,
    CommunicationError,
    ConfigError,
    CorruptCheckpointError,
    ElasticError,
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
from fsdpcore.core.reductions import ReduceOp
from fsdpcore.core.version import VERSION as _VERSION
from fsdpcore.core.waiting import wait_all, wait_any
from fsdpcore.core.wildcard import ANY
from fsdpcore.core.work import Work
from fsdpcore.launch.launch import init, launch

if TYPE_CHECKING:
    from fsdpcore import adapters, checkpoint, data, elastic, parallel
    from fsdpcore.adapters.fully_shard import ShardedLayers, fully_shard
    from fsdpcore.adapters.function import train_step
    from fsdpcore.adapters.layers import Chain, Layer, LayerStack
    from fsdpcore.compress.compression import Compression
    from fsdpcore.core.geometry.boxes import BoxShard
    from fsdpcore.fsdp import optim
    from fsdpcore.fsdp.engine import FSDP
    from fsdpcore.fsdp.offload.offload import Offload
    from fsdpcore.fsdp.outer_step import OuterStep
    from fsdpcore.fsdp.plan.estimate import MemoryEstimate, memory_estimate
    from fsdpcore.fsdp.plan.make_plan import make_plan
    from fsdpcore.fsdp.plan.plan import Plan
    from fsdpcore.fsdp.plan.report import Report
    from fsdpcore.fsdp.plan.sizes import UnitSize
    from fsdpcore.fsdp.sharding.strategy import Strategy
    from fsdpcore.fsdp.state.state import ArrayPiece, EngineState, ShardedArray
    from fsdpcore.fsdp.step.step import Step
    from fsdpcore.fsdp.units import initializers
    from fsdpcore.fsdp.units.options import Prefetch
    from fsdpcore.fsdp.units.param_tree import ParamTree
    from fsdpcore.fsdp.units.precision import LossScale, Precision
    from fsdpcore.fsdp.units.spec import Spec
    from fsdpcore.fsdp.units.special import Tied
    from fsdpcore.fsdp.units.unit import Unit

__version__ = _VERSION

__all__ = [
    "ANY",
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
    "Compression",
    "ConfigError",
    "CorruptCheckpointError",
    "ElasticError",
    "EngineState",
    "FsdpcoreError",
    "Layer",
    "LayerStack",
    "LossScale",
    "MemoryEstimate",
    "Mesh",
    "MessageStatus",
    "MismatchError",
    "MissingDependencyError",
    "NonFiniteGradientError",
    "Offload",
    "OuterStep",
    "ParamTree",
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
    "__version__",
    "adapters",
    "all_gather_object",
    "all_reduce_many",
    "average_metrics",
    "broadcast_object",
    "checkpoint",
    "coalesce",
    "data",
    "dump_trace",
    "elastic",
    "errors",
    "fully_shard",
    "gather_object",
    "init",
    "initializers",
    "launch",
    "make_plan",
    "memory_estimate",
    "optim",
    "parallel",
    "recv_object",
    "scatter_object",
    "send_object",
    "train_step",
    "wait_all",
    "wait_any",
    *_operations,
]

# What a rank that only communicates has no use for, and what takes as long to import as all the
# rest: modules by the names that are imported from them when they are first asked for.
_LATER = {
    "ArrayPiece": "fsdp.state.state",
    "BoxShard": "core.geometry.boxes",
    "Chain": "adapters.layers",
    "Compression": "compress.compression",
    "EngineState": "fsdp.state.state",
    "FSDP": "fsdp.engine",
    "Layer": "adapters.layers",
    "LayerStack": "adapters.layers",
    "LossScale": "fsdp.units.precision",
    "MemoryEstimate": "fsdp.plan.estimate",
    "Offload": "fsdp.offload.offload",
    "OuterStep": "fsdp.outer_step",
    "ParamTree": "fsdp.units.param_tree",
    "Plan": "fsdp.plan.plan",
    "Precision": "fsdp.units.precision",
    "Prefetch": "fsdp.units.options",
    "Report": "fsdp.plan.report",
    "ShardedArray": "fsdp.state.state",
    "ShardedLayers": "adapters.fully_shard",
    "Spec": "fsdp.units.spec",
    "Step": "fsdp.step.step",
    "Strategy": "fsdp.sharding.strategy",
    "Tied": "fsdp.units.special",
    "Unit": "fsdp.units.unit",
    "UnitSize": "fsdp.plan.sizes",
    "adapters": "adapters",
    "checkpoint": "checkpoint",
    "data": "data",
    "elastic": "elastic",
    "fully_shard": "adapters.fully_shard",
    "initializers": "fsdp.units.initializers",
    "make_plan": "fsdp.plan.make_plan",
    "memory_estimate": "fsdp.plan.estimate",
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
    return __all__
