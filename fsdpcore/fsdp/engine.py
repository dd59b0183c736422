"""``FSDP``: shards the units of a model over the ranks and gathers each one when it is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.collectives import all_gather
from fsdpcore.collectives.algorithms import ALGORITHMS
from fsdpcore.errors import ArgumentError, MismatchError, StateError
from fsdpcore.fsdp.buffers import BufferPool
from fsdpcore.fsdp.memory import HeldMemory, measure
from fsdpcore.fsdp.optim import Optimizer
from fsdpcore.fsdp.spec import Spec
from fsdpcore.fsdp.step import Step
from fsdpcore.fsdp.unit import Binding, ParamState, Unit
from fsdpcore.fsdp.window import open_window

STRATEGIES = ("full_shard",)


class FSDP:
    """Owns parameters, gradients and optimizer state of a model, each rank an equal share.

    Strategy ``full_shard`` (ZeRO-3): a unit is gathered before its forward pass and freed after
    it, gathered again before its backward pass and freed, then its gradients are reduced so that
    each rank gets its shard. While one unit is in use, the next one in order is on its way.

    Where all ranks are on one host, and the transport has windows, they keep the parameters in one,
    memory that all of them map. Each then writes its shard where the others read it: gathering a
    unit moves nothing and takes no memory, and the host holds the parameters once. A process that
    is forked from a rank sees its updates, too.

    Making an engine is a collective: all ranks pass the same units with the same values.

    Args:
        units: in the order of the forward pass. Their parameters are taken over.
        backend: the ranks to shard over.
        strategy: "full_shard".
        optimizer: applied by ``step.update``; may be missing for evaluation only.
        prefetch: how many units to gather ahead: 0 or 1. In a window there is nothing to fetch.
        seed: of the initialisers of deferred parameters (``Spec``).
        algorithm: of all collectives; "auto", or one that every one of them has.

    Attributes:
        units: in order; verbs can be called on them directly.
        backend, algorithm: as given.
        windowed: the parameters are in a window; the same on all ranks.
        steps: number of updates so far.

    Raises:
        ArgumentError: units or options make no sense.
        MismatchError: the ranks passed different units or different values.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        backend: Backend,
        *,
        strategy: str = "full_shard",
        optimizer: Optimizer | None = None,
        prefetch: int = 1,
        seed: int = 0,
        algorithm: str = "auto",
    ) -> None:
        self.units = tuple(units)
        self.backend = backend
        self.algorithm = algorithm
        self.steps = 0
        self._prefetch = prefetch
        self._check_options(strategy, prefetch)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"optimizer must be one of fc.optim, such as fc.optim.AdamW(), got {optimizer!r}"
            )
        _check_units(self.units)
        _check_same_values(self.units, backend, repr((optimizer, prefetch, seed, algorithm)))
        self._index = {unit.name: number for number, unit in enumerate(self.units)}
        self._pool = BufferPool(backend)
        self._ahead: Unit | None = None
        self._step: Step | None = None
        window = open_window([unit.lay_out(backend.world_size) for unit in self.units], backend)
        self.windowed = window is not None
        self._window_bytes = window.nbytes if window is not None else 0
        binding = Binding(backend, self._pool, optimizer, algorithm, seed)
        for number, unit in enumerate(self.units):
            unit.bind(binding, window.flats[number] if window is not None else None)

    def _check_options(self, strategy: str, prefetch: int) -> None:
        if strategy not in STRATEGIES:
            raise ArgumentError(
                f"unknown strategy {strategy!r}; known: {', '.join(map(repr, STRATEGIES))}"
            )
        if prefetch not in (0, 1):
            raise ArgumentError(f"prefetch must be 0 or 1 units, got {prefetch!r}")
        known = set.intersection(
            *(set(ALGORITHMS[name]) for name in ("all_gather", "reduce_scatter", "all_reduce"))
        )
        if self.algorithm != "auto" and self.algorithm not in known:
            names = ", ".join(repr(name) for name in ["auto", *sorted(known)])
            raise ArgumentError(f"unknown algorithm {self.algorithm!r}; known: {names}")

    # Units.

    def __getitem__(self, unit: Unit | str) -> Unit:
        """Return a unit by name, or the unit itself if it is one of this engine's."""
        name = unit.name if isinstance(unit, Unit) else unit
        number = self._index.get(name)
        if number is None or (isinstance(unit, Unit) and self.units[number] is not unit):
            raise ArgumentError(
                f"this engine has no unit {name!r}; it has {', '.join(self._index)}"
            )
        return self.units[number]

    def gather(self, unit: Unit, towards: Literal[1, -1]) -> None:
        """Have ``unit`` gathered, and start on its successor in the direction of the pass."""
        if self._ahead is not None and self._ahead is not unit:
            self._ahead.reshard()  # the guess was wrong: no more than one unit is ahead
        self._ahead = None
        unit.unshard()
        number = self._index[unit.name] + towards
        if self._prefetch and not self.windowed and 0 <= number < len(self.units):
            following = self.units[number]
            if following.state is ParamState.SHARDED:
                following.unshard(async_op=True)
                self._ahead = following

    # Steps.

    def step(self, *, divisor: float | None = None) -> Step:
        """Begin a training step, in a ``with`` statement.

        Args:
            divisor: the gradients, summed over ranks and backward passes, are divided by it; by
                default the number of ranks, so that they are the mean over ranks.
        """
        return Step(self, divisor, training=True)

    def evaluation(self) -> Step:
        """Like ``step``, for forward passes only."""
        return Step(self, None, training=False)

    def begin(self, step: Step) -> None:
        """Enter a step; called by ``Step``."""
        if self._step is not None:
            raise StateError("a step is open already; leave it before you begin another one")
        self._step = step
        self._pool.reset_peak()

    def end(self) -> None:
        """Leave a step: reshard all units and drop the gradients; called by ``Step``."""
        self._step = self._ahead = None
        for unit in self.units:
            unit.reshard()
            unit.drop_gradients()

    # Memory.

    @property
    def gathered_peak(self) -> int:
        """Most bytes of gathered parameters and full gradients at once, in the last step.

        Parameters in a window are there anyway, so that gathering them adds nothing.
        """
        return self._pool.peak_bytes

    def held(self) -> HeldMemory:
        """Measure what this rank holds now."""
        pool = self._pool
        return measure(self.units, pool.live_bytes, pool.spare_bytes, self._window_bytes)


