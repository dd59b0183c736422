"""``FSDP``: shards the units of a model over the ranks and gathers each one when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fsdpcore.comm.backend import Backend
from fsdpcore.compress.compression import Compression
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.offload.offload import Offload, OffloadStats
from fsdpcore.fsdp.optim.groups import Given
from fsdpcore.fsdp.plan.engine_plan import plan_of, report_of
from fsdpcore.fsdp.plan.figures import Figures, StepFigures
from fsdpcore.fsdp.plan.make_plan import Sync
from fsdpcore.fsdp.plan.memory import HeldMemory, measure
from fsdpcore.fsdp.plan.plan import Plan
from fsdpcore.fsdp.plan.report import Report
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.state.release import release
from fsdpcore.fsdp.state.save import ShardedState
from fsdpcore.fsdp.state.verbs import StateVerbs
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.step.stats import StepStats
from fsdpcore.fsdp.step.step import EngineSteps, Step
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.make_model import ModelMemory, make_memory, make_model
from fsdpcore.fsdp.units.options import EngineOptions, Prefetch
from fsdpcore.fsdp.units.param_tree import as_units, is_units
from fsdpcore.fsdp.units.precision import Precision
from fsdpcore.fsdp.units.unit import Unit, let_go


class FSDP(StateVerbs):
    """Owns parameters, gradients and optimizer state of a model, each rank a share.

    ``strategy`` says what is sharded, and over which ranks (see ``Strategy``). With ``full_shard``
    (ZeRO-3) a unit is gathered before each of its passes, and freed afterwards. After the backward
    pass its gradients are reduced, and each rank gets its shard of them. Meanwhile the next units
    are gathered in the background (see ``Prefetch``).

    If all ranks that share a copy of the model are on one host, and the transport has windows, the
    parameters are in a window: memory that all of these ranks map. Each rank writes its shard
    where the others read it. So gathering a unit moves no bytes, and the host holds the parameters
    once. A process that is forked from a rank sees its updates, too.

    If a rank has a GPU (``backend.device``), there is no window, and all arrays are CuPy's. Compute
    with ``engine.xp``. Arrays of NumPy may be given, too, and are moved. The host puts work into
    the GPU's queue, and waits for it once in a step: ``update`` must know whether the gradients are
    finite. The exchanges of the ranks run on a stream of their own. That stream and the caller's
    current one wait for each other. If you change streams in between, let the new one wait for the
    old one.

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
        optimizer: applied by ``step.update``; you need none to evaluate only. It may be a mapping
            of patterns to optimizers; the first pattern that fits a parameter's name counts:
            ``{"*.bias": AdamW(lr=1e-3, weight_decay=0.0), "*": AdamW(lr=1e-3)}``. A transformation
            of optax that is elementwise is taken as it is, see ``fc.optim.Optax``; those of PyTorch
            are given as ``fc.optim.Torch(torch.optim.AdamW, lr=1e-3)``.
        precision: dtypes of computation and reduction; by default those of the parameters.
        prefetch: a ``Prefetch``, or how many units to gather ahead; 0 for nothing in the
            background. By default 1 between hosts and on GPUs, and 0 on the processors of one host.
            In a window there is nothing to fetch.
        window: False keeps the parameters out of shared memory.
        offload: what is kept in files, or beside a GPU in the host's memory, while it is not in
            use; see ``Offload``. It needs ``window=False``.
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
        virtual_ranks: into how many shares each batch is cut, at least one for each rank. Their
            gradients are summed in one fixed order, so the number of ranks changes no bit of the
            parameters. A step goes through the shares of its rank: ``for leaf in step.leaves()``.
        compression: what travels as integers of 8 or 4 bits, for slow links; see ``Compression``.

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
        prefetch: Prefetch | int | None = None,
        window: bool = True,
        offload: Offload | None = None,
        tensor: Backend | None = None,
        seed: int = 0,
        algorithm: str = "auto",
        virtual_ranks: int | None = None,
        compression: Compression | None = None,
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
            *(strategy, precision, prefetch, window, offload, seed, algorithm, virtual_ranks),
            *(compression, backend),
        )
        self.strategy, self.precision = options.strategy, options.precision
        self.prefetching, self.offload = options.prefetch, options.offload
        self.algorithm = options.algorithm
        self._pool = BufferPool(backend)
        self._model = make_model(self.units, backend, options, optimizer, tensor)
        self._sharded = ShardedState(self._model)
        self._memory = make_memory(self._model, self.units, self._pool)
        self.windowed, self.all_windowed = self._memory.windowed, self._memory.all_windowed
        executor = StepExecutor(self._model, self._pool, self._memory)
        self._figures = StepFigures(executor, self._pool, self._memory.window_bytes)
        self._steps = EngineSteps(executor, self.tree, self._figures)

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

    def step(self, *, divisor: float | None = None, tokens: float | None = None) -> Step:
        """Begin a training step, in a ``with`` statement.

        Args:
            divisor: the gradients, summed over ranks and backward passes, are divided by it, with
                every strategy. By default it is the number of ranks: the gradients are the mean
                over ranks, and the sum over passes. With the number of tokens of all ranks and
                passes they are the mean over tokens. For the mean over M passes of each rank it is
                M times the number of ranks, not M.
            tokens: how many this rank goes through, for ``on_step`` and ``fsdpcore top``; also to
                be set as ``step.tokens`` inside of the step.

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
        return Step(self._steps, divisor, training=True, tokens=tokens)

    def evaluation(self) -> Step:
        """Like ``step``, for forward passes only: no gradients, and no update."""
        return Step(self._steps, None, training=False)

    def on_step(self, callback: Callable[[Figures], object]) -> None:
        """Have a function called after each training step, with its figures on this rank.

        For TensorBoard, W&B, MLflow and the like. ::

            if backend.rank == 0:
                engine.on_step(lambda figures: wandb.log(figures, step=int(figures["step"])))

        Args:
            callback: gets a new dict of numbers by name: ``step`` (updates so far), ``seconds`` of
                the step, and of these ``computing``, ``waiting``, ``moving`` and ``optimizer``;
                ``memory_bytes`` (as ``peak_bytes`` of ``report``), ``sent_bytes``, ``loss_scale``,
                ``skipped`` (0 or 1); where they are known, ``between_steps`` (seconds from the end
                of the last training step to the begin of this one), ``grad_norm`` (the first that
                was found in the step), ``tokens`` and ``tokens_per_second``; this counts
                the seconds between steps, too. It is called by the thread that ends the step,
                outside of it; what it raises, the ``with`` statement raises. Not a collective.

        Raises:
            ArgumentError: it cannot be called.
            StateError: the engine has ended.
        """
        if not callable(callback):
            raise ArgumentError(f"on_step takes a function, got {type(callback).__name__}")
        self._model.status.check_held("on_step()")
        self._figures.callbacks.append(callback)

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
        self._model = replace(self._model, units=(), wire=None)
        self._sharded = ShardedState(self._model)
        self._memory = ModelMemory(file=None, window_bytes=0, all_windowed=False)
        executor = StepExecutor(self._model, self._pool, self._memory)
        self._figures = StepFigures(executor, self._pool, 0)
        self._steps = EngineSteps(executor, None)
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
            microbatches: forward and backward passes before the update, or of each virtual rank.
            sync: "each" reduces in each of them; "last" in the last one, with ``no_sync`` before,
                as always with virtual ranks.
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
