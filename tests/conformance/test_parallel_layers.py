"""All layers of tensor parallelism in a row, on every transport, against one rank's formulas."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support import parallel_chain
from support.spmd import TRANSPORTS, run
from support.tensor_parallel import assert_close, joined


def _both_ways(backend):
    return [parallel_chain.passed(backend, np.float32, along) for along in (False, True)]


@functools.cache
def unsharded():
    return parallel_chain.unsharded()


def check(ranks):
    loss, grads = unsharded()
    for way in zip(*ranks, strict=True):
        assert {found for found, _ in way} == {way[0][0]}, "the loss differs between ranks"
        assert way[0][0] == pytest.approx(loss, rel=1e-6)
        whole = joined([boxes for _, boxes in way])
        assert whole.keys() == grads.keys()
        for name, wanted in grads.items():
            assert_close(whole[name], wanted, np.float32, name)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_model_of_all_layers_is_the_unsharded_one(transport):
    check(run(_both_ways, transport=transport, world_size=3))


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_on_any_number_of_ranks(ranks):
    check(run(_both_ways, transport="sim", world_size=ranks))