def _check_units(units: tuple[Unit, ...]) -> None:
    seen: dict[tuple[int, int], str] = {}
    names = set()
    for unit in units:
        if not isinstance(unit, Unit):
            raise ArgumentError(f"units must be Unit objects, got {type(unit).__name__}")
        if unit.name in names:
            raise ArgumentError(f"two units are named {unit.name!r}; names must be unique")
        names.add(unit.name)
        for name, value in (unit.initial or {}).items():
            if isinstance(value, np.ndarray) and value.size:
                # The same elements, also by way of a view or a transpose.
                where = (value.ctypes.data, value.size)
                other = seen.setdefault(where, f"{unit.name}.{name}")
                if other != f"{unit.name}.{name}":
                    raise ArgumentError(
                        f"{other} and {unit.name}.{name} are the same array; tied parameters "
                        "cannot be sharded yet: keep one of them and use it in both places"
                    )
    if not units:
        raise ArgumentError("an engine needs at least one unit")


def _check_same_values(units: tuple[Unit, ...], backend: Backend, options: str) -> None:
    """Compare all ranks' units and options: no model is glued together from different ones."""
    hashed = hashlib.blake2b(options.encode(), digest_size=16).digest()
    digests = np.stack([np.frombuffer(hashed, np.uint8), *(_digest(unit) for unit in units)])
    everywhere = all_gather(digests, backend, label="initial values")
    everywhere = everywhere.reshape(backend.world_size, *digests.shape)
    names = ["the engine's options (optimizer, prefetch, seed, algorithm) differ"]
    names += [f"unit {unit.name!r} differs in names, shapes or initial values" for unit in units]
    for number, name in enumerate(names):
        differing = np.flatnonzero((everywhere[:, number] != everywhere[0, number]).any(axis=1))
        if differing.size:
            ranks = ", ".join(str(backend.ranks[rank]) for rank in differing)
            raise MismatchError(
                f"{name} between rank {backend.ranks[0]} and ranks {ranks}; give all ranks the same"
            )


def _digest(unit: Unit) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    hasher = hashlib.blake2b(unit.name.encode(errors="backslashreplace"), digest_size=16)
    for name, value in (unit.initial or {}).items():
        hasher.update(repr((name, value.shape, value.dtype.name)).encode())
        if isinstance(value, Spec):
            hasher.update(repr(value.init).encode())
        else:
            hasher.update(np.ascontiguousarray(value).data)
    return np.frombuffer(hasher.digest(), np.uint8)
