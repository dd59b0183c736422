"""Bodies: groups of ranks."""

from __future__ import annotations

import itertools

import numpy as np
from support import oracle
from support.arrays import array_of, check_same
from support.bodies.movement import check_movements
from support.bodies.point_to_point import expect
from support.bodies.reductions import check_reductions, expect_refusal

import fsdpcore as fc


def any_members_in_any_order(backend: fc.Backend) -> None:
    """A group numbers its members as they were given, for collectives and for messages."""
    me, p = backend.rank, backend.world_size
    orders = [list(range(p)), list(reversed(range(p))), [p - 1, 0], [*range(1, p), 0], [0]]
    orders += [list(range(0, p, 2)), list(range(p - 1, -1, -2))]
    for members in orders:
        if me not in members or len(set(members)) < len(members):
            continue
        group = backend.sub(members)
        assert (group.rank, group.world_size) == (members.index(me), len(members))
        assert group.ranks == tuple(members)
        parts = [array_of(rank, (len(members) + 1, 2)) for rank in members]
        check_reductions(group, parts, "sum", root=len(members) - 1)
        check_movements(group, parts, root=len(members) // 2)
        if len(members) > 1:
            right, left = (group.rank + 1) % len(members), (group.rank - 1) % len(members)
            work = group.isend(np.int32(me), right)
            room = group.recv(np.empty((), np.int32), left)
            work.wait()
            check_same(room, np.asarray(np.int32(members[left])), f"in {members}")


def several_at_once(backend: fc.Backend) -> None:
    """Rows and columns of a grid, and the whole, with operations of all under way together."""
    me, p = backend.rank, backend.world_size
    width = 2
    row = [rank for rank in range(p) if rank // width == me // width]
    column = [rank for rank in range(p) if rank % width == me % width]
    groups = [backend, backend.sub(row), backend.sub(column)]
    members = [list(range(p)), row, column]
    works = []
    for number, (group, ranks) in itertools.product(range(6), zip(groups, members, strict=True)):
        parts = [array_of(rank, (5,), salt=str(number)) for rank in ranks]
        work = fc.all_reduce(parts[group.rank], group, async_op=True)
        works.append((work, oracle.reduced(parts, "sum"), f"number {number} in {ranks}"))
    for work, expected, what in reversed(works):
        check_same(work.wait(), expected, what)


def nested(backend: fc.Backend) -> None:
    """A group of a group, down to single ranks."""
    group, members = backend, list(range(backend.world_size))
    while len(members) > 1:
        half = members[: len(members) // 2]
        if backend.rank not in half:
            half = members[len(members) // 2 :]
        group = group.sub([members.index(rank) for rank in reversed(half)])
        members = list(reversed(half))
        assert group.ranks == tuple(members)
        parts = [array_of(rank, (4,)) for rank in members]
        check_reductions(group, parts, "sum")
    assert group.world_size == 1
    backend.barrier()


def between_calls_of_the_parent(backend: fc.Backend) -> None:
    """Calls of a group and of its parent, turn and turn about, on some ranks more of one kind."""
    me, p = backend.rank, backend.world_size
    group = backend.sub(list(range((p + 1) // 2))) if me < (p + 1) // 2 else None
    for number in range(8):
        whole = [array_of(rank, (3,), salt=str(number)) for rank in range(p)]
        work = fc.all_reduce(whole[me], backend, async_op=number % 2 == 0)
        if group is not None:
            some = whole[: group.world_size]
            result = fc.all_reduce(some[group.rank], group)
            check_same(result, oracle.reduced(some, "sum"), f"group, number {number}")
        result = work.wait() if number % 2 == 0 else work
        check_same(result, oracle.reduced(whole, "sum"), f"parent, number {number}")


def equal_members_do_not_mix(backend: fc.Backend) -> None:
    """Two groups of the same members, and their parent, have nothing to do with each other."""
    me, p = backend.rank, backend.world_size
    backends = [backend, *(backend.sub(range(p)) for _ in range(3))]
    backends[3] = backends[3].sub(range(p))
    order = list(range(4))
    works = {}
    for index in order if me % 2 == 0 else reversed(order):
        array = np.full(2 + index, 10.0**index)
        works[index] = fc.all_reduce(array, backends[index], async_op=True)
    for index, work in works.items():
        check_same(work.wait(), np.full(2 + index, p * 10.0**index), f"group number {index}")
    if p == 1:
        return
    right, left = (me + 1) % p, (me - 1) % p
    sent = [group.isend(np.full(3, index), right) for index, group in enumerate(backends)]
    for index in (2, 0, 3, 1):
        room = backends[index].recv(np.empty(3, np.int64), left)
        check_same(room, np.full(3, index), f"a message in group number {index}")
    for send in sent:
        send.wait()


def messages_and_collectives_do_not_mix(backend: fc.Backend) -> None:
    """A message that waits with tag 0 is not taken for a part of a collective."""
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    right, left = (me + 1) % p, (me - 1) % p
    work = backend.isend(np.full(3, me), right)
    backend.barrier()
    check_same(fc.all_reduce(np.arange(3), backend), np.arange(3) * p, "with a message waiting")
    check_same(backend.recv(np.empty(3, np.int64), left), np.full(3, left), "that message")
    work.wait()


def impossible_groups(backend: fc.Backend) -> None:
    """Duplicates, strangers, and groups of which the caller is no member."""
    me, p = backend.rank, backend.world_size
    for members in ([me, me], [me, p], [-1, me], [], [me, "x"], [me, 0.5]):
        expect_refusal(backend.sub, members)
    if p > 1:
        expect_refusal(backend.sub, [rank for rank in range(p) if rank != me])
        expect_refusal(backend.sub([me]).sub, [1])
    backend.barrier()


def closing_a_group(backend: fc.Backend) -> None:
    """A closed group refuses, its parent and other groups go on."""
    me, p = backend.rank, backend.world_size
    group, other = backend.sub(range(p)), backend.sub(range(p))
    work = fc.all_reduce(np.ones(3), group, async_op=True)
    group.close()
    group.close()
    check_same(work.wait(), np.full(3, float(p)), "begun before the group was closed")
    expect(fc.ClosedError, fc.barrier, group)
    expect(fc.ClosedError, fc.all_reduce, np.ones(3), group, async_op=True)
    if p > 1:
        expect(fc.ClosedError, group.isend, np.ones(3), (me + 1) % p)
        expect(fc.ClosedError, group.recv, np.ones(3), (me + 1) % p)
    other.barrier()
    backend.barrier()
    with backend.sub(range(p)) as last:
        last.barrier()
    expect(fc.ClosedError, last.barrier)
