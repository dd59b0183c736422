"""Meshes of one rank or without any communication: what is refused, and what the parts are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.spmd import run

import fsdpcore as fc


def _refused(backend: fc.Backend, axes: Any) -> str:
    with pytest.raises(fc.ArgumentError, match=r"^Mesh: ") as caught:
        fc.Mesh(backend, axes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"a": 3}, ["a 3", "3 positions", "6 ranks"]),
        ({"a": 3, "b": 3}, ["a 3 x b 3", "9 positions", "6 ranks"]),
        ({"a": -1, "b": -1}, ["only one"]),
        ({"a": -1, "b": 4}, ["6 ranks", "multiple of 4"]),
        ({"a": -1, "b": 12}, ["multiple of 12"]),
        ({"a": 0, "b": -1}, ["'a'", ">= 1", "got 0"]),
        ({"a": -2, "b": -3}, ["got -2"]),
        ({"a": True, "b": 6}, ["got True"]),
        ({"a": 6.0}, ["got 6.0"]),
        ({"a": "6"}, ["got '6'"]),
        ({"a": None}, ["got None"]),
        ({}, ["{name: size, ...}"]),
        ([("a", 6)], ["{name: size, ...}"]),
        (6, ["{name: size, ...}"]),
        ({"": 6}, ["name of an axis", "''"]),
        ({1: 6}, ["name of an axis", "1"]),
    ],
)
def test_grids_that_are_refused(axes: Any, words: list[str]) -> None:
    for message in run(_refused, transport="sim", world_size=6, args=(axes,)):
        for word in words:
            assert word in message


def _look(backend: fc.Backend) -> None:
    mesh = fc.Mesh(backend, {"replicate": np.int64(2), "shard": -1})
    assert mesh.backend is backend
    assert mesh.shape == (2, 3)
    assert all(type(size) is int for size in mesh.shape)
    assert mesh.coordinates == {"replicate": backend.rank // 3, "shard": backend.rank % 3}
    assert mesh.ranks.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="read-only"):
        mesh.ranks[0, 0] = 5
    assert repr(mesh) == f"<Mesh replicate=2, shard=3, rank {backend.rank}>"
    assert isinstance(mesh["shard"], fc.SubBackend)
    for axes in ("tensor", ("shard", "tensor"), ("shard", "shard"), (), ["shard"], 0, None, (0,)):
        with pytest.raises(fc.ArgumentError, match=r"^Mesh: "):
            mesh[axes]  # type: ignore[index]


def test_parts() -> None:
    run(_look, transport="sim", world_size=6)


def _closed(backend: fc.Backend) -> None:
    mesh = fc.Mesh(backend, {"a": 2, "b": 1})
    group = mesh["a"]
    group.barrier()
    mesh.close()
    with pytest.raises(fc.ClosedError):
        group.barrier()
    backend.barrier()


def test_closing() -> None:
    run(_closed, transport="sim", world_size=2)


def test_without_a_backend() -> None:
    with pytest.raises(fc.ArgumentError, match="expected a backend"):
        fc.Mesh(4, {"a": 4})  # type: ignore[arg-type]
