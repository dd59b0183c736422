"""Programs of sharded units whose every value is known, for ranks at whatever pace."""

from __future__ import annotations

import random
import time

import numpy as np
from numpy.testing import assert_array_equal

import fsdpcore as fc

SHAPES = {"w": (5, 7), "b": (3,), "scale": (), "none": (0, 2)}


def engine_of(backend, units=3, sizes=(SHAPES,), dtype=np.float32, **options):
    """Parameters that are all 0; an update by gradients of -1 adds 1 to each of them."""
    made = [
        fc.Unit(f"u{i}", {n: fc.Spec(s, dtype) for n, s in sizes[i % len(sizes)].items()})
        for i in range(units)
    ]
    return fc.FSDP(made, backend, optimizer=fc.optim.SGD(lr=1.0), **options)


def everything(unit):
    return np.concatenate([array.reshape(-1) for array in unit.params.values()])


def down(unit):
    return {name: np.full_like(array, -1) for name, array in unit.params.items()}


class Player:
    """One rank that goes through a program at its own pace, and knows what it must see."""

    def __init__(self, backend, seed, **options):
        self.engine = engine_of(backend, **options)
        self.version = {unit.name: 0.0 for unit in self.engine.units}
        self.pace = random.Random(f"{seed}/{backend.rank}")  # of this rank alone

    def dawdle(self):
        if self.pace.random() < 0.4:
            time.sleep(self.pace.uniform(0, 2e-3))

    def look(self, unit):
        for _ in range(2):
            self.dawdle()
            assert_array_equal(everything(unit), self.version[unit.name])

    def read(self, unit):
        unit.unshard()
        self.look(unit)
        unit.reshard()

    def read_in_the_background(self, unit):
        work = unit.unshard(async_op=True)
        self.dawdle()
        work.wait()
        unit.unshard()
        self.look(unit)
        unit.reshard()

    def fetch_in_vain(self, unit):
        unit.unshard(async_op=True)
        self.dawdle()
        unit.reshard()

    def read_two(self, unit):
        units = self.engine.units
        other = units[units.index(unit) - 1]
        unit.unshard()
        other.unshard()
        self.look(other)
        other.reshard()
        self.look(unit)
        unit.reshard()

    def reduce(self, unit):
        unit.unshard()
        self.look(unit)
        grads = down(unit)
        unit.reshard()
        self.dawdle()
        unit.reduce_gradients(grads)
        self.update(unit)

    def reduce_early(self, unit):
        unit.unshard()
        unit.reduce_gradients(down(unit))
        self.look(unit)
        unit.reshard()
        self.update(unit)

    def update(self, unit):
        self.dawdle()
        unit.update(step=1, lr=None, grad_scale=1.0)
        self.version[unit.name] += 1

    def write(self, unit):
        self.version[unit.name] += 100
        with unit.writing() as shard:
            self.dawdle()
            shard[:] = self.version[unit.name]

    def train(self, _):
        with self.engine.step() as step:
            for unit in self.engine.units:
                with step.forward(unit):
                    self.look(unit)
            for unit in reversed(self.engine.units):
                with step.backward(unit) as (params, grads):
                    self.look(unit)
                    for name in params:
                        grads[name] = np.full_like(params[name], -1)
            step.update()
        for unit in self.engine.units:
            self.version[unit.name] += 1


def play(backend, seed):
    player = Player(backend, seed)
    program = random.Random(seed)  # the same on all ranks
    moves = ["read", "read_in_the_background", "fetch_in_vain", "read_two", "write", "train"]
    moves += ["reduce", "reduce_early"]
    for _ in range(30):
        move, unit = program.choice(moves), program.choice(player.engine.units)
        player.dawdle()
        getattr(player, move)(unit)
    for unit in player.engine.units:
        player.read(unit)
    return player.engine.windowed


def trained(backend, clip, dtype):
    """Parameters after a few steps with gradients that depend on them, on rank and on place."""
    rng = np.random.default_rng(5)
    shapes = [{"w": (13, 11), "b": (11,)}, {"e": (7,), "none": (0,)}, {"w": (29, 3), "b": ()}]
    made = [
        fc.Unit(f"u{i}", {n: rng.normal(size=s).astype(dtype) for n, s in named.items()})
        for i, named in enumerate(shapes)
    ]
    engine = fc.FSDP(made, backend, optimizer=fc.optim.AdamW(lr=0.01))
    own = np.random.default_rng(backend.rank)
    norms = []
    for number in range(4):
        with engine.step(divisor=None if number % 2 else 3) as step:
            for repeats in (1, 2):  # the second time gradients are added
                for unit in engine.units[:repeats]:
                    with step.forward(unit):
                        pass
                for unit in reversed(engine.units[:repeats]):
                    with step.backward(unit) as (params, grads):
                        for name, array in params.items():
                            grads[name] = array * own.normal(size=array.shape).astype(dtype)
            norms.append(step.update(clip=clip))
    for unit in engine.units:
        unit.unshard()
    return norms, [everything(unit).tobytes() for unit in engine.units], engine.windowed
