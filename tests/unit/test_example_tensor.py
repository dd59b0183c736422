"""The example with a tensor-parallel GPT: the same training on any mesh."""

from __future__ import annotations

import gpt_tensor_parallel
import pytest
from support.spmd import run


def test_losses_do_not_depend_on_the_mesh(capsys):
    ranks, tensor = 4, 2
    (alone,) = run(gpt_tensor_parallel.main, transport="sim", world_size=1, args=(1, 3))
    assert alone[2] < alone[0]
    capsys.readouterr()
    for losses in run(
        gpt_tensor_parallel.main, transport="sim", world_size=ranks, args=(tensor, 3)
    ):
        assert losses == pytest.approx(alone, rel=1e-5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["step 0", "step 2"]
    shares = [float(word.rstrip("%")) for word in lines[2].partition(":")[2].split()]
    assert len(shares) == ranks
    assert all(100 / ranks <= share < 110 / ranks for share in shares)
