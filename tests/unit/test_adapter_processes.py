"""Training by adapters on ranks that are processes, which are started once for all of them."""

from __future__ import annotations

import test_adapter_autograd_training as hips
import test_adapter_jax_training as of_jax
import test_fully_shard as objects
from support.spmd import run

import fsdpcore as fc


def test_layers_of_jax_read_memory_where_it_is():
    args = ("layers", fc.Strategy("full_shard"))
    found = run(of_jax.train_and_look, transport="zmq", world_size=2, args=args)
    of_jax.assert_as_unsharded([results for results, _ in found])
    # w begins with the unit, and b 60 bytes behind it: JAX takes multiples of 64.
    assert [same for _, same in found] == [{"w": True, "b": False}] * 2


def test_layers_of_autograd():
    args = ("layers", fc.Strategy("full_shard"))
    hips.assert_as_unsharded(run(hips.train, transport="zmq", world_size=2, args=args))


def test_objects_with_attributes():
    objects.assert_as_plain(run(objects.train, transport="zmq", world_size=2))
