"""Body: carries random programs out, and compares every result with what it must be."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from support import oracle, program_maker
from support.arrays import WRITABLE, Array, check_same
from support.program_steps import (
    Batch,
    Beside,
    Call,
    Close,
    Half,
    MakeMesh,
    Many,
    Program,
    Split,
    Step,
    Sub,
    Wait,
)

import fsdpcore as fc

_LOCK = threading.Lock()


@functools.lru_cache(maxsize=8)
def _made(seed: int, size: int) -> Program:
    return program_maker.make(seed, size)


def carry_out(backend: fc.Backend, seeds: list[int], delays: bool) -> None:
    """Carry the programs of ``seeds`` out, one after the other."""
    for seed in seeds:
        with _LOCK:  # ranks that are threads share one copy
            program = _made(seed, backend.world_size)
        try:
            _Run(backend, program, delays).run()
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\nin {program}") from error


class _Run:
    """One program on one rank."""

    def __init__(self, backend: fc.Backend, program: Program, delays: bool) -> None:
        self.me = backend.rank
        self.program = program
        self.random = random.Random(f"{program.seed} on rank {self.me}")
        self.delays = delays
        # Each program has its groups to itself.
        self.groups: dict[int, fc.Backend] = {0: backend.sub(range(backend.world_size))}
        self.results: dict[int, Array] = {}
        self.works: list[tuple[str, fc.Work, Callable[[Any], None], int]] = []
        self.halves: set[int] = set()  # messages of which one side is under way

    def run(self) -> None:
        for number, step in enumerate(self.program.steps):
            self.doing = f"step {number}: {step}"
            if isinstance(step, Half):
                self.halves ^= {step.message.number}
            if self.delays and self.random.random() < 0.2:
                self.groups[0].clock.sleep(self.random.random() * 0.001)
            if self.me in step.members:
                _DO[type(step)](self, step)
        self.doing = "the end"
        assert not self.halves
        self.wait_for(lambda: True)
        for group in self.groups.values():
            group.close()

    def wait_for(self, wanted: Callable[[], bool]) -> None:
        """Wait for what has been started, in any order, as far as it is ``wanted``."""
        self.random.shuffle(self.works)
        kept = []
        for entry in self.works:
            what, work, check, message = entry
            if message in self.halves or not wanted():
                kept.append(entry)
                continue
            if work.done() and self.random.random() < 0.5:
                result = work.result()
            else:
                result = work.wait(self.random.choice([None, 60, float("inf")]))
            check(result)
            assert work.done(), what
            assert work.wait(0) is result, f"{what}: another result at the second time"
        self.works = kept

    # Collectives.

    def arrays(self, call: Call) -> tuple[Any, Any]:
        """Return the input and the ``out`` of a call."""
        given, expected = call.inputs[self.me], call.expected[self.me]
        if call.source is not None and given is not None:
            if call.source not in self.results:
                self.wait_for(lambda: True)
            given = self.results[call.source]
        elif given is not None:
            given = given.copy()
        if expected is None or call.out == "new":
            return given, None
        if call.out in ("given", "strided"):
            layout = WRITABLE["plain" if call.out == "given" else "strided"]
            return given, layout(np.zeros_like(expected))
        if call.out == "in place":
            given = given.copy()
            return given, given
        rows = call.inputs[self.me].shape[0]
        place = call.members.index(self.me)
        if call.kind == "all_gather":
            whole = np.zeros_like(expected)
            whole[place * rows : (place + 1) * rows] = given
            return whole[place * rows : (place + 1) * rows], whole
        given = given.copy()
        before = sum(p.shape[0] for p in oracle.pieces(given, len(call.members))[:place])
        return given, given[before : before + expected.shape[0]]

    def checker(self, call: Call, given: Any, out: Any) -> Callable[[Any], None]:
        """Return what checks a call's result."""
        expected, what = call.expected[self.me], f"{self.doing}; {call}"
        before = None if out is not None and call.out in ("in place", "own chunk") else given
        before = None if before is None else before.copy()

        def check(result: Any) -> None:
            if expected is None:
                assert result is None, f"{what}: returned {result!r}"
                return
            check_same(result, expected, what)
            assert out is None or result is out, f"{what}: did not return out"
            if before is not None:
                check_same(given, before, f"the input of {what}")
            self.results[call.value] = result

        return check

    def call(self, call: Call) -> None:
        self.carry_out(call, *self.arrays(call))

    def carry_out(self, call: Call, given: Any, out: Any) -> None:
        group = self.groups[call.group.number]
        check = self.checker(call, given, out)
        options = dict(call.options)
        if call.started:
            options["async_op"] = True
        if call.kind == "barrier":
            result = fc.barrier(group, **options)
        else:
            counts = [call.counts[self.me]] if call.counts else []
            function = getattr(fc, call.kind)
            result = function(given, group, *counts, out=out, **options)
        if call.started:
            self.works.append((str(call), result, check, -1))
        else:
            check(result)

    def batch(self, step: Batch) -> None:
        works = []
        group = self.groups[step.group.number]
        prepared = [self.arrays(call) for call in step.calls]
        checks = [self.checker(c, *a) for c, a in zip(step.calls, prepared, strict=True)]
        with fc.coalesce(group, async_op=step.started) as batch:
            for call, (given, out) in zip(step.calls, prepared, strict=True):
                works.append(getattr(batch, call.kind)(given, out=out, **call.options))
        for call, check, work in zip(step.calls, checks, works, strict=True):
            if step.started:
                self.works.append((str(call), work, check, -1))
            else:
                check(work.result())

    def many(self, step: Many) -> None:
        group = self.groups[step.group.number]
        prepared = [self.arrays(call) for call in step.calls]
        checks = [self.checker(c, *a) for c, a in zip(step.calls, prepared, strict=True)]
        given, outs = [a for a, _ in prepared], [out for _, out in prepared]
        results = fc.all_reduce_many(
            given, group, op=step.op, bucket_bytes=step.bucket_bytes, out=outs
        )
        for check, result in zip(checks, results, strict=True):
            check(result)

    def beside(self, step: Beside) -> None:
        errors: list[BaseException] = []
        sides = [
            [(call, *self.arrays(call)) for call in side if self.me in call.members]
            for side in step.sides
        ]

        def run(side: list[tuple[Call, Any, Any]]) -> None:
            try:
                for prepared in side:
                    self.carry_out(*prepared)
            except BaseException as error:
                errors.append(error)

        thread = self.groups[0].clock.start(lambda: run(sides[1]), "beside")
        run(sides[0])
        thread.join(150)  # as long as the deadlines of two collectives, and more
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    # Messages.

    def half(self, step: Half) -> None:
        message = step.message
        group = self.groups[message.group.number]
        if step.sends:
            array = message.array.copy()
            peer, tag = message.dst, message.tag
            if step.blocks:
                group.send(array, peer, tag=tag)
                array[...] = 0
            else:
                work = group.isend(array, peer, tag=tag)
                self.works.append((str(step), work, lambda _: None, message.number))
            return
        room = WRITABLE[self.random.choice(["plain", "strided"])](np.zeros_like(message.array))
        what = f"{self.doing}; {step}"

        def check(result: Any) -> None:
            assert result is room
            check_same(room, message.array, what)

        if step.blocks:
            check(group.recv(room, message.src, tag=message.tag))
        else:
            work = group.irecv(room, message.src, tag=message.tag)
            self.works.append((str(step), work, check, message.number))

    # Groups.

    def keep(self, number: int, group: fc.Backend, members: tuple[int, ...]) -> None:
        assert group.ranks == members, f"{self.doing}: has ranks {group.ranks}"
        assert group.rank == members.index(self.me), self.doing
        self.groups[number] = group

    def sub(self, step: Sub) -> None:
        group = self.groups[step.parent.number].sub(step.ranks)
        self.keep(step.made.number, group, step.made.members)

    def split(self, step: Split) -> None:
        place = step.parent.members.index(self.me)
        parent = self.groups[step.parent.number]
        group = parent.split(step.colors[place], step.keys[place])
        mine = [made for made in step.made if self.me in made.members]
        if not mine:
            assert group is None, f"{self.doing}: made a group without a color"
            return
        assert group is not None, self.doing
        self.keep(mine[0].number, group, mine[0].members)

    def mesh(self, step: MakeMesh) -> None:
        mesh = fc.Mesh(self.groups[step.parent.number], step.axes)
        mine = [(axes, made) for axes, made in step.made if self.me in made.members]
        self.random.shuffle(mine)
        for axes, made in mine:
            self.keep(made.number, mesh[axes], made.members)

    def close(self, step: Close) -> None:
        self.groups.pop(step.group.number).close()

    def wait(self, step: Wait) -> None:
        self.wait_for(lambda: self.random.random() < step.share)


_DO: dict[type[Step], Callable[[_Run, Any], None]] = {
    Call: _Run.call,
    Batch: _Run.batch,
    Many: _Run.many,
    Beside: _Run.beside,
    Half: _Run.half,
    Sub: _Run.sub,
    Split: _Run.split,
    MakeMesh: _Run.mesh,
    Close: _Run.close,
    Wait: _Run.wait,
}
