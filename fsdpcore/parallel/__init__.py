"""Tensor-parallel layers: a matrix is cut over the ranks of a group, and so is the work.

A layer is one of ``fsdpcore.Layer`` that knows its group, such as ``mesh["tensor"]``. The ranks of
a group compute one batch together: their input must be the same, or parts of one, so rows of a
batch are split by the data-parallel group's rank. ``cross_entropy`` notices other targets; no layer
compares its input, which would take one more exchange.

A layer's ``init`` returns this rank's boxes of the parameters (``BoxShard``), and whole arrays of
what every rank has; an engine made with ``tensor=`` that group shards those over the data-parallel
ranks.

==================================  ================================================================
``linear``, ``embedding``,          layers, each cut in a way of its own
``norm``, ``attention``, ``mlp``,
``block``, ``sequence``,
``positions``
``loss``                            cross entropy of logits that are cut
``exchange``                        the collectives between them; all communication is there
``traffic``                         what a block exchanges, as a formula
``splits``                          which part is whose
``scope``                           several layers in one mapping of parameters
``weights``                         initial values and gradients
``arrays``, ``heads``,              arithmetic of NumPy and CuPy
``activations``
==================================  ================================================================
"""

from fsdpcore.parallel.attention import ParallelAttention
from fsdpcore.parallel.block import ParallelBlock
from fsdpcore.parallel.embedding import VocabParallelEmbedding
from fsdpcore.parallel.exchange import all_gather, all_reduce, local_part, reduce_scatter
from fsdpcore.parallel.linear import ColumnParallelLinear, RowParallelLinear
from fsdpcore.parallel.loss import cross_entropy
from fsdpcore.parallel.mlp import ParallelMLP
from fsdpcore.parallel.norm import LayerNorm, RMSNorm
from fsdpcore.parallel.positions import PositionEmbedding
from fsdpcore.parallel.scope import Scope, prefixed
from fsdpcore.parallel.sequence import GatherSequence, ScatterSequence
from fsdpcore.parallel.splits import bounds, split
from fsdpcore.parallel.traffic import BlockTraffic, PassTraffic

__all__ = [
    "BlockTraffic",
    "ColumnParallelLinear",
    "GatherSequence",
    "LayerNorm",
    "ParallelAttention",
    "ParallelBlock",
    "ParallelMLP",
    "PassTraffic",
    "PositionEmbedding",
    "RMSNorm",
    "RowParallelLinear",
    "ScatterSequence",
    "Scope",
    "VocabParallelEmbedding",
    "all_gather",
    "all_reduce",
    "bounds",
    "cross_entropy",
    "local_part",
    "prefixed",
    "reduce_scatter",
    "split",
]


def __dir__() -> list[str]:
    return __all__
