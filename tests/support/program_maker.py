"""Random programs: made from a seed, with what every step must give, computed one by one.

Every step depends on earlier steps only, whatever the ranks do at the same time: so a program
cannot hang, and its results are those of carrying it out sequentially.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from support import oracle
from support.arrays import Array, array_of
from support.program_steps import (
    Batch,
    Beside,
    Call,
    Close,
    Group,
    Half,
    MakeMesh,
    Many,
    Message,
    Program,
    Split,
    Step,
    Sub,
    Wait,
)

from fsdpcore.collectives.selection.table import ALGORITHMS

REDUCING = ["all_reduce", "reduce_scatter", "reduce", "reduce_scatter_v"]
ROOTED = ["broadcast", "reduce", "gather", "scatter"]
SPLITTING = ["reduce_scatter", "scatter", "all_to_all"]
PLAIN = ["all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast", "gather", "scatter"]
KINDS = [*PLAIN, "all_to_all", "all_gather_v", "reduce_scatter_v", "all_to_all_v", "barrier"]
BATCHED = [kind for kind in [*PLAIN, "all_to_all"] if kind != "scatter"]
COLUMNS = [0, 1, 1, 3, 3, 40]
LARGEST_INPUT = 3000  # elements of a result that is used again

_NAMES = {dtype.name: dtype for dtype in oracle.DTYPES}


def make(seed: int, size: int) -> Program:
    """Return the program of a seed for ``size`` ranks."""
    return _Maker(seed, size).program()


class _Maker:
    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size
        self.random = random.Random(f"{seed}/{size}")
        everybody = Group(0, tuple(range(size)))
        self.groups = [everybody]
        self.count = 1  # of groups
        self.values: dict[int, dict[int, Array | None]] = {}
        self.number = 0  # of values and messages
        self.halves: list[Message] = []
        self.steps: list[Step] = []

    def program(self) -> Program:
        kinds = {
            self.call: 10,
            self.batch: 2,
            self.many: 1,
            self.beside: 1,
            self.message: 5,
            self.rest_of_message: 3,
            self.sub: 2,
            self.split: 2,
            self.mesh: 1,
            self.close: 1,
            self.wait: 2,
        }
        for _ in range(self.random.randint(3, 14)):
            self.random.choices(list(kinds), list(kinds.values()))[0]()
        while self.halves:
            self.rest_of_message()
        return Program(self.seed, self.size, self.steps)

    # Collectives.

    def call(self) -> None:
        call = self.collective(self.random.choice(self.groups), KINDS, batched=False)
        call.started = self.random.random() < 0.5
        self.keep([call])
        self.steps.append(call)

    def batch(self) -> None:
        group = self.random.choice(self.groups)
        count = self.random.randint(0, 6)
        # All inputs are read before any result is there, so only earlier values will do.
        calls = [self.collective(group, BATCHED, batched=True) for _ in range(count)]
        self.keep(calls)
        self.steps.append(Batch(group, calls, self.random.random() < 0.5))

    def many(self) -> None:
        group = self.random.choice(self.groups)
        op = self.random.choice(oracle.OPS)
        calls = []
        for _ in range(self.random.randint(0, 8)):
            calls.append(self.collective(group, ["all_reduce"], batched=True, op=op))
        self.keep(calls)
        self.steps.append(Many(group, calls, self.random.choice([1, 64, 1000, 1 << 20]), op))

    def beside(self) -> None:
        if len(self.groups) < 2:
            return
        sides: tuple[list[Call], list[Call]] = ([], [])
        for side, group in zip(sides, self.random.sample(self.groups, 2), strict=True):
            for _ in range(self.random.randint(1, 4)):
                side.append(self.collective(group, KINDS, batched=False))
                side[-1].started = self.random.random() < 0.2
        self.keep([*sides[0], *sides[1]])
        self.steps.append(Beside(sides))

    def keep(self, calls: Sequence[Call]) -> None:
        """Let later steps use the results."""
        for call in calls:
            if call.kind != "barrier":
                self.values[call.value] = call.expected

    def collective(
        self, group: Group, kinds: Sequence[str], *, batched: bool, op: str | None = None
    ) -> Call:
        """Draw a collective of a group."""
        kind = self.random.choice(kinds)
        self.number += 1
        source, inputs = self.inputs(kind, group, op)
        call = Call(kind, group, inputs, {}, {}, source=source, value=self.number)
        if kind == "barrier":
            call.expected = dict.fromkeys(group.members)
            return call
        self.options(call, op, batched)
        parts = [inputs[rank] for rank in group.members]
        results = self.results(call, parts)
        call.expected = dict(zip(group.members, results, strict=True))
        root = call.options.get("root", -1)
        if kind == "scatter":
            call.inputs = {
                rank: array if place == root else None
                for place, (rank, array) in enumerate(inputs.items())
            }
        call.out = self.random.choice(["new", "new", "given", "strided", *_in_place(call)])
        return call

    def inputs(
        self, kind: str, group: Group, op: str | None
    ) -> tuple[int | None, dict[int, Array]]:
        """Return arrays that fit a collective: results of an earlier one, or new ones."""
        fits = [
            n for n, v in self.values.items() if _fits(kind, op, [v.get(r) for r in group.members])
        ]
        if fits and kind != "barrier" and self.random.random() < 0.4:
            number = self.random.choice(fits)
            value = self.values[number]
            return number, {rank: _some(value[rank]) for rank in group.members}
        dtype, _ = self.random.choice([c for c in oracle.COMBINATIONS if op is None or c[1] == op])
        rows = self.random.randint(0, 3 * self.size)
        columns = self.random.choice(COLUMNS) if self.random.random() < 0.95 else 2000
        ndim = self.random.choice([1, 2, 2, 2, 3] if _needs_rows(kind) else [0, 1, 2, 2, 2, 3])
        inputs = {}
        for rank in group.members:
            if kind in ("all_gather_v", "all_to_all_v"):
                rows = self.random.randint(0, 6)
            shape = (rows, columns, 2)[:ndim]
            inputs[rank] = array_of(rank, shape, dtype, f"{self.seed}/{self.number}")
        return None, inputs

    def options(self, call: Call, op: str | None, batched: bool) -> None:
        """Draw the keywords and counts of a collective."""
        count = len(call.members)
        first = next(iter(call.inputs.values()))
        if call.kind in REDUCING:
            ops = [o for o in oracle.OPS if oracle.allowed(o, first.dtype)]
            call.options["op"] = op or self.random.choice(ops)
        if call.kind in ROOTED:
            call.options["root"] = self.random.randrange(count)
        if not batched:
            call.options["algorithm"] = self.random.choice(
                ["auto", "auto", *_algorithms(call.kind, first.dtype, call.options.get("op", ""))]
            )
        if call.kind == "reduce_scatter_v":
            counts = self.cut(first.shape[0], count)
            call.counts = dict.fromkeys(call.members, counts)
        if call.kind == "all_to_all_v":
            call.counts = {r: self.cut(a.shape[0], count) for r, a in call.inputs.items()}

    def cut(self, rows: int, count: int) -> list[int]:
        """Divide rows over ranks, some of which may get none."""
        cuts = sorted(self.random.randint(0, rows) for _ in range(count - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]

    def results(self, call: Call, parts: list[Array]) -> list[Array | None]:
        """What a collective gives to each member."""
        count, options = len(parts), call.options
        root = options.get("root", -1)
        if call.kind in REDUCING:
            total = oracle.reduced(parts, options["op"])
            if call.kind == "reduce_scatter":
                return list(oracle.pieces(total, count))
            if call.kind == "reduce_scatter_v":
                counts = next(iter(call.counts.values()))
                return list(np.split(total, np.cumsum(counts)[:-1]))
            if call.kind == "reduce":
                return [total if rank == root else None for rank in range(count)]
            return [total] * count
        if call.kind == "broadcast":
            return [parts[root]] * count
        if call.kind == "scatter":
            return list(oracle.pieces(parts[root], count))
        if call.kind == "all_to_all":
            pieces = [oracle.pieces(part, count) for part in parts]
            return [oracle.joined([piece[rank] for piece in pieces]) for rank in range(count)]
        if call.kind == "all_to_all_v":
            counts_of = [call.counts[rank] for rank in call.members]
            return [oracle.exchanged(parts, counts_of, rank) for rank in range(count)]
        joined = oracle.joined(parts)
        if call.kind == "gather":
            return [joined if rank == root else None for rank in range(count)]
        return [joined] * count

    # Messages.

    def message(self) -> None:
        group = self.random.choice(self.groups)
        if len(group.members) < 2:
            return
        src, dst = self.random.sample(range(len(group.members)), 2)
        if self.halves and self.random.random() < 0.6:  # beside others on the same way
            other = self.random.choice(self.halves)
            group, src, dst = other.group, other.src, other.dst
        self.number += 1
        tag, sender_first = self.random.randrange(3), self.random.random() < 0.5
        key = (group.number, src, dst, tag)
        if any(m.key == key and m.sender_first != sender_first for m in self.halves):
            tag = 100 + self.number  # or it would be matched by one that waits
        shape = self.random.choice([(), (0,), (3,), (2, 5), (40, 50)])
        dtype = self.random.choice(oracle.DTYPES)
        array = array_of(group.members[src], shape, dtype, f"{self.seed}/{self.number}")
        message = Message(self.number, group, src, dst, tag, array, sender_first)
        at_once = self.random.random() < 0.5 and all(m.key != message.key for m in self.halves)
        blocks = at_once and self.random.random() < 0.5
        self.steps.append(Half(message, sender_first, blocks))
        if at_once:
            self.steps.append(Half(message, not sender_first, self.random.random() < 0.5))
        else:
            self.halves.append(message)

    def rest_of_message(self) -> None:
        if not self.halves:
            return
        key = self.random.choice(self.halves).key
        message = next(m for m in self.halves if m.key == key)  # the oldest of its kind
        self.halves.remove(message)
        self.steps.append(Half(message, not message.sender_first, self.random.random() < 0.5))

    # Groups.

    def new_group(self, members: Sequence[int]) -> Group:
        group = Group(self.count, tuple(members))
        self.count += 1
        self.groups.append(group)
        return group

    def sub(self) -> None:
        parent = self.random.choice(self.groups)
        size = len(parent.members)
        ranks = tuple(self.random.sample(range(size), self.random.randint(1, size)))
        made = self.new_group([parent.members[rank] for rank in ranks])
        self.steps.append(Sub(parent, ranks, made))

    def split(self) -> None:
        parent = self.random.choice(self.groups)
        colors = tuple(self.random.choice([None, 0, 0, 7, -3]) for _ in parent.members)
        keys = tuple(self.random.choice([-1, 0, 0, 5]) for _ in parent.members)
        made = []
        for color in dict.fromkeys(c for c in colors if c is not None):
            alike = [place for place, other in enumerate(colors) if other == color]
            alike.sort(key=lambda place: keys[place])  # stable: by rank where keys are equal
            made.append(self.new_group([parent.members[place] for place in alike]))
        self.steps.append(Split(parent, colors, keys, tuple(made)))

    def mesh(self) -> None:
        parent = self.random.choice(self.groups)
        size = len(parent.members)
        width = self.random.choice([w for w in range(1, size + 1) if size % w == 0])
        axes = {"outer": size // width, "inner": width}
        grid = np.array(parent.members).reshape(size // width, width)
        made = [(("outer",), self.new_group(column.tolist())) for column in grid.T]
        made += [(("inner",), self.new_group(row.tolist())) for row in grid]
        made.append((("outer", "inner"), self.new_group(grid.reshape(-1).tolist())))
        made.append((("inner", "outer"), self.new_group(grid.T.reshape(-1).tolist())))
        if self.random.random() < 0.5:
            axes[self.random.choice(["outer", "inner"])] = -1
        self.steps.append(MakeMesh(parent, axes, tuple(made)))

    def close(self) -> None:
        busy = {message.group.number for message in self.halves}
        closable = [group for group in self.groups[1:] if group.number not in busy]
        if closable:
            group = self.random.choice(closable)
            self.groups.remove(group)
            self.steps.append(Close(group))

    def wait(self) -> None:
        share = self.random.choice([0.3, 0.7, 1.0])
        self.steps.append(Wait(tuple(range(self.size)), share))


def _needs_rows(kind: str) -> bool:
    return kind in SPLITTING or kind.endswith("_v")


def _fits(kind: str, op: str | None, parts: list[Array | None]) -> bool:
    arrays = [part for part in parts if part is not None]
    if len(arrays) < len(parts):
        return False
    first = arrays[0]
    if any(a.dtype != first.dtype or a.size > LARGEST_INPUT for a in arrays):
        return False
    if op is not None and not oracle.allowed(op, first.dtype):
        return False
    if _needs_rows(kind) and any(a.ndim == 0 for a in arrays):
        return False
    ragged = kind in ("all_gather_v", "all_to_all_v")
    return all(a.ndim == first.ndim and a.shape[ragged:] == first.shape[ragged:] for a in arrays)


def _some(array: Array | None) -> Array:
    assert array is not None
    return array


def _algorithms(kind: str, dtype: np.dtype[Any], op: str) -> list[str]:
    """Algorithms of a collective whose bits are known."""
    known = ALGORITHMS[kind.removesuffix("_v")]
    exact = kind not in REDUCING or dtype.kind in "biu"
    return [n for n, a in known.items() if (a.canonical or exact) and a.supports(dtype, op)]


def _in_place(call: Call) -> list[str]:
    """Further ways to give ``out`` to a call."""
    pairs = [(call.inputs[rank], call.expected[rank]) for rank in call.members]
    ways = []
    if all(i is not None and (e is None or e.shape == i.shape) for i, e in pairs):
        ways.append("in place")
    if call.kind in ("all_gather", "reduce_scatter") and all(i.ndim for i, _ in pairs):
        ways.append("own chunk")
    return ways
