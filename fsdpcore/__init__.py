"""Collective communication with pluggable transports, and fully sharded training.

import fsdpcore as fc

def main(backend):
print(fc.all_reduce(numpy.ones(3), backend))

if __name__ == "__main__":
fc.launch(main, world_size=4, transport="sim")
"""

from importlib.metadata import version as _version

from fsdpcore import errors
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
    PeerFailedError,
    ProtocolError,
    RankFailedError,
    RendezvousError,
    StateError,
    UnknownTransportError,
    UnsupportedError,
)
from fsdpcore.launch import init, launch
from fsdpcore.reduce_ops import ReduceOp
from fsdpcore.work import Work

__version__ = _version("fsdpcore")

__all__ = [
    "ArgumentError",
    "Backend",
    "Capabilities",
    "ClosedError",
    "CommTimeoutError",
    "CommunicationError",
    "ConfigError",
    "FsdpcoreError",
    "MismatchError",
    "MissingDependencyError",
    "PeerFailedError",
    "ProtocolError",
    "RankFailedError",
    "ReduceOp",
    "RendezvousError",
    "StateError",
    "SubBackend",
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
    "launch",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_v",
    "scatter",
]
