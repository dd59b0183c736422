"""Parameter groups: which optimizer a name gets, and ranges of a shard with the same one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpcore.core.errors import ArgumentError, ConfigError
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.optim import (
    SGD,
    Adafactor,
    AdamW,
    Optimizer,
    ParamGroups,
    PieceSpec,
    elementwise_ranges,
    resolve,
    whole_parameter_specs,
)

DECAYED, PLAIN = AdamW(lr=1e-3), AdamW(lr=1e-3, weight_decay=0.0)
NAMES = ["embed.weight", "block0.weight", "block0.bias", "block1.weight", "block1.bias"]


def test_the_first_pattern_that_matches_wins() -> None:
    found = resolve({"embed.*": SGD(0.1), "*.bias": PLAIN, "*": DECAYED}, NAMES)
    assert found == {
        "embed.weight": SGD(0.1),
        "block0.weight": DECAYED,
        "block0.bias": PLAIN,
        "block1.weight": DECAYED,
        "block1.bias": PLAIN,
    }
    assert list(found) == NAMES


def test_one_optimizer_is_for_all() -> None:
    assert resolve(PLAIN, NAMES) == dict.fromkeys(NAMES, PLAIN) == resolve({"*": PLAIN}, NAMES)
    assert ParamGroups.of(PLAIN) == ParamGroups.of({"*": PLAIN})
    assert resolve(ParamGroups.of(PLAIN), NAMES) == resolve(PLAIN, NAMES)
    assert resolve(PLAIN, []) == {}


def test_the_rest_may_be_nothing() -> None:
    names = ["a.bias", "b.bias"]
    assert resolve({"*.bias": PLAIN, "*": DECAYED}, names) == dict.fromkeys(names, PLAIN)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("block?.bias", ["block0.bias", "block1.bias"]),
        ("block[1-9].*", ["block1.weight", "block1.bias"]),
        ("block0.weight", ["block0.weight"]),
        ("*0*", ["block0.weight", "block0.bias"]),
    ],
)
def test_patterns(pattern: str, matched: list[str]) -> None:
    found = resolve({pattern: PLAIN, "*": DECAYED}, NAMES)
    assert [name for name, optimizer in found.items() if optimizer == PLAIN] == matched


def test_a_parameter_that_no_pattern_matches_is_named() -> None:
    message = r"no pattern matches the parameters 'embed.weight'.*add '\*' as the last"
    with pytest.raises(ArgumentError, match=message):
        resolve({"block*": PLAIN}, NAMES)
    with pytest.raises(ArgumentError, match=r"'p0', 'p1', .*, 'p6', 'p7' and 3 more"):
        resolve({"q*": PLAIN}, [f"p{i}" for i in range(11)])


def test_a_pattern_that_matches_nothing_is_named_with_the_nearest_name() -> None:
    with pytest.raises(ArgumentError, match=r"'block0.bais' matches no parameter .*'block0.bias'"):
        resolve({"block0.bais": PLAIN, "*": DECAYED}, NAMES)
    with pytest.raises(ArgumentError, match=r"'\*.BIAS' matches no parameter"):
        resolve({"*.BIAS": PLAIN, "*": DECAYED}, NAMES)


def test_a_pattern_that_never_wins_is_named_with_the_one_before_it() -> None:
    with pytest.raises(ArgumentError, match=r"'block0.bias' is of no use.* by 'block\*'; put"):
        resolve({"block*": DECAYED, "block0.bias": PLAIN, "*": DECAYED}, NAMES)


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        ({}, "optimizers must be one of fc.optim"),
        (0.1, "optimizers must be one of fc.optim"),
        ({"*": 0.1}, r"the optimizer for '\*' must be one of fc.optim"),
        ({1: PLAIN}, "a pattern must be a string"),
        ({"": PLAIN}, "a pattern must be a string"),
        ({"*": PLAIN, "*.bias": DECAYED}, r"'\*.bias' is never reached.* put '\*' last"),
    ],
)
def test_bad_groups_are_refused(optimizers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParamGroups.of(optimizers)


def test_groups_are_values_in_their_order() -> None:
    first = ParamGroups.of({"a*": PLAIN, "*": DECAYED})
    assert first == ParamGroups.of({"a*": PLAIN, "*": AdamW(lr=1e-3)})
    assert hash(first) == hash(ParamGroups.of({"a*": PLAIN, "*": DECAYED}))
    assert repr(ParamGroups.of({"a*": PLAIN, "b*": SGD(0.1)})) != repr(
        ParamGroups.of({"b*": SGD(0.1), "a*": PLAIN})
    )


def test_what_depends_on_the_installation_is_decided() -> None:
    """So that the repr tells ranks that have numba from those that have not."""
    ((_, optimizer),) = ParamGroups.of(AdamW(fused="auto")).rules
    assert isinstance(optimizer, AdamW)
    assert optimizer.fused in (True, False)


# Ranges


def test_neighbours_with_equal_optimizers_are_one_range() -> None:
    layout = FlatLayout.build({"a": (2, 3), "b": (3,), "c": (4,), "d": (2,)}, "f4", 2)
    optimizers = {"a": DECAYED, "b": AdamW(lr=1e-3), "c": PLAIN, "d": DECAYED}
    assert elementwise_ranges(layout.pieces(0), optimizers) == [(0, 8, DECAYED)]
    assert elementwise_ranges(layout.pieces(1), optimizers) == [
        (0, 1, DECAYED),
        (1, 5, PLAIN),
        (5, 7, DECAYED),
    ]


def test_frozen_and_other_pieces_part_ranges() -> None:
    layout = FlatLayout.build({"a": (2,), "frozen": (3,), "b": (2,), "whole": (2,)}, "f4", 1)
    optimizers: dict[str, Optimizer] = {"a": PLAIN, "b": PLAIN, "whole": Adafactor()}
    assert elementwise_ranges(layout.pieces(0), optimizers) == [(0, 2, PLAIN), (5, 7, PLAIN)]


def test_whole_parameters_are_listed_on_every_rank() -> None:
    shapes = {"a": (2, 3), "bias": (3,), "b": (4,), "c": (1, 2)}
    first, second = Adafactor(), Adafactor(weight_decay=0.1)
    optimizers: dict[str, Optimizer] = {"a": first, "bias": PLAIN, "b": second, "c": first}
    specs = [
        whole_parameter_specs(FlatLayout.build(shapes, "f4", 4), rank, optimizers)
        for rank in range(4)
    ]
    assert all(list(found) == [first, second] for found in specs)
    assert [found[first] for found in specs] == [
        [PieceSpec("a", (2, 3), 0, 4), PieceSpec("c", (1, 2), 0, 0)],
        [PieceSpec("a", (2, 3), 4, 6), PieceSpec("c", (1, 2), 0, 0)],
        [PieceSpec("a", (2, 3), 0, 0), PieceSpec("c", (1, 2), 0, 0)],
        [PieceSpec("a", (2, 3), 0, 0), PieceSpec("c", (1, 2), 0, 2)],
    ]
    assert [found[second] for found in specs] == [
        [PieceSpec("b", (4,), 0, 0)],
        [PieceSpec("b", (4,), 0, 0)],
        [PieceSpec("b", (4,), 0, 3)],
        [PieceSpec("b", (4,), 3, 4)],
    ]
    layout = FlatLayout.build(shapes, "f4", 4)
    assert whole_parameter_specs(layout, 0, dict.fromkeys(shapes, PLAIN)) == {}


CHOICES: list[Optimizer | None] = [PLAIN, DECAYED, SGD(0.1), None]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    world_size=st.integers(1, 5),
    data=st.data(),
)
def test_every_element_is_in_the_range_of_its_optimizer(
    sizes: list[int], world_size: int, data: st.DataObject
) -> None:
    names = [f"p{i}" for i in range(len(sizes))]
    chosen = {name: data.draw(st.sampled_from(CHOICES)) for name in names}
    optimizers = {name: found for name, found in chosen.items() if found is not None}
    layout = FlatLayout.build(dict(zip(names, sizes, strict=True)), "f4", world_size)
    expected = [chosen[name] for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    expected += [None] * layout.padding
    for rank in range(world_size):
        found: list[Optimizer | None] = [None] * layout.shard_size
        ranges = elementwise_ranges(layout.pieces(rank), optimizers)
        for start, stop, optimizer in ranges:
            assert found[start:stop] == [None] * (stop - start)
            found[start:stop] = [optimizer] * (stop - start)
        first, last = layout.shard_bounds(rank)
        assert found == expected[first:last]
        for one, other in itertools.pairwise(ranges):
            assert one.stop < other.start or one.optimizer != other.optimizer
