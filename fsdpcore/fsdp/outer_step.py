"""``OuterStep``: groups of ranks train by themselves, and meet once in many steps (DiLoCo)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fsdpcore.collectives import all_reduce
from fsdpcore.collectives.consensus import compare
from fsdpcore.collectives.on_device import in_background
from fsdpcore.comm.backend import Backend
from fsdpcore.compress.compression import Compression
from fsdpcore.compress.exchange import Exchange
from fsdpcore.compress.packing import Packing
from fsdpcore.core.buffers import Array, bounds_of, split_sizes
from fsdpcore.core.checks import as_instance, as_int
from fsdpcore.core.digests import hex_digest
from fsdpcore.core.errors import ArgumentError, NonFiniteGradientError, StateError
from fsdpcore.fsdp.engine import FSDP, check_idle
from fsdpcore.fsdp.optim.base import Optimizer
from fsdpcore.fsdp.optim.sgd import SGD
from fsdpcore.fsdp.outer_unit import OuterUnit
from fsdpcore.fsdp.sharding.background import Background
from fsdpcore.fsdp.state.state import FORMAT, ArrayPiece, EngineState, ShardedArray
from fsdpcore.fsdp.units.unit import Unit
from fsdpcore.fsdp.units.wire import check_patterns

_NESTEROV = SGD(lr=0.7, momentum=0.5, nesterov=True)


class OuterStep:
    """Lets groups of ranks train apart, each with an engine, and meet once in many steps.

    Within a group all goes on as ever. In every ``every``-th call of ``step`` each rank exchanges
    with its counterparts of the other groups by how much its shard has changed since they met
    last. The mean of that is a gradient for ``optimizer``, whose result all groups go on with. So
    between groups there travels, once in ``every`` steps, what an all-reduce of the parameters
    takes, or an eighth of that with ``compression``. (Douillard et al., "DiLoCo", 2023; in
    fragments: "Streaming DiLoCo", 2025.)

    Each group gets other batches, and saves checkpoints of its own: its optimizer's state is. The
    outer step is saved beside the engine, and loaded on any number of ranks. ::

        mesh = fc.Mesh(backend, {"group": 4, "shard": -1})
        engine = fc.FSDP(units, mesh["shard"], optimizer=fc.optim.AdamW(lr=3e-4))
        outer = fc.OuterStep(engine, mesh["group"], every=100, compression=fc.Compression("int4"))
        for batch in batches:
            train_one(engine, batch)
            outer.step()
        folder = f"run/group{mesh.coordinates['group']}"
        fc.checkpoint.save(folder, {"model": engine, "outer": outer}, mesh["shard"])

    Making it is a collective of all ranks of all groups, outside of steps.

    Args:
        engine: of this rank's group.
        groups: this rank, and its counterparts in the other groups: those with the same shard.
        every: so many steps lie between meetings.
        optimizer: elementwise; by default ``SGD(lr=0.7, momentum=0.5, nesterov=True)``. The
            authors of DiLoCo take a momentum of 0.9, which wants hundreds of meetings.
        compression: how differences travel: by its ``reduce``, ``rotation``, ``error_feedback``,
            ``block`` and ``exact``; the rest does nothing. None for as they are.
        fragments: 1 for all units at once; with more, that many parts of them meet at different
            steps, each once in ``every`` steps, so that less travels at a time.
        delay: so many steps go on while the differences travel in the background, and what they
            change stays. Below ``every``; 0 waits for them. It takes memory for two more shards.

    Attributes:
        groups, every, optimizer, compression, fragments, delay: as given.
        apart: True: other groups have other values, and save them elsewhere.
        calls: of ``step`` so far.
        rounds: how many of them have met.
        sends: bytes that this rank sends until all units have met once.
        bytes_sent: by this rank, so far.

    Raises:
        ArgumentError: arguments that make no sense, or do not go together, with the reason.
        MismatchError: the groups begin with different parameters, or ranks have other options.
    """

    apart = True

    def __init__(
        self,
        engine: FSDP,
        groups: Backend,
        *,
        every: int,
        optimizer: Optimizer = _NESTEROV,
        compression: Compression | None = None,
        fragments: int = 1,
        delay: int = 0,
    ) -> None:
        as_instance(engine, FSDP, "engine of OuterStep", "a fc.FSDP")
        as_instance(groups, Backend, "groups of OuterStep", "a Backend, such as mesh['group']")
        self.engine, self.groups = engine, groups
        self.every = as_int(every, "every of OuterStep", minimum=1)
        self.fragments = fragments = as_int(fragments, "fragments of OuterStep", minimum=1)
        self.delay = as_int(delay, "delay of OuterStep", minimum=0)
        self.optimizer, self.compression = optimizer, compression
        self._check()
        alone = groups.world_size == 1
        form = None if compression is None or alone else compression.reduces
        told = repr((self.every, fragments, self.delay, optimizer, compression))
        self._compare(engine.everyone, told, "ranks of one group differ in options")
        self._compare(groups, told, "the groups differ in options")
        self._group, self._thread = groups, None
        if self.delay and engine.device.on_host:  # calls of two threads in a group have no order
            self._group = groups.sub(range(groups.world_size), name="outer steps")
            self._thread = Background(groups.root, f"outer-steps-rank{groups.root.rank}")
        self._exchange = None if form is None else Exchange(self._group, form)
        self.calls = self.rounds = self.bytes_sent = 0
        self._from = 0  # what began to travel in this call, or before, is not taken
        self._closed = self._loaded = False
        self.partially_updated = False
        trained = [unit for unit in engine.units if unit.trainable]
        self._units = [
            self._outer(unit, number % fragments * self.every // fragments)
            for number, unit in enumerate(trained)
        ]
        self.sends = sum(self._sends(each) for each in self._units)
        self._compare(
            groups,
            self._digest(),
            "the groups differ in parameters; seed all of them alike, and load after this is made",
        )

    def _compare(self, ranks: Backend, told: str, problem: str) -> None:
        compare(ranks, "OuterStep", [told], lambda found: f"OuterStep: {problem} ({found.ranks})")

    def _compare_loaded(self) -> None:
        self._loaded = False
        self._compare(
            self.groups,
            repr((self.calls, self._digest())),
            "the groups have loaded checkpoints of different steps; load one that all have",
        )

    def _digest(self) -> str:
        to_host = self.engine.device.to_host
        return "".join(hex_digest(to_host(each.params).tobytes()) for each in self._units)

    def _check(self) -> None:
        engine, groups, optimizer = self.engine, self.groups, self.optimizer
        check_idle(engine, "OuterStep")
        if self.fragments > self.every or self.delay >= self.every:
            raise ArgumentError(
                f"OuterStep with every={self.every} has as many fragments at most, got "
                f"{self.fragments}, and a delay below it, got {self.delay}"
            )
        as_instance(optimizer, Optimizer, "optimizer of OuterStep", "one of fc.optim")
        if not optimizer.elementwise:
            raise ArgumentError(
                f"OuterStep needs an optimizer that is elementwise, not {type(optimizer).__name__}:"
                " it sees the differences of a shard only"
            )
        if engine.offload is not None:
            raise ArgumentError(
                "OuterStep does not go together with offload: what it keeps of the parameters "
                "would be in memory, where they are not"
            )
        common = set(groups.ranks) & set(engine.everyone.ranks)
        if groups.root is not engine.backend.root or len(common) > 1:
            raise ArgumentError(
                "groups of OuterStep must be this rank and its counterparts of other groups, as "
                "mesh['group'] is beside an engine on mesh['shard']"
            )
        if self.compression is not None:
            self._check_compression(self.compression)

    def _check_compression(self, compression: Compression) -> None:
        as_instance(compression, Compression, "compression of OuterStep", "a fc.Compression")
        if compression.reduces is None:
            raise ArgumentError("compression of OuterStep needs reduce='int8' or 'int4'")
        if self.engine.tensor is not None or self.engine.virtual_ranks is not None:
            raise ArgumentError(
                "OuterStep with compression does not go together with tensor or virtual_ranks: "
                "blocks depend on how many ranks share the parameters"
            )
        check_patterns(compression, self.engine.units)
        for unit in self.engine.units:
            if unit.trainable and unit.dtypes.master != np.float32:
                raise ArgumentError(
                    f"OuterStep with compression is for float32, but unit {unit.name!r} is "
                    f"{unit.dtypes.master}"
                )

    def _outer(self, unit: Unit, at: int) -> OuterUnit:
        size, start = unit.valid_size, unit.layout.shard_size * unit.shard_rank
        params = unit.shard[:size].copy()
        device, state = self.engine.device, self.optimizer.init_state(size, params.dtype)
        packing, kinds = None, 0
        if self.compression is not None and self._exchange is not None:
            spans = self.compression.exact_spans(unit.name, unit.layout.params)
            exact = [(first - start, last - start) for first, last in spans]
            bounds = bounds_of(split_sizes(size, self.groups.world_size))
            packing = Packing.of(bounds, size, exact, self._exchange.form)
            kinds = 2 if self.compression.error_feedback else 0
        state = {name: device.from_host(array) for name, array in state.items()}
        residuals = tuple(device.zeros(size, np.float32) for _ in range(kinds))
        late = 2 if self.delay else 0
        sent, total = [device.zeros(size, params.dtype) for _ in range(late)] or (None, None)
        return OuterUnit(unit, at, params, state, packing, residuals, sent, total)

    def _sends(self, outer: OuterUnit) -> int:
        ranks, rank = self.groups.world_size, self.groups.rank
        if outer.packing is not None:
            return outer.packing.reduce_sends(rank)
        own = split_sizes(outer.params.size, ranks)[rank]
        return (outer.params.size - own + own * (ranks - 1)) * outer.params.itemsize

    @property
    def held(self) -> int:
        """Bytes that this rank keeps for it: the shard as it was, state, and what is packed."""
        kept = sum(each.nbytes for unit in self._units for each in unit.arrays.values())
        return kept if self._exchange is None else kept + self._exchange.nbytes

    def step(self) -> bool:
        """Count a step, and have what is due meet; to be called after each ``engine.step``.

        A collective of all ranks of all groups where something is due.

        Returns:
            Whether any unit has met.

        Raises:
            NonFiniteGradientError: a difference is inf or nan; no parameter was changed.
            StateError: inside of a step, or after ``close``.
            MismatchError: the groups have loaded checkpoints of different steps.
        """
        if self._closed:
            raise StateError("this OuterStep was closed: no further step can be taken")
        check_idle(self.engine, "outer.step()")
        if self._loaded:
            self._compare_loaded()
        self.calls += 1
        for each in self._at(self.calls):
            self._begin(each)
        due = self._at(self.calls - self.delay) if self.calls - self.delay > self._from else []
        if not due:
            return False
        totals = [each.arrived() for each in due]
        xp = self.engine.xp
        finite = np.array([all(bool(xp.isfinite(total).all()) for total in totals)])
        if not all_reduce(finite, self.engine.everyone, op="min", label="outer step")[0]:
            for outer in due:
                for residual in outer.residuals:
                    residual[...] = 0  # of what is not applied
            names = ", ".join(each.unit.name for each in due)
            raise NonFiniteGradientError(
                f"the outer step of units {names} found parameters that are inf or nan; no "
                "parameter was changed"
            )
        self.rounds += 1
        self.partially_updated = True
        number = -(-(self.calls - self.delay) // self.every)
        for outer, total in zip(due, totals, strict=True):
            scale = 1.0 / self.groups.world_size
            self.optimizer.update(outer.params, total, outer.state, step=number, grad_scale=scale)
            with outer.unit.writing() as shard:
                outer.move(shard[: outer.params.size])
        self.partially_updated = False
        return True

    def _at(self, call: int) -> list[OuterUnit]:
        """Return what meets in a call of ``step``."""
        return [each for each in self._units if call > 0 and call % self.every == each.at]

    def _begin(self, outer: OuterUnit) -> None:
        """Have the sum of all groups' differences come, in the background with ``delay``."""
        shard = outer.unit.shard[: outer.params.size]
        outer.total = self.engine.xp.subtract(outer.params, shard, out=outer.total)
        self.bytes_sent += self._sends(outer)
        if outer.sent is None:  # there is no delay
            self._add_up(outer, outer.total)
            return
        outer.sent[:] = shard
        task = functools.partial(self._add_up, outer, outer.total)
        label = f"outer step of unit {outer.unit.name}"
        if self._thread is None:
            outer.work = in_background(self._group, label, task)
        else:
            outer.work = self._thread.submit(task, label)

    def _add_up(self, outer: OuterUnit, difference: Array) -> None:
        """Put the sum over all groups in the place of this group's difference."""
        label = f"outer step of unit {outer.unit.name}"
        if outer.packing is None or self._exchange is None:
            all_reduce(difference, self._group, out=difference, label=label)
            return
        chunk = outer.packing.chunks[self.groups.rank]
        first, second = outer.residuals or (None, None)
        mine = None
        if second is not None:
            # The rest was left by another number of groups, who had this chunk then.
            second[: chunk.start], second[chunk.stop :] = 0, 0
            mine = second[chunk.start : chunk.stop]
        self._exchange.all_reduce(difference, outer.packing, difference, (first, mine), label)

    # State, as engines have it for checkpoints.

    @property
    def tensor(self) -> Backend | None:
        """That of the engine."""
        return self.engine.tensor

    @property
    def everyone(self) -> Backend:
        """The ranks of this group."""
        return self.engine.everyone

    def state_dict(self, *, optimizer: bool = True) -> EngineState:
        """Return this rank's part of what is kept, as views; copies nothing.

        What is on its way is waited for; it is taken in its step, also by who loads this.

        Args:
            optimizer: False leaves all arrays out; what is left are the numbers in ``info``.
        """
        arrays = self._arrays() if optimizer else {}
        info = {
            "format": FORMAT,
            "step": self.engine.steps,
            "loss_scale": None,
            "optimizer": repr(self.optimizer),
            "calls": self.calls,
            "rounds": self.rounds,
            "every": self.every,
            "fragments": self.fragments,
            "delay": self.delay,
        }
        return EngineState(arrays, info)

    def _arrays(self) -> dict[str, ShardedArray]:
        """Cut what is kept as the engine's parameters are."""
        engine = self.engine.state_dict(optimizer=False)
        arrays = {}
        for outer in self._units:
            if outer.work is not None:
                outer.arrived()
            layout = outer.unit.layout
            starts = {p.name: p.shard_start for p in layout.pieces(outer.unit.shard_rank)}
            for param in layout.params:
                name = f"{outer.unit.name}.{param.name}"
                cut = engine[name]
                assert isinstance(cut, ShardedArray)
                begin = starts.get(param.name, 0)
                for kind, flat in outer.arrays.items():
                    pieces = [
                        ArrayPiece(start, stop, flat[begin : begin + stop - start])
                        for start, stop, _ in cut.pieces
                    ]
                    copy = (cut.replica, cut.replicas, cut.box)
                    known = ShardedArray(cut.shape, flat.dtype, tuple(pieces), *copy)
                    arrays[f"outer/{kind}/{name}"] = known
        return arrays

    @contextmanager
    def writing_state(self, *, optimizer: bool = True) -> Iterator[EngineState]:
        """Give ``state_dict()`` to be written in place, for a ``with`` block.

        Args:
            optimizer: as in ``state_dict``.
        """
        yield self.state_dict(optimizer=optimizer)

    def load_info(self, info: Mapping[str, Any]) -> None:
        """Take over how many calls there were, and how many of them have met.

        Args:
            info: of ``state_dict``, with ``"calls"`` and ``"rounds"``; equal on all ranks. If its
                ``"every"``, ``"fragments"`` or ``"delay"`` is another one, what was on its way is
                not taken: other units would be due.

        Raises:
            ArgumentError: one of them is missing, or no number of at least 0.
        """
        for name in ("calls", "rounds"):
            setattr(self, name, as_int(info.get(name), f"{name} of an OuterStep", minimum=0))
        self._loaded = True
        schedule = {"every": self.every, "fragments": self.fragments, "delay": self.delay}
        same = all(info.get(name, value) == value for name, value in schedule.items())
        self._from = 0 if same else self.calls

    def close(self) -> None:
        """Wait for what is on its way, and end the thread that had it come; collective.

        The engine stays. What is kept may be saved still, but no further step be taken.
        """
        self._closed = True
        if self._thread is not None:
            self._thread.close()
            self._group.close()
            self._thread = None
