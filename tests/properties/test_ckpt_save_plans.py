"""Whatever ranks hold: each element is written once, by a rank that has it."""

from __future__ import annotations

import random

import pytest
from support.ckpt_metadata import elements

import fsdpcore as fc
from fsdpcore.checkpoint.plan import dealing
from fsdpcore.checkpoint.plan.held import HeldArray, HeldTable, decode, held_piece, holding
from fsdpcore.checkpoint.plan.save_plan import decode_written, plan, plan_table
from fsdpcore.core.geometry.regions import Box, Range, regions_inside

SHAPES = {"matrix": (6, 8), "cube": (3, 4, 5), "line": (17,), "point": (), "none": (0, 3)}


def _cut(name, ranks, rng):
    """Give each rank its regions of an array: ranges, columns, or ranges of columns."""
    shape = SHAPES[name]
    size = len(elements(Box((0,) * len(shape), shape), shape))
    bounds = sorted(rng.randint(0, size) for _ in range(ranks - 1))
    runs = [Range(*each) for each in zip([0, *bounds], [*bounds, size], strict=True)]
    kind = rng.choice(("ranges", "all", "columns"))
    if kind == "all":
        return [[Range(0, size)] if size else [] for _ in range(ranks)]
    if kind == "ranges" or len(shape) < 2 or not size:
        return [[run] if run.size else [] for run in runs]
    middle = rng.randint(1, shape[-1] - 1)
    halves = [(0, middle), (middle, shape[-1])]
    boxes = [Box((*(0,) * (len(shape) - 1), a), (*shape[:-1], b)) for a, b in halves]
    found = []
    for rank in range(ranks):
        box, count = boxes[rank % 2], len(range(rank % 2, ranks, 2))
        share = rank // 2
        run = Range(box.size * share // count, box.size * (share + 1) // count)
        found.append([each for each in regions_inside(box, run, shape) if each.size])
    return found


def _held(rng):
    ranks = rng.randint(2, 7)
    cuts = {name: _cut(name, ranks, rng) for name in SHAPES}
    held = []
    for rank in range(ranks):
        names = [
            name for name in SHAPES if cuts[name][rank] or name == "none" or rng.random() < 0.7
        ]
        rng.shuffle(names)
        held.append(
            [
                HeldArray(
                    name,
                    "int16",
                    SHAPES[name],
                    tuple(held_piece(each, SHAPES[name]) for each in cuts[name][rank]),
                )
                for name in names
            ]
        )
    return held


def _planned(held):
    """Plan as rank 0 does with what the others tell, of whom one names what several have."""
    tables = [holding(each) for each in held]
    names = [each.names for each in tables]
    told = [each.encode(named=names.index(each.names) == n) for n, each in enumerate(tables)]
    return plan_table(HeldTable.of(decode(told, names)), len(held))


@pytest.mark.parametrize("seed", range(60))
def test_each_element_is_written_once_by_a_rank_that_has_it(seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(dealing, "SPLIT_BYTES", rng.choice((1, 60, 1 << 20)))
    held = _held(rng)
    made = _planned(held)
    assert dict(made.arrays) == {name: ("int16", shape) for name, shape in SHAPES.items()}
    seen = {name: [] for name in SHAPES}
    for rank, mine in enumerate(held):
        written = made.written[rank]
        assert decode_written(made.encode(rank), mine) == written
        pieces = [(array.name, piece) for array in mine for piece in array.pieces]
        for each in written:
            name, piece = pieces[each.rows.piece]
            inside = sorted(elements(piece.region, SHAPES[name]))
            rows = inside[each.rows.start * piece.row : each.rows.stop * piece.row]
            assert name == each.name
            assert sorted(elements(each.region, SHAPES[name])) == rows
            seen[name] += rows
    for name, shape in SHAPES.items():
        every = elements(Box((0,) * len(shape), shape), shape)
        assert sorted(seen[name]) == (sorted(every) if every else [])


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ([[Range(0, 30)], [Range(29, 48)]], "share elements"),
        ([[Box((0, 0), (6, 5))], [Box((0, 4), (6, 8))]], "share elements"),
        ([[Box((0, 0), (6, 5))], [Box((5, 5), (6, 8)), Range(0, 3)]], "share elements"),
        ([[Box((0, 0), (6, 5))], [Box((1, 5), (6, 8))]], "3 of its 48"),
        # As many elements as the array has, but not those.
        ([[Range(0, 24)], [Range(23, 47)]], "share elements"),
        ([[Box((0, 0), (6, 4))], [Box((0, 3), (6, 7))]], "share elements"),
        ([[Range(0, 30)], [Range(31, 48)]], "1 of its 48"),
        ([[], []], "48 of its 48"),
    ],
)
def test_what_is_not_there_once_is_refused(pieces, match):
    held = [
        [HeldArray("matrix", "int16", (6, 8), tuple(held_piece(r, (6, 8)) for r in each))]
        for each in pieces
    ]
    with pytest.raises(fc.ArgumentError, match=match):
        plan(held)


def test_ranks_that_disagree_are_named_though_they_have_nothing_of_it():
    held = [[HeldArray("w", "int16", (n,), ())] for n in (0, 0, 3)]
    with pytest.raises(fc.ArgumentError, match=r"shape \(3,\) on rank 2, but int16 and \(0,\)"):
        _planned(held)


def test_all_pieces_of_a_rank_count():
    def array(name, *pieces):
        return HeldArray(name, "int8", (90,), tuple(held_piece(Range(*p), (90,)) for p in pieces))

    both = HeldArray("both", "int8", (5,), (held_piece(Range(0, 5), (5,)),))
    held = [[array("a", (0, 25), (25, 50)), both], [array("a", (50, 90)), both]]
    assert [[each.name for each in mine] for mine in plan(held).written] == [
        ["a", "a"],
        ["a", "both"],
    ]
