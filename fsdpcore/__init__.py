"""Collective communication with pluggable transports, and fully sharded training.

``launch`` starts ranks that each get a ``Backend``; collectives are functions of an array and a
backend; ``FSDP`` shards a model over one. README.md shows all three.
"""

from importlib.metadata import version as _version

from fsdpcore import errors
from fsdpcore.adapters.layers import Layer, LayerStack
from fsdpcore.backend import Backend, Capabilities, SubBackend
from fsdpcore.collectives import (
    all_gather,
    all_gather_v,
    all_reduce,
    all_to_all,
    all_to_all_v,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_v,
    scatter,
)
from fsdpcore.errors import (
    ArgumentError,
    ClosedError,
    CommTimeoutError,
    CommunicationError,
    ConfigError,
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
from fsdpcore.fsdp import initializers, optim
from fsdpcore.fsdp.engine import FSDP
from fsdpcore.fsdp.spec import Spec
from fsdpcore.fsdp.step import Step
from fsdpcore.fsdp.unit import Unit
from fsdpcore.launch import init, launch
from fsdpcore.reduce_ops import ReduceOp
from fsdpcore.work import Work

__version__ = _version("fsdpcore")

__all__ = [
    "FSDP",
    "ArgumentError",
    "Backend",
    "Capabilities",
    "ClosedError",
    "CommTimeoutError",
    "CommunicationError",
    "ConfigError",
    "FsdpcoreError",
    "Layer",
    "LayerStack",
    "MismatchError",
    "MissingDependencyError",
    "NonFiniteGradientError",
    "PeerFailedError",
    "ProtocolError",
    "RankFailedError",
    "ReduceOp",
    "RendezvousError",
    "Spec",
    "StateError",
    "Step",
    "SubBackend",
    "Unit",
    "UnknownTransportError",
    "UnsupportedError",
    "Work",
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "errors",
    "gather",
    "init",
    "initializers",
    "launch",
    "optim",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_v",
    "scatter",
]
