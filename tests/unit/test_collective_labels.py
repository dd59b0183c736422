"""What a collective is for is compared between the ranks, as far as it can be said."""

from __future__ import annotations

import numpy as np
import pytest
from support.fsdp_steps import launch

import fsdpcore as fc

# Each with a label: what a rank calls.
CALLS = {
    "broadcast": lambda backend, label: fc.broadcast(np.ones(3), backend, label=label),
    "gather_v": lambda backend, label: fc.gather_v(np.ones(backend.rank), backend, label=label),
    "scatter_v": lambda backend, label: fc.scatter_v(
        *((np.ones(3), backend, [1, 2]) if backend.rank == 0 else (None, backend)), label=label
    ),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_ranks_call_it_for_the_same(call):
    def body(backend):
        CALLS[call](backend, "weights")
        with pytest.raises(fc.MismatchError) as raised:
            CALLS[call](backend, ["weights", "biases"][backend.rank])
        return str(raised.value)

    for message in launch(body, 2):
        assert "weights" in message
        assert "biases" in message
