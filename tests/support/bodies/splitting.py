"""Bodies: groups made by color, meshes, and operations of many groups under way at once."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
from support import oracle
from support.arrays import array_of, check_same
from support.bodies.point_to_point import check_words, expect
from support.bodies.reductions import check_reductions

import fsdpcore as fc


def _check_group(group: fc.Backend | None, members: list[int], me: int) -> fc.Backend:
    """The group has these members (ranks of the job) in this order, and they can talk."""
    assert group is not None, f"no group on rank {me} of {members}"
    assert group.ranks == tuple(members), f"{group.ranks} instead of {members}"
    assert group.rank == members.index(me)
    check_reductions(group, [array_of(rank, (3,)) for rank in members], "sum")
    return group


def by_color(backend: fc.Backend) -> None:
    """Equal colors get together; keys order them, ranks where keys are equal."""
    me, p = backend.rank, backend.world_size
    even = [rank for rank in range(p) if rank % 2 == me % 2]
    _check_group(backend.split(me % 2), even, me)
    _check_group(backend.split(-(2**63) + me % 2, key=-me), even[::-1], me)
    _check_group(backend.split(np.int32(4), key=np.int64(me // 2 % 2)), _by_halves(p), me)
    _check_group(backend.split(me), [me], me)


def _by_halves(p: int) -> list[int]:
    return sorted(range(p), key=lambda rank: (rank // 2 % 2, rank))


def without_color(backend: fc.Backend) -> None:
    """Who gives no color gets no group; the others do, and the parent goes on."""
    me, p = backend.rank, backend.world_size
    assert backend.split(None) is None
    group = backend.split(None if me == p - 1 else 0, key=5)
    if me == p - 1:
        assert group is None
    else:
        _check_group(group, list(range(p - 1)), me)
    backend.barrier()


def split_again(backend: fc.Backend) -> None:
    """Groups of groups, down to single ranks, by halves in reversed order."""
    group, members = backend, list(range(backend.world_size))
    while len(members) > 1:
        half = len(members) // 2
        low = group.rank < half
        members = members[:half][::-1] if low else members[half:][::-1]
        group = _check_group(group.split(int(low), key=-group.rank), members, backend.rank)
    backend.barrier()


def split_refusals(backend: fc.Backend) -> None:
    """What is no color or key is refused before anything is sent."""
    for color in (True, 1.0, "red", 2**63, [0]):
        expect(fc.ArgumentError, backend.split, color)
    for key in (None, False, 0.5, "0", -(2**63) - 1):
        expect(fc.ArgumentError, backend.split, 0, key)
    _check_group(backend.split(1), list(range(backend.world_size)), backend.rank)


def sub_refusals(backend: fc.Backend) -> None:
    """What is no list of members is refused."""
    me = backend.rank
    wrong: list[Any] = [None, True, 0, 0.5, "0", b"\0", {me}, {me: 0}, [None], [[me]]]
    wrong += [[True], [me, me], [np.bool_(True)], [-1, me], np.array([float(me)])]
    for members in wrong:
        error = expect(fc.ArgumentError, backend.sub, members)
        check_words(error, "sub()")
    expect(fc.ArgumentError, backend.sub, [me], name=3)
    assert backend.sub(np.array([me])).ranks == (me,)
    assert backend.sub(rank for rank in [me]).ranks == (me,)
    backend.barrier()


def named_in_any_order(backend: fc.Backend) -> None:
    """Groups with names may be made in different orders; equal names count up as ever."""
    me, p = backend.rank, backend.world_size
    names = ["a", "b", "", "a\0"]
    order = names if me % 2 else names[::-1]
    groups = {name: backend.sub(range(p), name=name) for name in order}
    groups["a again"] = backend.sub(range(p), name="a")
    assert len({group.channel for group in groups.values()}) == 5
    works = {}
    for number, name in enumerate([*names, "a again"]):
        works[name] = fc.all_reduce(np.full(number, 1 << number), groups[name], async_op=True)
    for number, name in enumerate([*names, "a again"]):
        check_same(works[name].wait(), np.full(number, p << number), name)


def mismatched_split(backend: fc.Backend) -> None:
    """A rank that calls something else is named."""
    if backend.rank == 0:
        error = expect(fc.MismatchError, fc.all_gather, np.zeros(3, np.int64), backend)
    else:
        error = expect(fc.MismatchError, backend.split, 0)
    check_words(error, "split", "rank 0: all_gather")


# Meshes.


def _grids(p: int) -> list[tuple[int, ...]]:
    # Of three axes, one order of the extents: that of two axes comes in both.
    return [
        shape
        for count in (1, 2, 3)
        for shape in itertools.product(range(1, p + 1), repeat=count)
        if np.prod(shape) == p and (count < 3 or sorted(shape) == list(shape))
    ]


def meshes(backend: fc.Backend) -> None:
    """Grids of the ranks: each choice of axes gives the ranks that differ along them."""
    me, p = backend.rank, backend.world_size
    for shape in _grids(p):
        names = ["x", "y", "z"][: len(shape)]
        mesh = fc.Mesh(backend, dict(zip(names, shape, strict=True)))
        place = np.unravel_index(me, shape)
        assert (mesh.axes, mesh.shape) == (tuple(names), shape)
        assert list(mesh.coordinates.items()) == list(zip(names, map(int, place), strict=True))
        assert np.array_equal(mesh.ranks, np.arange(p).reshape(shape))
        choices = [c for n in range(1, len(names) + 1) for c in itertools.permutations(names, n)]
        random.Random(f"{me} {shape}").shuffle(choices)  # in an order of its own on each rank
        works = []
        for choice in choices:
            group = mesh[choice]
            assert group is mesh[choice]
            assert len(choice) > 1 or group is mesh[choice[0]]
            members = _along(choice, names, shape, place)
            assert group.ranks == tuple(members), (shape, choice)
            here = [mesh.coordinates[name] for name in choice]
            sizes = [shape[names.index(name)] for name in choice]
            assert group.rank == np.ravel_multi_index(here, sizes)
            work = fc.all_gather([me, len(choice)], group, async_op=True)
            expected = np.array([[rank, len(choice)] for rank in members]).reshape(-1)
            works.append((work, expected, f"{choice} of {shape}"))
        for work, expected, what in works:
            check_same(work.wait(), expected, what)
        mesh.close()


def _along(
    choice: tuple[str, ...], names: list[str], shape: tuple[int, ...], place: Any
) -> list[int]:
    """The ranks along some axes, row-major in the order of ``choice``; by counting."""
    members = []
    for index in itertools.product(*(range(shape[names.index(name)]) for name in choice)):
        position = list(place)
        for name, at in zip(choice, index, strict=True):
            position[names.index(name)] = at
        rank = 0
        for size, at in zip(shape, position, strict=True):
            rank = rank * size + int(at)
        members.append(rank)
    return members


def two_steps_on_a_mesh(backend: fc.Backend) -> None:
    """Inside aligned groups, then across them: the bits of the flat reduction."""
    me, p = backend.rank, backend.world_size
    width = p & -p  # an aligned subtree: the largest power of two that divides p
    mesh = fc.Mesh(backend, {"replicate": -1, "shard": width})
    parts = [array_of(rank, (3 * width + 1,)) for rank in range(p)]
    shard = fc.reduce_scatter(parts[me], mesh["shard"])
    shard = fc.all_reduce(shard, mesh["replicate"])
    rows = oracle.pieces(oracle.reduced(parts, "sum"), width)
    check_same(shard, rows[mesh.coordinates["shard"]], "in two steps")
    whole = fc.all_gather_v(shard, mesh["shard"])
    check_same(whole, fc.all_reduce(parts[me], backend), "all in one")


def meshes_of_groups(backend: fc.Backend) -> None:
    """Two meshes of one backend, and one of a group, do not mix."""
    me, p = backend.rank, backend.world_size
    meshes = [fc.Mesh(backend, {"a": p}), fc.Mesh(backend, {"a": p, "b": 1})]
    meshes.append(fc.Mesh(backend.sub(range(p)), {"a": -1}))
    works = {}
    for number in (0, 1, 2) if me % 2 else (2, 1, 0):
        array = np.full(number + 2, number)
        works[number] = fc.all_reduce(array, meshes[number]["a"], async_op=True)
    for number, work in works.items():
        check_same(work.wait(), np.full(number + 2, p * number), f"mesh {number}")


# Under way at once.


def overlapping_groups(backend: fc.Backend) -> None:
    """Dozens of operations in groups that overlap, started in an order that differs by rank."""
    me, p = backend.rank, backend.world_size
    sets = [tuple(range(p)), tuple(range(p))[::-1], tuple(range(0, p, 2)), tuple(range(p - 1))]
    sets += [(0, p - 1), (p - 1, 0), *((rank, (rank + 1) % p) for rank in range(p))]
    mine = [ranks for ranks in sets if me in ranks and len(set(ranks)) == len(ranks)]
    groups = [(backend.sub(ranks), ranks) for ranks in mine]
    calls = [(group, ranks, number) for group, ranks in groups for number in range(8)]
    random.Random(me).shuffle(calls)
    calls.sort(key=lambda call: call[2])  # in every group the same order
    works = []
    for group, ranks, number in calls:
        parts = [array_of(rank, (4,), salt=f"{ranks} {number}") for rank in ranks]
        work = fc.all_reduce(parts[group.rank], group, async_op=True)
        works.append((work, oracle.reduced(parts, "sum"), f"number {number} in {ranks}"))
    random.Random(-me).shuffle(works)
    for work, expected, what in works:
        check_same(work.wait(), expected, what)


def blocking_beside_started(backend: fc.Backend) -> None:
    """Blocking calls of one group while another has operations under way, and the reverse."""
    me, p = backend.rank, backend.world_size
    groups = [backend.sub(range(p)), backend.sub(range(p)[::-1])]
    for turn in range(6):
        blocking, started = groups[turn % 2], groups[1 - turn % 2]
        works = [
            fc.all_gather(np.array([number, started.rank]), started, async_op=True)
            for number in range(5)
        ]
        for number in range(3):
            total = fc.all_reduce(np.array([number, me]), blocking)
            check_same(total, np.array([p * number, p * (p - 1) // 2]), f"blocking, {turn}")
        for number, work in enumerate(works):
            expected = np.array([[number, rank] for rank in range(p)]).reshape(-1)
            check_same(work.wait(), expected, f"started, {turn}")
