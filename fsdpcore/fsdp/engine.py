"""``FSDP``: shards the units of a model over the ranks and gathers each one when it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.offload.offload import Offload, OffloadStats
from fsdpcore.fsdp.optim.groups import Given
from fsdpcore.fsdp.plan.engine_plan import plan_of, report_of
from fsdpcore.fsdp.plan.make_plan import Sync
from fsdpcore.fsdp.plan.memory import HeldMemory, measure
from fsdpcore.fsdp.plan.plan import Plan
from fsdpcore.fsdp.plan.report import Report
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.state.averaged import averaged
from fsdpcore.fsdp.state.full import full_params, full_tree
from fsdpcore.fsdp.state.load import load_params, load_state
from fsdpcore.fsdp.state.release import release
from fsdpcore.fsdp.state.save import full_state, sharded_state
from fsdpcore.fsdp.state.state import EngineState, LoadReport, Progress
from fsdpcore.fsdp.state.writing import set_progress, update_shards, writing_state
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.step.stats import StepStats
from fsdpcore.fsdp.step.step import EngineSteps, Step
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.make_model import ModelMemory, make_memory, make_model
from fsdpcore.fsdp.units.options import EngineOptions, Prefetch
from fsdpcore.fsdp.units.param_tree import as_units, is_units
from fsdpcore.fsdp.units.precision import Precision
from fsdpcore.fsdp.units.unit import Unit, let_go


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

    Making an engine is a collective: all ranks pass the same units with the same values. ::

        units = [fc.Unit("hidden", {"w": w1}), fc.Unit("out", {"w": w2})]
        engine = fc.FSDP(units, backend, optimizer=fc.optim.AdamW(lr=3e-4))
        with engine.step() as step:
            with step.forward("hidden") as p:
                h = np.maximum(x @ p["w"], 0)
            with step.forward("out") as p:
                dy = loss_gradient(h @ p["w"])
            with step.backward("out") as (p, grads):
                grads["w"], dh = h.T @ dy, dy @ p["w"].T * (h > 0)
            with step.backward("hidden") as (p, grads):
                grads["w"] = x.T @ dh
            step.update(clip=1.0)

    Args:
        units: a list of ``Unit`` in the order of the forward pass; their parameters are taken over.
            Or parameters in nested containers, as a framework has them: a unit for each top-level
            entry (see ``ParamTree``, which takes other rules).
        backend: the ranks to shard over: all of them, a group, or those of mesh axes.
        strategy: a ``Strategy``, or the name of one.
        optimizer: applied by ``step.update``; may be missing for evaluation only. Also a mapping of
            patterns of parameter names to optimizers, of which the first that fits is taken:
            ``{"*.bias": AdamW(lr=1e-3, weight_decay=0.0), "*": AdamW(lr=1e-3)}``. A transformation
            of optax that is elementwise is taken as it is, see ``fc.optim.Optax``; those of PyTorch
            are given as ``fc.optim.Torch(torch.optim.AdamW, lr=1e-3)``.
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
        algorithm: of all collectives; "auto", or one that every one of them has, the transport's
            own too. On GPUs, one of those that the transport has for their arrays.
        virtual_ranks: into how many shares a batch is cut, whose gradients are summed in one fixed
            order, so that the number of ranks changes no bit of the parameters. At least one for
            each rank. A step goes through those of its rank: ``for leaf in step.leaves()``.

    Attributes:
        units: in order; verbs can be called on them directly.
        tree: the ``ParamTree`` that the units were given as; None for a list of units.
        backend, strategy, precision, prefetching, algorithm, offload: as given.
        device: where the arrays are: the host, or this rank's GPU.
        windowed: the parameters are in a window; the same on all ranks that share a copy.
        all_windowed: so are those of all other copies and boxes; the same on all ranks.

    Raises:
        ArgumentError: units or options make no sense.
        ConfigError: the files of ``offload`` cannot be made; on all ranks.
        MismatchError: the ranks passed different units or different values.
    """

    def __init__(
        self,
        units: Any,
        backend: Backend,
        *,
        strategy: Strategy | str = "full_shard",
        optimizer: Given | None = None,
        precision: Precision | None = None,
        prefetch: Prefetch | int = 1,
        window: bool = True,
        offload: Offload | None = None,
        tensor: Backend | None = None,
        seed: int = 0,
        algorithm: str = "auto",
        virtual_ranks: int | None = None,
    ) -> None:
        if not isinstance(backend, Backend) or not is_units(units):
            raise ArgumentError(
                "FSDP takes a list of units, then a backend: FSDP(units, backend); got "
                f"{type(units).__name__} and {type(backend).__name__}"
            )
        self.units, self.tree = as_units(units)
        self.backend = backend
        self.device = backend.device
        options = EngineOptions.of(
            strategy, precision, prefetch, window, offload, seed, algorithm, virtual_ranks, backend
        )
        self.strategy, self.precision = options.strategy, options.precision
        self.prefetching, self.offload = options.prefetch, options.offload
        self.algorithm = options.algorithm
        self._pool = BufferPool(backend)
        self._model = make_model(self.units, backend, options, optimizer, tensor)
        self._memory = make_memory(self._model, self.units, self._pool)
        self.windowed, self.all_windowed = self._memory.windowed, self._memory.all_windowed
        self._steps = EngineSteps(StepExecutor(self._model, self._pool, self._memory), self.tree)

    # Units.

    def __getitem__(self, unit: Unit | str) -> Unit:
        """Return a unit by name, or the unit itself if it is one of this engine's."""
        return self.units[self._model.units.index(self._model[unit])]

    @property
    def tensor(self) -> Backend | None:
        """The ranks with the other boxes, if there are any; None for a group of one rank, too."""
        return self._model.groups.tensor

    @property
    def everyone(self) -> Backend:
        """The ranks of ``backend``, and those with the other boxes; ``backend`` without such."""
        return self._model.groups.everyone

    @property
    def leaves(self) -> range:
        """The virtual ranks that this rank computes; its own number without ``virtual_ranks``."""
        return self._model.leaves.mine

    @property
    def virtual_ranks(self) -> int | None:
        """As given."""
        return self._model.options.virtual_ranks

    @property
    def host_algorithm(self) -> str:
        """The algorithm of collectives that move arrays of the host."""
        return self._model.host_algorithm

    @property
    def xp(self) -> Any:
        """The module that computes with the parameters: ``numpy``, or ``cupy`` on a GPU."""
        return self.device.xp

    @property
    def loss_scale(self) -> float:
        """What to multiply the loss by before the backward pass; 1 without scaling."""
        return self._model.scaler.scale

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether a unit is being gathered ahead of its use."""
        return any(unit.has_pending_prefetch for unit in self._model.units)

    def prefetch(self, unit: Unit | str) -> None:
        """Begin to gather a unit that is used soon; for those who call verbs by hand.

        All ranks call it. Does nothing where nothing has to be fetched: the unit is gathered, or on
        its way, already, or all ranks have its parameters anyway. Inside a step the engine does
        that itself.

        Args:
            unit: of this engine, or its name.

        Raises:
            ArgumentError: no unit of this engine.
            StateError: it is being written.
        """
        self._model[unit].prefetch()

    # Steps.

    def step(self, *, divisor: float | None = None) -> Step:
        """Begin a training step, in a ``with`` statement.

        Args:
            divisor: the gradients, summed over ranks and backward passes, are divided by it, with
                every strategy. By default it is the number of ranks: the gradients are the mean
                over ranks, and the sum over passes. With the number of tokens of all ranks and
                passes they are the mean over tokens. For the mean over M passes of each rank it is
                M times the number of ranks, not M.

        Example::

            with engine.step(divisor=M * backend.world_size) as step:   # M microbatches
                for x, y in microbatches:
                    train_one(step, x, y)     # forward and backward of all units
                step.update()

        Raises:
            ArgumentError: a divisor that is no positive number.
            StateError: on entering it, inside of another step or of ``full_params``; or an update
                was left half done, and nothing was loaded since.
        """
        return Step(self._steps, divisor, training=True)

    def evaluation(self) -> Step:
        """Like ``step``, for forward passes only: no gradients, and no update."""
        return Step(self._steps, None, training=False)

    @property
    def stats(self) -> StepStats:
        """What the last step did, and how long it waited."""
        return self._steps.executor.stats

    def close(self) -> None:
        """Close the groups of ranks that were made for this engine.

        For those who make many engines in one job; the engine is of no use after that, the backend
        stays open. All ranks call it, outside of steps; after ``release`` it does nothing.
        """
        if self._model.status.ended:
            return
        self._model.status.check_idle("close()")
        self._model.status.ended = "was closed; make a new one"
        self._model.groups.close()

    def release(self, *, full: bool = True, to: int | str = "all") -> dict[str, Any]:
        """Hand the parameters back, and end the engine; a collective, outside of steps.

        The memory of shards, gradients, optimizer state and gathered buffers is freed, and files of
        ``Offload`` are gone. Every later call of this engine and its units raises StateError; the
        backend stays open. ::

            params = engine.release(to=0)  # by "unit.param"; empty on the other ranks
            if backend.rank == 0:
                np.savez("model.npz", **params)

        Args:
            full: whole arrays of NumPy at full precision, as of ``state_dict``. Without it this
                rank's parts, as ``ShardedArray``, on the device; nothing is sent then.
            to: of ``full``: the rank that gets the arrays.

        Returns:
            The arrays by name, which belong to the caller: trained, frozen and ignored ones. A tied
            parameter is the same array as its owner's.

        Raises:
            ArgumentError: as of ``state_dict``; the engine goes on.
            StateError: inside of a step or of ``full_params``, after an update that was left half
                done, or it was released already.
            MismatchError: the ranks want different things; the engine goes on.
        """
        self._model.status.check_own("release()")
        arrays = release(self._model, self._pool, full=full, to=to)
        for unit in self.units:
            let_go(unit)
        self.units = ()
        self._model = replace(self._model, units=())
        self._memory = ModelMemory(file=None, window_bytes=0, all_windowed=False)
        self._steps = EngineSteps(StepExecutor(self._model, self._pool, self._memory), None)
        return arrays

    # All units at once.

    def num_parameters(self, *, trainable: bool = False) -> int:
        """Return how many elements the parameters of the whole model have; does not communicate.

        The same on all ranks and with every strategy: a tied parameter counts once, a parameter
        that tensor-parallel ranks share counts as the whole it is. Frozen parameters count, ignored
        arrays do not. What this rank holds is in ``held``.

        Args:
            trainable: only those that are trained.
        """
        return self._model.num_parameters(trainable=bool(trainable))

    def unshard(self) -> None:
        """Gather all units, as far as memory allows; a collective, outside of steps.

        ``engine["name"].params`` has the parameters then, until ``reshard``. Blocks. The same as
        ``unshard`` of each unit in order.

        Raises:
            StateError: inside of a step, or of ``full_params``.
        """
        self._model.status.check_idle("unshard()")
        for unit in self.units:
            unit.unshard()

    def reshard(self) -> None:
        """Free what ``unshard`` has gathered; views of it must not be read after this.

        Does not communicate; does nothing where all units are sharded.

        Raises:
            StateError: inside of a step, or of ``full_params``.
        """
        self._model.status.check_idle("reshard()")
        for unit in self.units:
            unit.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all units unsharded in a ``with`` block: ``unshard``, then ``reshard``."""
        try:
            self.unshard()
            yield
        finally:
            self.reshard()

    def averaged(self, kind: str | None = None) -> AbstractContextManager[None]:
        """Have an average of the weights in the place of the weights, for a ``with`` block.

        All ranks enter and leave it, outside of steps. Each exchanges its shards, so that nothing
        is sent and no memory is taken. In the block: evaluation, ``full_params()``, ``full_tree()``
        and ``state_dict(optimizer=False)``; no training step, no load, no save of the optimizer.

        Args:
            kind: "ema" or "mean"; may be left out where the optimizer keeps one of them. Where an
                average has not begun, or a parameter has none, it stays as it is.

        Raises:
            StateError: the optimizer keeps none (see ``fc.optim.Average``); or inside of a step,
                of ``full_params``, or of another ``averaged``.
            ArgumentError: it keeps none of this kind; or both, and ``kind`` is missing.

        Example::

            with engine.averaged(), engine.evaluation() as step:
                ...
        """
        return averaged(self._model, kind)

    # State.

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        return self._model.status.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._model.status.steps = as_int(value, "steps of an engine", minimum=0)

    @property
    def partially_updated(self) -> bool:
        """Whether an update, or a load, was left half done, for instance by an interrupt."""
        return self._model.status.partially_updated

    @partially_updated.setter
    def partially_updated(self, value: bool) -> None:
        self._model.status.partially_updated = value

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
            return full_state(self._model, optimizer=optimizer, to=to)
        if to != "all":
            raise ArgumentError("to=... belongs to full=True; each rank has its own shards anyway")
        return sharded_state(self._model, optimizer=optimizer)

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
        return load_state(self._model, state, strict=strict, optimizer=optimizer, src=src)

    def load_full(self, params: Any, *, strict: bool = True, src: int | None = None) -> LoadReport:
        """Load whole parameters by ``unit.param``; a collective, outside of steps.

        Optimizer state and the number of steps stay. A tied parameter may have its own name, or
        that of its owner. Ignored arrays may be left out.

        Args:
            params: whole arrays by name, or nested as ``full_tree`` gives them; equal on all
                ranks, or on ``src`` only. Rounded to the dtypes of this engine.
            strict, src: as of ``load_state_dict``.

        Returns:
            Which names were missing, and which were not expected.

        Raises:
            ArgumentError, MismatchError, StateError: as ``load_state_dict``.
        """
        return load_params(self._model, self.tree, params, strict=strict, src=src)

    def writing_state(self, *, optimizer: bool = True) -> AbstractContextManager[EngineState]:
        """Give ``state_dict()`` to be written in place, without another copy; for all ranks.

        What is written to the arrays in the ``with`` block is there after it, also if it ends by
        an exception. ``load_info`` has the rest.

        Args:
            optimizer: with the optimizer's arrays.

        Raises:
            StateError: inside of a step, or of ``full_params``.
        """
        return writing_state(self._model, optimizer=optimizer)

    def load_info(self, info: Mapping[str, Any]) -> None:
        """Take over the number of steps and the loss scale from ``EngineState.info``.

        Equal on all ranks, which is not checked. Raises ArgumentError if they make no sense.
        """
        set_progress(self._model, Progress.of(info))

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
        return full_params(self._model, write=write, names=names, unit=unit)

    def full_tree(self, *, to: int | str = "all") -> Any:
        """Return the parameters nested as the engine got them, for evaluation or export.

        A collective, outside of steps. What is no parameter is in its place, too.

        Args:
            to: the rank of ``backend`` that gets the tree, the others get None; "all" for all.

        Returns:
            The tree, with whole arrays of NumPy at full precision, which belong to the caller.

        Raises:
            StateError: the engine was made of a list of units; inside of a step, or of
                ``full_params``; or as ``state_dict``.
            ArgumentError: there is no such rank.
        """
        return full_tree(self._model, self.tree, to)

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
        update_shards(self._model, shards)

    # Plans and measurements.

    def plan(
        self,
        *,
        microbatches: int = 1,
        sync: Sync = "each",
        whole: bool = False,
        compute_seconds: Sequence[float] | None = None,
    ) -> Plan:
        """Return a step of this engine as data: operations, bytes, peak; it can be printed.

        What collectives take is told by cost formulas: with the costs that were measured between
        hosts, and with shared memory once a step was made.

        Args:
            microbatches: forward and backward passes before the update.
            sync: "each" reduces in each of them; "last" in the last one, with ``no_sync`` before.
            whole: all units are gathered at once, by ``Step.whole``.
            compute_seconds: of each unit's forward pass, in the order of the units; a backward pass
                counts twice as long. For ``step_seconds`` and ``exposed_seconds`` of the plan.

        Example::

            plan = engine.plan(compute_seconds=[0.01] * len(engine.units))
            print(plan.step_seconds, plan.exposed_seconds)
        """
        return plan_of(
            self.units,
            self._model,
            microbatches,
            sync,
            windowed=self.windowed,
            whole=whole,
            compute_seconds=compute_seconds,
        )

    def report(self) -> Report:
        """Compare the last training step with its plan, on this rank; it can be printed."""
        executor = self._steps.executor
        return report_of(self.units, executor, self.held(), windowed=self.windowed)

    @property
    def gathered_peak(self) -> int:
        """Most bytes of gathered parameters and full gradients at once, in the last step.

        Parameters in a window are there anyway, so that gathering them adds nothing.
        """
        return self._pool.peak_bytes

    @property
    def offload_stats(self) -> OffloadStats:
        """What moved between memory and files since the last step began; zeros without files."""
        file = self._memory.file
        return OffloadStats() if file is None else file.stats

    def held(self) -> HeldMemory:
        """Measure what this rank holds now."""
        return measure(self._model, self._pool, self._memory.window_bytes)

    def __repr__(self) -> str:
        units, ranks = len(self.units), self.backend.world_size
        window = ", in a window" if self.windowed else ""
        return (
            f"<FSDP of {units} unit{'s' * (units != 1)}, {self.num_parameters():,} parameters: "
            f"{self.strategy.name} over {ranks} rank{'s' * (ranks != 1)}{window}, "
            f"{_optimizers(self)}, step {self.steps}, on {self.backend!r}>"
        )


def _optimizers(engine: FSDP) -> str:
    given = engine._model.optimizers
    if given is None:
        return "no optimizer"
    found = (each for unit in engine.units for each in given.of_unit(unit.name).values())
    return " and ".join(dict.fromkeys(type(each).__name__ for each in found)) or "nothing trained"


def check_idle(engine: FSDP, what: str) -> None:
    """Raise StateError inside of a step or of ``full_params``, where ``what`` is refused."""
    engine._model.status.check_idle(what)


def open_step(engine: FSDP) -> Step | None:
    """Return the step that is open."""
    return engine._steps.open
