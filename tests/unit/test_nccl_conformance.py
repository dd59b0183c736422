"""Bodies of the conformance suite on the ``nccl`` transport, with the stand-in for a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.bodies import agreement, coalescing, endings, layouts, movement, objects, reductions
from support.bodies.point_to_point import check_words, expect
from support.cases import bodies
from support.device_bodies import EXACT, GROUPS, NATIVE
from support.nccl_ranks import run

import fsdpcore as fc


@bodies(*EXACT)
def test_canonical(body: Any) -> None:
    run(body, 3, deterministic=True)


@bodies(*GROUPS)
def test_groups(body: Any) -> None:
    run(body, 4, deterministic=True)


@bodies(reductions.every_shape, movement.every_dtype, layouts.every_layout, coalescing.lists)
def test_alone(body: Any) -> None:
    run(body, 1)


def test_every_dtype_and_op() -> None:
    """Every second one: dtypes and operations change places."""
    run(reductions.every_dtype_and_op, 2, 2, 0, deterministic=True)


def test_some_dtypes_and_ops_on_more_ranks() -> None:
    run(reductions.every_dtype_and_op, 5, 13, 2, deterministic=True)


@bodies(movement.ragged_gather, movement.ragged_reduction)
def test_ragged_on_more_ranks(body: Any) -> None:
    """The first of five parts is as long as the last, and not as those between."""
    run(body, 5, deterministic=True)


@bodies(*NATIVE)
def test_native(body: Any) -> None:
    run(body, 3)


@pytest.mark.parametrize("what", ["shape", "dtype", "op", "root", "operation"])
def test_difference(what: str) -> None:
    run(agreement.difference, 2, what)


@pytest.mark.parametrize("call", ["all_reduce", "started"])
def test_aborted(call: str) -> None:
    run(endings.aborted, 2, call)


@bodies(endings.left_at_different_times)
def test_endings(body: Any) -> None:
    run(body, 3)


@bodies(reductions.every_shape, movement.every_dtype, layouts.every_layout)
def test_arrays_of_the_host(body: Any) -> None:
    run(body, 2, moved=False)


@bodies(objects.collectives, objects.messages, objects.metrics)
def test_objects(body: Any) -> None:
    run(body, 2, moved=False)


def _average_on_device(backend: fc.Backend) -> None:
    array = backend.device.zeros(3, np.float32) + np.float32(backend.rank)
    found = fc.average_metrics({"array": array, "loss": array[0]}, backend, weight=backend.rank)
    assert (type(found["array"]), found["loss"]) == (np.ndarray, 1.0)
    refused = expect(fc.ArgumentError, fc.all_gather_object, [array], backend)
    check_words(refused, "at [0]", "copy it to the host")


def test_metrics_of_a_gpu() -> None:
    run(_average_on_device, 2, moved=False)
