"""What the bench measures: sizes, counts and bandwidths by nccl-tests' conventions."""

from __future__ import annotations

import pytest

from fsdpcore.bench.cases import (
    MEASURED,
    Case,
    algbw,
    busbw_factor,
    check_kind,
    chosen_operations,
    has_place,
    make_cases,
    parse_size,
    sizes,
)
from fsdpcore.core.errors import ArgumentError

FACTORS = {
    # operation: on 2, 4 and 8 ranks
    "all_reduce": (1.0, 1.5, 1.75),
    "all_gather": (0.5, 0.75, 0.875),
    "reduce_scatter": (0.5, 0.75, 0.875),
    "all_to_all": (0.5, 0.75, 0.875),
    "gather": (0.5, 0.75, 0.875),
    "scatter": (0.5, 0.75, 0.875),
    "broadcast": (1.0, 1.0, 1.0),
    "reduce": (1.0, 1.0, 1.0),
}


def case(operation, count=4, world_size=4, root=1, in_place=False):
    return Case(operation, count, "float32", "none", root, world_size, in_place)


@pytest.mark.parametrize("operation", MEASURED)
def test_bus_bandwidth_factors(operation):
    assert tuple(busbw_factor(operation, p) for p in (2, 4, 8)) == FACTORS[operation]


def test_a_gigabyte_is_ten_to_the_nine():
    assert algbw(2_000_000, 0.001) == 2.0
    assert algbw(100, 0.0) == 0.0


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("64KiB", 65536), ("64MiB", 67108864), ("1G", 1073741824), ("2k", 2048), ("4B", 4)],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-8", "8.5", "8XB", "MiB", "8 8"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ArgumentError, match="is no size"):
        parse_size(text)


def test_sizes_grow_by_the_factor():
    assert sizes(8, 64, 2) == [8, 16, 32, 64]
    assert sizes(8, 100, 3) == [8, 24, 72]
    assert sizes(8, 8, 2) == [8]
    with pytest.raises(ArgumentError, match="at least 2"):
        sizes(8, 64, 1)
    with pytest.raises(ArgumentError, match="smaller than the first"):
        sizes(64, 8, 2)


def test_operations_are_named_once_each():
    assert chosen_operations(["broadcast", "all"])[:2] == ["broadcast", "all_reduce"]
    assert sorted(chosen_operations(["all", "all"])) == sorted(MEASURED)
    with pytest.raises(ArgumentError, match="did you mean 'all_gather'"):
        chosen_operations(["allgather"])


def made(operation, wanted, **changes):
    kind = {"dtype": "float32", "op": "sum", "root": 0, "in_place": False, **changes}
    return make_cases(operation, wanted, 4, **kind)


def test_the_size_is_the_total_where_it_is_split():
    (reduced,) = made("all_reduce", [64])
    (gathered,) = made("all_gather", [64])
    assert (reduced.count, reduced.size) == (16, 64)
    assert (gathered.count, gathered.size) == (4, 64)


def test_sizes_are_rounded_to_whole_elements_of_each_rank():
    counts = [(one.count, one.size) for one in made("reduce_scatter", [1, 8, 16, 40, 47])]
    assert counts == [(1, 16), (2, 32)]  # one line for sizes that come to the same
    (half,) = made("broadcast", [9], dtype="bfloat16")
    assert (half.count, half.size) == (4, 8)


def test_op_and_root_only_where_there_is_one():
    assert [(one.op, one.root) for one in made("all_reduce", [64])] == [("sum", -1)]
    assert [(one.op, one.root) for one in made("reduce", [64])] == [("sum", 0)]
    assert [(one.op, one.root) for one in made("scatter", [64])] == [("none", 0)]
    assert [(one.op, one.root) for one in made("all_to_all", [64])] == [("none", -1)]


@pytest.mark.parametrize(
    ("operation", "at_root", "elsewhere"),
    [
        # elements of (input, output) on four ranks, count 4
        ("all_reduce", (4, 4), (4, 4)),
        ("all_gather", (4, 16), (4, 16)),
        ("reduce_scatter", (16, 4), (16, 4)),
        ("broadcast", (4, 4), (4, 4)),
        ("reduce", (4, 4), (4, 0)),
        ("gather", (4, 16), (4, 0)),
        ("scatter", (16, 4), (0, 4)),
        ("all_to_all", (16, 16), (16, 16)),
    ],
)
def test_elements_of_input_and_output(operation, at_root, elsewhere):
    one = case(operation)
    assert (one.source_count(1), one.output_count(1)) == at_root
    assert (one.source_count(2), one.output_count(2)) == elsewhere


def test_all_to_all_is_not_measured_in_place():
    assert [name for name in MEASURED if not has_place(name, "in")] == ["all_to_all"]
    assert all(has_place(name, "out") for name in MEASURED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float23"}, "did you mean 'float32'"),
        ({"dtype": "complex64"}, "no dtype 'complex64'"),
        ({"op": "summ"}, "did you mean 'sum'"),
        ({"dtype": "int32", "op": "mean"}, "mean"),
        ({"root": 4}, "root 4 is not a rank of 4"),
        ({"root": -1}, "root -1 is not a rank of 4"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, words):
    kind = {"dtype": "float32", "op": "sum", "root": 0, "world_size": 4, **change}
    with pytest.raises(ArgumentError, match=words):
        check_kind(**kind)
