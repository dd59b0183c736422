"""``FSDP``: shards the units of a model over the ranks and gathers each one when it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from fsdpcore.collectives import all_gather
from fsdpcore.collectives.algorithms.table import ALGORITHMS
from fsdpcore.collectives.device_transport import device_transport_of
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_choice, as_instance, as_int
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.fsdp.offload.offload import GATHERED, Offload, OffloadStats
from fsdpcore.fsdp.offload.stores import open_stores
from fsdpcore.fsdp.optim import Optimizer
from fsdpcore.fsdp.plan.engine_plan import plan_of, report_of
from fsdpcore.fsdp.plan.make_plan import Sync
from fsdpcore.fsdp.plan.memory import HeldMemory, measure
from fsdpcore.fsdp.plan.plan import Plan
from fsdpcore.fsdp.plan.report import Report
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.sharding.tensor_group import check_optimizers, checked_tensor, everyone_of
from fsdpcore.fsdp.state.full import full_params
from fsdpcore.fsdp.state.load import load_params, load_state, set_progress, writing_state
from fsdpcore.fsdp.state.save import full_state, sharded_state
from fsdpcore.fsdp.state.state import EngineState, LoadReport, Progress
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.step.schedule import Prefetch
from fsdpcore.fsdp.step.stats import StepStats
from fsdpcore.fsdp.step.step import Step
from fsdpcore.fsdp.units.agree_units import check_same, check_units, exchange_tilings
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.given_arrays import update_shards
from fsdpcore.fsdp.units.precision import Precision, Scaler
from fsdpcore.fsdp.units.unit import Binding, ParamState, Unit
from fsdpcore.fsdp.units.updates import Optimizers
from fsdpcore.fsdp.units.window import open_window


class FSDP:
    """Owns parameters, gradients and optimizer state of a model, each rank a share.

    ``strategy`` says what is sharded over which ranks (see ``Strategy``). With ``full_shard``
    (ZeRO-3) a unit is gathered before its forward pass and freed after it, gathered again before
    its backward pass and freed, then its gradients are reduced so that each rank gets its shard.
    Meanwhile the next units in order are on their way (see ``Prefetch``).

    Where all ranks that share a copy are on one host, and the transport has windows, they keep the
    parameters in one, memory that all of them map. Each then writes its shard where the others
    read it: gathering a unit moves nothing and takes no memory, and the host holds the parameters
    once. A process that is forked from a rank sees its updates, too.

    Where a rank has a GPU (``backend.device``), there is no window, and all arrays are CuPy's, to
    be computed with by ``engine.xp``; values may be given as NumPy's arrays as well, and are moved.
    The host only enqueues what is to be done: what the ranks exchange, on a stream of its own that
    waits for the caller's current stream and is waited for by it, the rest on that. It waits for
    the GPU once in a step, when ``update`` has to know whether the gradients are finite. Who goes
    on with another stream has that wait for the one before.

    Making an engine is a collective: all ranks pass the same units with the same values.

    Args:
        units: in the order of the forward pass. Their parameters are taken over.
        backend: the ranks to shard over: all of them, a group, or those of mesh axes.
        strategy: a ``Strategy``, or the name of one.
        optimizer: applied by ``step.update``; may be missing for evaluation only. Also a mapping of
            patterns of parameter names to optimizers, of which the first that fits is taken:
            ``{"*.bias": AdamW(lr=1e-3, weight_decay=0.0), "*": AdamW(lr=1e-3)}``.
        precision: dtypes of computation and reduction; by default those of the parameters.
        prefetch: a ``Prefetch``, or how many units to gather ahead; 0 for nothing in the
            background. In a window there is nothing to fetch.
        window: False keeps the parameters out of shared memory.
        offload: what is out of memory while it is not in use; see ``Offload``. Without ``window``.
        tensor: the ranks whose engines have the other boxes of the same parameters, where units
            have such (``BoxShard``), for instance ``mesh["tensor"]`` beside ``mesh["shard"]``.
            All of these engines take the same steps. Gradients are not reduced over them: of a
            parameter that is no box, layers give the same gradient on all of them. Each updates its
            own copy of that, and nothing makes the copies equal again. They keep the same bits with
            ``algorithm="auto"`` in a job that is ``deterministic``; sums whose order depends on the
            place in a buffer ("ring", MPI's own, NCCL) let them drift apart by rounding, 1e-8 after
            60 steps. States and ``full_params`` have the copy of the first rank of ``tensor``.
        seed: of the initialisers of deferred parameters (``Spec``).
        algorithm: of all collectives; "auto", or one that every one of them has. On GPUs, one of
            those that the transport has for their arrays.

    Attributes:
        units: in order; verbs can be called on them directly.
        backend, strategy, precision, prefetching, algorithm, offload: as given.
        device: where the arrays are: the host, or this rank's GPU.
        host_algorithm: of collectives that move arrays of the host.
        placement: what the strategy comes to with these ranks.
        groups: of ranks, that this rank communicates in.
        windowed: the parameters are in a window; the same on all ranks that share a copy.
        all_windowed: so are those of all other copies and boxes; the same on all ranks.
        steps: number of updates so far.
        optimizers: which optimizer updates which parameter; None without one.
        lent: ``full_params`` is open.
        partially_updated: an update was left half done, for instance by an interrupt.
        executor: what a step does with units.

    Raises:
        ArgumentError: units or options make no sense.
        ConfigError: the files of ``offload`` cannot be made; on all ranks.
        MismatchError: the ranks passed different units or different values.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        backend: Backend,
        *,
        strategy: Strategy | str = "full_shard",
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        precision: Precision | None = None,
        prefetch: Prefetch | int = 1,
        window: bool = True,
        offload: Offload | None = None,
        tensor: Backend | None = None,
        seed: int = 0,
        algorithm: str = "auto",
    ) -> None:
        if not isinstance(backend, Backend) or not isinstance(units, Iterable):
            raise ArgumentError(
                "FSDP takes a list of units, then a backend: FSDP(units, backend); got "
                f"{type(units).__name__} and {type(backend).__name__}"
            )
        self.units = tuple(units)
        self.backend = backend
        self.strategy = strategy if isinstance(strategy, Strategy) else Strategy(strategy)
        self.placement = self.strategy.place(backend.world_size)
        self.precision = Precision() if precision is None else precision
        _check_kinds(self.precision, offload, window)
        seed = as_int(seed, "seed")
        self.prefetching = Prefetch.of(prefetch)
        self.algorithm = algorithm
        self.offload = offload
        self.device = backend.device
        self.host_algorithm = algorithm if self.device.on_host else "auto"
        self.steps = 0
        _check_algorithm(algorithm, backend)
        tensor = checked_tensor(tensor, backend)
        check_units(self.units, self.device, has_tensor=tensor is not None)
        optimizers = None if optimizer is None else Optimizers(optimizer, self.units)
        self.optimizers = optimizers
        self.lent = self.partially_updated = False
        options = (optimizers, self.strategy, self.precision, self.prefetching, seed, algorithm)
        everyone = everyone_of(backend, tensor)
        check_same(self.units, backend, everyone, repr((*options, window, offload)))
        self.groups = ProcessGroups.of(backend, self.placement, everyone, tensor)
        if tensor is not None:
            exchange_tilings(self.units, tensor, self.device)
            check_optimizers(self.units, optimizers)
        self._index = {unit.name: number for number, unit in enumerate(self.units)}
        self._pool = BufferPool(backend)
        self._scaler = Scaler(self.precision.scaling)
        self.executor = StepExecutor(
            self.units,
            self.placement,
            self.prefetching,
            overlaps=self.prefetching.overlaps(backend.hosts, on_host=self.device.on_host),
        )
        try:
            self._bind(optimizers, seed, window=window)
        except BaseException:
            for unit in self.units:
                unit.give_back()
            raise

    def _bind(self, optimizers: Optimizers | None, seed: int, *, window: bool) -> None:
        shards = self.groups.shards
        layouts = [unit.lay_out(shards.world_size, self.precision) for unit in self.units]
        flat_layouts = [layout for unit in layouts for layout in unit]
        stores = open_stores(self.offload, self.units, self.groups, optimizers, self.precision)
        self._files = stores.files
        opened = open_window(flat_layouts, shards) if window and not self.offload else None
        self.windowed = self.all_windowed = opened is not None
        if window and not self.offload and self.everyone is not shards and self.device.on_host:
            told = all_gather(self.windowed, self.everyone, label="windows")
            self.all_windowed = bool(told.all())
        self._window_bytes = opened.nbytes if opened is not None else 0
        flats: Iterator[Array | None] = iter(opened.flats if opened else [None] * len(flat_layouts))
        binding = Binding(self.groups, self._pool, optimizers, self.precision, self.algorithm, seed)
        for unit, parts, store in zip(self.units, layouts, stores.each, strict=True):
            unit.bind(binding, [next(flats) for _ in parts], store)
        for unit in self.units:
            unit.owners = {name: self[tie.unit] for name, tie in unit.ties.items()}

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

    @property
    def tensor(self) -> Backend | None:
        """The ranks with the other boxes, if there are any; None for a group of one rank, too."""
        return self.groups.tensor

    @property
    def everyone(self) -> Backend:
        """The ranks of ``backend``, and those with the other boxes; ``backend`` without such."""
        return self.groups.everyone

    @property
    def xp(self) -> Any:
        """The module that computes with the parameters: ``numpy``, or ``cupy`` on a GPU."""
        return self.device.xp

    @property
    def loss_scale(self) -> float:
        """What to multiply the loss by before the backward pass; 1 without scaling."""
        return self._scaler.scale

    @property
    def scaler(self) -> Scaler:
        """The scale of the loss and its history, for checkpoints."""
        return self._scaler

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether a unit is being gathered ahead of its use."""
        return any(unit.has_pending_prefetch for unit in self.units)

    def prefetch(self, unit: Unit | str) -> None:
        """Begin to gather a unit that is used soon; for those who call verbs by hand.

        All ranks call it. Inside a step the engine does that itself.

        Raises:
            StateError: it is gathered, or on its way, already; or there is nothing to gather.
        """
        member = self[unit]
        if member.has_pending_prefetch:
            raise StateError(
                f"unit {member.name!r} is being gathered already; one prefetch is enough"
            )
        if member.state is ParamState.UNSHARDED:
            raise StateError(
                f"unit {member.name!r} is gathered already; nothing is left to prefetch"
            )
        if not member.fetched:
            alone = not self.placement.gathers
            where = "on every rank" if alone or not self.windowed else "in a window of the host"
            raise StateError(
                f"there is nothing to prefetch of unit {member.name!r}: with strategy "
                f"{self.strategy.name!r} its parameters are {where} already"
            )
        member.unshard(async_op=True)

    # Steps.

    def step(self, *, divisor: float | None = None) -> Step:
        """Begin a training step, in a ``with`` statement.

        Args:
            divisor: the gradients, summed over ranks and backward passes, are divided by it, with
                every strategy; by default the number of ranks, so that they are the mean over
                ranks. With the tokens of all ranks they are the mean over tokens.
        """
        return Step(self, divisor, training=True)

    def evaluation(self) -> Step:
        """Like ``step``, for forward passes only."""
        return Step(self, None, training=False)

    def begin(self, step: Step) -> None:
        """Enter a step; called by ``Step``."""
        if self.executor.step is not None:
            raise StateError("a step is open already; leave it before you begin another one")
        self.check_whole()
        self.check_idle("a step")
        if self._files is not None:
            self._files.restart()
            self.units[0].store.ahead(GATHERED)
        self._pool.reset_peak()
        self.executor.begin(step)

    def end(self) -> None:
        """Leave a step: reshard all units and drop the gradients; called by ``Step``."""
        self.executor.end()
        if self._files is not None:
            self._files.settle()
            for unit in self.units:
                unit.store.forget()
        self.stats.peak_buffers = self._pool.peak_bytes

    @property
    def stats(self) -> StepStats:
        """What the last step did, and how long it waited."""
        return self.executor.stats

    def close(self) -> None:
        """Close the groups of ranks that were made for this engine.

        For those who make many engines in one job; the engine is of no use after that, the backend
        stays open. All ranks call it, outside of steps.
        """
        self.check_idle("close()")
        self.groups.close()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all units unsharded at once, as far as memory allows; all ranks enter it."""
        try:
            for unit in self.units:
                unit.unshard()
            yield
        finally:
            for unit in self.units:
                unit.reshard()

    # State.

    def check_whole(self) -> None:
        """Raise StateError if an update was left half done, and nothing was loaded since."""
        if self.partially_updated:
            raise StateError(
                "an update was left half done, so that some parameters are newer than others; load "
                "a whole state (load_state_dict) before you go on"
            )

    def check_idle(self, what: str) -> None:
        """Raise StateError inside of a step or of ``full_params``, where ``what`` is refused."""
        if self.executor.step is not None or self.lent:
            where = "full_params()" if self.lent else "a step"
            raise StateError(f"{what} inside of {where}; leave that first")

    def state_dict(
        self, *, full: bool = False, optimizer: bool = True, to: int | str = "all"
    ) -> EngineState:
        """Return everything that training needs to go on, at full precision.

        Parameters have the name ``unit.param``, arrays of the optimizer
        ``optimizer/<state>/unit.param``; a tied parameter is in ``info["ties"]``, with its owner.

        Args:
            full: whole arrays of NumPy, which belong to the caller, gathered one after the other;
                then it is a collective. Without it nothing is sent or copied: each rank gets its
                own parts, as ``ShardedArray`` of read-only views, which later updates change.
                Ignored arrays are plain arrays. Arrays of a GPU cannot be made read-only, and must
                not be written nevertheless.
            optimizer: with the optimizer's arrays.
            to: of ``full``: the rank of ``backend`` that gets the arrays, the others get ``info``
                only. Of several such ranks, the first in their ``tensor`` group.

        Raises:
            ArgumentError: two arrays have the same name, or there is no such rank.
            MismatchError: the ranks want different things.
        """
        if full:
            return full_state(self, optimizer=optimizer, to=to)
        if to != "all":
            raise ArgumentError("to=... belongs to full=True; each rank has its own shards anyway")
        return sharded_state(self, optimizer=optimizer)

    def load_state_dict(
        self,
        state: EngineState | None,
        *,
        strict: bool = True,
        optimizer: bool = True,
        src: int | None = None,
    ) -> LoadReport:
        """Go on from what ``state_dict`` returned; a collective, outside of steps.

        Whole arrays come from any number of ranks and any strategy, and are rounded to the dtypes
        of this engine. Shards must be this rank's: the layout has to be the same. An ignored array
        of other values replaces the one that ``unit.params`` shows; the caller's is not written.

        Args:
            state: on every rank, equal where it is full; or on ``src`` only.
            strict: names that are missing or unexpected are an error; else they are returned.
            optimizer: False loads parameters only: optimizer state, the number of steps and
                the scale of the loss stay as they are, and need not be in the state.
            src: the rank that has the (full) state, which deals it out array by array; what the
                others pass is ignored. It counts as ``to`` of ``state_dict``.

        Raises:
            ArgumentError: something does not fit on some rank; on all ranks, nothing was changed.
            MismatchError: the ranks have states of different names or steps; likewise.
            StateError: inside of a step, or of ``full_params``.
        """
        return load_state(self, state, strict=strict, optimizer=optimizer, src=src)

    def load_full(
        self, params: Mapping[str, Array] | None, *, strict: bool = True, src: int | None = None
    ) -> LoadReport:
        """Load whole parameters by ``unit.param``; a collective, outside of steps.

        Optimizer state and the number of steps stay. A tied parameter may have its own name, or
        that of its owner. Ignored arrays may be left out.

        Args:
            params: whole arrays by name, equal on all ranks; or on ``src`` only. Rounded to the
                dtypes of this engine.
            strict, src: as of ``load_state_dict``.

        Returns:
            Which names were missing, and which were not expected.

        Raises:
            ArgumentError, MismatchError, StateError: as ``load_state_dict``.
        """
        return load_params(self, params, strict=strict, src=src)

    def writing_state(self, *, optimizer: bool = True) -> AbstractContextManager[EngineState]:
        """Give ``state_dict()`` to be written in place, without another copy; for all ranks.

        What is written to the arrays in the ``with`` block is there after it, also if it ends by
        an exception. ``load_info`` has the rest.
        """
        return writing_state(self, optimizer=optimizer)

    def load_info(self, info: Mapping[str, Any]) -> None:
        """Take over the number of steps and the loss scale from ``EngineState.info``.

        Equal on all ranks, which is not checked. Raises ArgumentError if they make no sense.
        """
        set_progress(self, Progress.of(info))

    def full_params(
        self,
        *,
        write: bool = False,
        names: str | Iterable[str] | None = None,
        unit: Unit | str | None = None,
    ) -> AbstractContextManager[Mapping[str, Array]]:
        """Gather parameters at full precision, by ``unit.param``, for a ``with`` block.

        All ranks enter it, outside of steps, and begin no step inside. Tied, frozen and ignored
        parameters are there, too. After the block the arrays must not be used.

        Args:
            write: False gives read-only arrays. True gives copies to be written, the same on
                all ranks; what they are at the end of the block is kept, unless an exception ends
                it. Ignored arrays stay read-only.
            names: patterns (of the shell) of names; by default all of them.
            unit: of this unit only.

        Raises:
            ArgumentError: a pattern matches nothing.
            MismatchError: the ranks ask for different parameters, or have written different
                values; on all ranks, and nothing was kept.
            StateError: inside of a step, or of another ``full_params``.
        """
        return full_params(self, write=write, names=names, unit=unit)

    def update_shards(self, shards: Mapping[str, Array]) -> None:
        """Replace this rank's shards of some units; a collective, outside of steps.

        Args:
            shards: by the name of the unit what ``Unit.update_shards`` takes; on all ranks those of
                the same units. The others stay.

        Raises:
            ArgumentError: a unit or an array that does not fit, on some rank; on all ranks, and
                nothing was changed.
            MismatchError: the ranks give shards of different units; likewise.
        """
        update_shards(self, shards)

    # Plans and measurements.

    def plan(self, *, microbatches: int = 1, sync: Sync = "each", whole: bool = False) -> Plan:
        """Return a step of this engine as data: operations, bytes, peak; it can be printed.

        Args:
            microbatches: forward and backward passes before the update.
            sync: "each" reduces in each of them; "last" in the last one, with ``no_sync`` before.
            whole: all units are gathered at once, by ``Step.whole``.
        """
        return plan_of(
            self.units,
            self.groups,
            self.strategy,
            self.precision,
            self.prefetching,
            self.offload,
            windowed=self.windowed,
            microbatches=microbatches,
            sync=sync,
            whole=whole,
        )

    def report(self) -> Report:
        """Compare the last step with its plan, on this rank; it can be printed."""
        return report_of(self.plan, self.units, self.stats, self.executor.events, self.held())

    @property
    def gathered_peak(self) -> int:
        """Most bytes of gathered parameters and full gradients at once, in the last step.

        Parameters in a window are there anyway, so that gathering them adds nothing.
        """
        return self._pool.peak_bytes

    @property
    def offload_stats(self) -> OffloadStats:
        """What moved between memory and files since the last step began; zeros without files."""
        return OffloadStats() if self._files is None else self._files.stats

    def held(self) -> HeldMemory:
        """Measure what this rank holds now."""
        pool = self._pool
        return measure(self.units, pool.live_bytes, pool.spare_bytes, self._window_bytes)


def _check_kinds(precision: object, offload: object, window: object) -> None:
    """Raise ArgumentError for an option that is of another type."""
    such = "a fc.Precision, such as fc.Precision(param_dtype=np.float16)"
    as_instance(precision, Precision, "precision", such)
    if offload is not None:
        as_instance(offload, Offload, "offload", "a fc.Offload, such as fc.Offload('/scratch')")
    as_choice(window, (True, False), "window")


def _check_algorithm(algorithm: str, backend: Backend) -> None:
    has: Mapping[str, Mapping[str, Any]] = ALGORITHMS
    if not backend.device.on_host:
        has = device_transport_of(backend).device_algorithms(backend)
    known = set.intersection(
        *(set(has.get(name, ())) for name in ("all_gather", "reduce_scatter", "all_reduce"))
    )
    if algorithm != "auto" and algorithm not in known:
        names = ", ".join(repr(name) for name in ["auto", *sorted(known)])
        raise ArgumentError(f"unknown algorithm {algorithm!r}; known: {names}")
