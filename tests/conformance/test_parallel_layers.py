"""All layers of tensor parallelism in a row, against one rank's formulas.

Between processes it is a part of the job of ``test_training_tensor``.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support import parallel_chain
from support.spmd import run
from support.tensor_parallel import assert_close, joined


@functools.cache
def unsharded():
    return parallel_chain.unsharded()


def check_all_layers(ranks):
    """Compare what every rank has of ``parallel_chain.both_ways`` with the formulas."""
    loss, grads = unsharded()
    for way in zip(*ranks, strict=True):
        assert {found for found, _ in way} == {way[0][0]}, "the loss differs between ranks"
        assert way[0][0] == pytest.approx(loss, rel=1e-6)
        whole = joined([boxes for _, boxes in way])
        assert whole.keys() == grads.keys()
        for name, wanted in grads.items():
            assert_close(whole[name], wanted, np.float32, name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_a_model_of_all_layers_is_the_unsharded_one(ranks):
    check_all_layers(run(parallel_chain.both_ways, transport="sim", world_size=ranks))
