"""The bench's oracle: right by a second way of working it out, and not to be fooled."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracle import reduced

from fsdpcore.bench import oracle
from fsdpcore.bench.cases import DTYPE_NAMES, MEASURED, OP_NAMES, Case
from fsdpcore.collectives.operations import table

P, COUNT, ROOT = 3, 7, 1


def case(operation, dtype="float32", op="sum", count=COUNT, world_size=P):
    op = op if table.OPERATIONS[operation].reduces else "none"
    return Case(operation, count, dtype, op, ROOT, world_size, in_place=False)


def all_inputs(one):
    arrays = []
    for rank in range(one.world_size):
        array = np.zeros(one.source_count(rank), one.numpy_dtype)
        oracle.fill(one, rank, array)
        arrays.append(array)
    return arrays


def results(one):
    """What every rank must get, from whole arrays instead of formulas of positions."""
    given, p, c = all_inputs(one), one.world_size, one.count
    nothing = np.zeros(0, one.numpy_dtype)
    if one.definition.reduces:
        total = reduced(given, one.op)
        if one.operation == "reduce_scatter":
            return np.array_split(total, p)
        return [total if one.operation == "all_reduce" or r == ROOT else nothing for r in range(p)]
    if one.operation == "broadcast":
        return [given[ROOT]] * p
    if one.operation == "scatter":
        return np.array_split(given[ROOT], p)
    if one.operation == "all_to_all":
        return [np.concatenate([g[r * c : (r + 1) * c] for g in given]) for r in range(p)]
    joined = np.concatenate(given)
    return [joined if one.operation == "all_gather" or r == ROOT else nothing for r in range(p)]


def wrong(one, outputs):
    return sum(oracle.count_wrong(one, rank, output) for rank, output in enumerate(outputs))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("operation", MEASURED)
def test_right_results_are_right(operation, dtype):
    one = case(operation, dtype)
    assert wrong(one, results(one)) == 0


@pytest.mark.parametrize("op", OP_NAMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_reduction_of_floats(dtype, op):
    for world_size in (1, 2, 5):
        one = case("all_reduce", dtype, op, world_size=world_size, count=500)
        assert wrong(one, results(one)) == 0


@pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_every_reduction_of_integers(dtype, op):
    one = case("reduce_scatter", dtype, op)
    assert wrong(one, results(one)) == 0


@pytest.mark.parametrize("operation", MEASURED)
def test_every_wrong_element_is_counted(operation):
    one = case(operation)
    outputs = [output.copy() for output in results(one)]
    outputs[ROOT][0] += 1
    outputs[ROOT][-1] += 1
    assert wrong(one, outputs) == 2


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_contribution_that_is_missing_or_counted_twice_is_noticed(dtype, op):
    one = case("all_reduce", dtype, op, count=1000)
    given = all_inputs(one)
    assert oracle.count_wrong(one, 0, reduced(given[:2], op)) > 800
    assert oracle.count_wrong(one, 0, reduced([*given, given[2]], op)) > 800


@pytest.mark.parametrize("operation", MEASURED)
def test_untouched_zeros_are_all_wrong(operation):
    one = case(operation, count=1000)
    sizes = [one.output_count(rank) for rank in range(P)]
    assert wrong(one, [np.zeros(size, np.float32) for size in sizes]) == sum(sizes)


def test_parts_in_the_wrong_place_are_noticed():
    one = case("all_gather", count=1000)
    swapped = np.roll(results(one)[0], one.count)
    assert oracle.count_wrong(one, 0, swapped) > 2900
    shifted = np.roll(results(one)[0], 1)
    assert oracle.count_wrong(one, 0, shifted) > 2900


def test_long_arrays_are_worked_out_in_blocks():
    count = 2**18 + 3  # more than one block
    one = case("all_reduce", count=count, world_size=2)
    output = reduced(all_inputs(one), "sum")
    assert oracle.count_wrong(one, 0, output) == 0
    output[[0, 2**18 - 1, 2**18, -1]] = 0
    assert oracle.count_wrong(one, 0, output) == 4


def test_an_input_that_changed_is_noticed():
    one = case("all_reduce")
    array = all_inputs(one)[2]
    assert oracle.count_changed(one, 2, array) == 0
    array[3] = 0
    assert oracle.count_changed(one, 2, array) == 1
