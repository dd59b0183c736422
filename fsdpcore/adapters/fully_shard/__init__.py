"""``fully_shard``: objects with parameters in their attributes, each a unit of an engine.

==============  ====================================================================================
``sharded``     ``fully_shard``, and ``ShardedLayers``, which it returns
``passes``      what a call of a layer's ``forward`` or ``backward`` does
``units``       layers as units: their parameters by name
``attributes``  which arrays an object has, and where
``gradients``   where a layer leaves the gradients of its parameters
``guards``      what stands in the place of arrays that are sharded
==============  ====================================================================================
"""

from fsdpcore.adapters.fully_shard.gradients import GradientOf
from fsdpcore.adapters.fully_shard.sharded import ShardedLayers, fully_shard

__all__ = ["GradientOf", "ShardedLayers", "fully_shard"]
