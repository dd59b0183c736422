"""``fully_shard``: objects with parameters in their attributes, each a unit of an engine."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from fsdpcore.adapters.fully_shard.gradients import GradientOf
from fsdpcore.adapters.fully_shard.guards import GuardedAttribute, change_class, guarded_class
from fsdpcore.adapters.fully_shard.passes import LayerPasses
from fsdpcore.adapters.fully_shard.units import LayerUnit, Patterns, layer_units
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.fsdp.engine import FSDP, check_idle
from fsdpcore.fsdp.step.step import Step


def fully_shard(
    layers: Any,
    backend: Backend,
    *,
    grads: str | GradientOf = "d{}",
    methods: tuple[str, str] = ("forward", "backward"),
    names: str | Sequence[str] | None = None,
    ignored: str | Sequence[str] = (),
    frozen: str | Sequence[str] = (),
    **engine_options: Any,
) -> ShardedLayers:
    """Shard the parameters that objects have in their attributes; a collective.

    Parameters are the float32 and float64 arrays of NumPy in the attributes of each layer, and of
    the objects, dicts, lists and namespaces below; also deferred ones (``Spec``), and with
    ``tensor=`` boxes of whole ones (``BoxShard``). They are taken out: the engine has them, and a
    layer finds its own, read-only, whenever its ``forward`` or ``backward`` is called inside of a
    step of the engine. Layers get a class that is derived from their own. Everything else in their
    attributes stays as it is, on every rank. What earlier passes have left there (``self.x``) would
    count as parameters: shard layers before they are used, or name it in ``ignored``. ::

        layers = [Dense(64, 100), Relu(), Dense(100, 10)]
        sharded = fc.fully_shard(layers, backend, optimizer=fc.optim.AdamW(1e-3))
        with sharded.step() as step:
            for layer in layers:
                x = layer.forward(x)
            dx = ...
            for layer in reversed(layers):
                dx = layer.backward(dx)
            step.update()

    A unit is gathered where its layer is called and freed after that, so a layer must not keep
    views of its parameters, which is an error where it is seen: in attributes after the call, and
    in containers, namespaces and functions there, but not in objects of other kinds. An output that
    is such a view is copied, alone or in tuples, lists and mappings; objects of other kinds must
    have copies. A layer may be called several times in a step, with as many backward
    passes. Called without a step, ``forward`` gathers and frees as well.

    The same array in two places is one parameter (tied), also where a layer refers to another one
    of the list: whose parameters are then gathered along with its own. ``ignored`` leaves out such
    references.

    Args:
        layers: one object or a list of them, in the order of the forward pass; each with parameters
            is a unit. All ranks pass equal ones, which are their own also where ranks are threads.
        backend: the ranks to shard over.
        grads: where ``backward`` leaves the gradient of ``self.w``. With ``"d{}"`` it is
            ``self.dw``, with ``"grads"`` ``self.grads["w"]``; of ``self.params["w"]`` it is
            ``self.params["dw"]`` or ``self.grads["w"]``. Also a function of layer and name (such as
            ``"attention.w"``) that returns the array, or None for zeros. What is found is copied,
            rounded if need be, and removed. Where there is an array in the beginning, ``backward``
            finds one of zeros, to write into or to add to; its memory is the engine's, so keep
            copies only. What is assigned there outside of ``backward`` is not used: to change
            gradients, do it in ``backward``, or by the options of ``step.update``.
        methods: names of the methods for the forward and the backward pass; the latter may be
            missing.
        names: of the units; by default the class in lower case and the place in the list, as
            ``dense0``. Parameters of the engine are named ``dense0.w``, ``block1.attention.w``.
        ignored: patterns of names, such as ``"mean"``, ``"norm1.mean"`` or ``"*.mean"``, of what is
            left alone, and is no part of the engine's state. With an object goes all below it.
        frozen: patterns of parameters that are sharded but not trained.
        **engine_options: as of ``FSDP``: ``strategy``, ``optimizer``, ``prefetch`` and so on.

    Raises:
        ArgumentError: a layer without such methods, no parameters at all, a pattern that matches
            nothing, or an array that cannot be taken out; on all ranks alike, and before anything
            was changed.
        MismatchError: the ranks passed different layers or values; likewise.
    """
    given = list(layers) if isinstance(layers, (list, tuple)) else [layers]
    chosen = _names(given, names)
    if len(methods) != 2 or not all(isinstance(method, str) for method in methods):
        raise ArgumentError(
            f"methods must be the names of two methods, forward and backward, got {methods!r}"
        )
    units = layer_units(
        given, chosen, grads, Patterns.of("ignored", ignored), Patterns.of("frozen", frozen)
    )
    for unit in units:
        _check_methods(unit, methods)
    return ShardedLayers(given, units, backend, grads, methods, engine_options)


class ShardedLayers:
    """Layers whose parameters are sharded; made by ``fully_shard``.

    Attributes:
        layers: the objects, in order.
        engine: has the parameters; for checkpoints, plans, ``full_params`` and all else.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        units: Sequence[LayerUnit],
        backend: Backend,
        grads: str | GradientOf,
        methods: tuple[str, str],
        options: Mapping[str, Any],
    ) -> None:
        self.layers = tuple(layers)
        self._units = tuple(units)
        self._passes = LayerPasses(grads if callable(grads) else None)
        self._restored = False
        self._classes = _classes(self._passes, self._units, methods)
        self.engine = FSDP([each.unit for each in self._units], backend, **options)
        self._passes.engine = self.engine
        self._install()

    def _install(self) -> None:
        """Take the arrays out of the layers."""
        taken = [kind.__name__ for owner, kind, _ in self._classes if type(owner) is not kind]
        if taken:
            raise ArgumentError(
                f"the {taken[0]} that this rank shards was sharded by another one meanwhile; each "
                "rank, also where ranks are threads, makes layers of its own"
            )
        for owner, _, guarded in self._classes:
            change_class(owner, guarded)
        for unit in self._units:
            for parameter in unit.parameters.values():
                parameter.hide()
            for gradient in unit.gradients.values():
                gradient.reset()

    # Steps.

    def step(self, *, divisor: float | None = None) -> Step:
        """Begin a training step, in a ``with`` statement.

        Args:
            divisor: the gradients, summed over ranks and backward passes, are divided by it. By
                default it is the number of ranks.

        Raises:
            ArgumentError: a divisor that is no positive number.
            StateError: inside of ``gathered()`` or of a pass, or after ``restore()``; on entering
                it, inside of another step.
        """
        self._check("a step")
        return self.engine.step(divisor=divisor)

    def evaluation(self) -> Step:
        """Begin a step of forward passes only, in a ``with`` statement: no gradients, no update.

        Raises:
            StateError: inside of ``gathered()`` or of a pass, or after ``restore()``; on entering
                it, inside of another step.
        """
        self._check("an evaluation")
        return self.engine.evaluation()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all parameters in their attributes, read-only, as the passes see them.

        As far as memory allows; all ranks enter it, outside of steps. ``forward`` may be called on
        some ranks only inside of it.
        """
        self._check("gathered()")
        check_idle(self.engine, "gathered()")
        with self.engine.gathered(), ExitStack() as shown:
            for each in self._units:
                shown.enter_context(self._passes.shown(each, each.unit.params, "gathered"))
            yield

    def restore(self) -> None:
        """Give the layers their parameters back, whole, and their own class; a collective.

        The arrays are new, of NumPy, writable, and at full precision: where an attribute had a box
        of an array (``BoxShard``), that box. The engine has its own still,
        for who wants to save it; the layers have nothing to do with it any more.

        Raises:
            StateError: inside of a step or ``gathered()``, or it was called before.
        """
        self._check("restore()")
        arrays: dict[str, Array] = {}
        for each in self._units:
            names = [name for name in each.parameters if name not in each.unit.ties]
            patterns = [glob.escape(f"{each.name}.{name}") for name in names]
            with self.engine.full_params(unit=each.unit, names=patterns) as params:
                for name in names:
                    whole, box = params[f"{each.name}.{name}"], each.parameters[name].box
                    own = whole if box is None else whole[box.slices]
                    arrays[f"{each.name}.{name}"] = np.array(self.engine.device.to_host(own))
        self._restored = True
        for owner, kind, _ in self._classes:
            change_class(owner, kind)
        for each in self._units:
            for name, parameter in each.parameters.items():
                parameter.place.put(arrays[str(each.unit.ties.get(name, f"{each.name}.{name}"))])
            for gradient in each.gradients.values():
                gradient.give_back()

    def _check(self, what: str) -> None:
        if self._restored:
            raise StateError(f"{what} after restore(); shard the layers again with fully_shard")
        if self._passes.use:
            where = "gathered()" if self._passes.use == "gathered" else f"a {self._passes.use} pass"
            raise StateError(f"{what} inside of {where}; leave that first")

    def __repr__(self) -> str:
        names = ", ".join(each.name for each in self._units)
        return f"<ShardedLayers {names}{', restored' if self._restored else ''}>"


def _names(layers: Sequence[Any], names: str | Sequence[str] | None) -> list[str]:
    if names is None:
        return [f"{type(layer).__name__.lower()}{i}" for i, layer in enumerate(layers)]
    chosen = [names] if isinstance(names, str) else list(names)
    if len(chosen) != len(layers):
        raise ArgumentError(f"{len(chosen)} names for {len(layers)} layers; give one for each")
    return chosen


def _check_methods(each: LayerUnit, methods: tuple[str, str]) -> None:
    kind = type(each.layer)
    if not callable(getattr(kind, methods[0], None)):
        raise ArgumentError(
            f"layer {each.name!r}, a {kind.__name__}, has no method {methods[0]!r}; name it by "
            "methods=(forward, backward), or make one"
        )
    own = [method for method in methods if method in getattr(each.layer, "__dict__", {})]
    if own:
        raise ArgumentError(
            f"layer {each.name!r} has {own[0]!r} as an attribute of the object; it has to be a "
            "method of its class"
        )


def _classes(
    called: LayerPasses, units: Sequence[LayerUnit], methods: tuple[str, str]
) -> list[tuple[Any, type, type]]:
    """Return for each object that has parameters, or is a layer, its class and the derived one."""
    owners: dict[int, tuple[Any, str]] = {}
    guards: dict[int, dict[str, GuardedAttribute]] = {}
    runs: dict[int, dict[str, Any]] = {}
    for each in units:
        owners.setdefault(id(each.layer), (each.layer, each.name))
        passes = zip(methods, (called.forward, called.backward), strict=True)
        runs[id(each.layer)] = {
            method: partial(run, each)
            for method, run in passes
            if hasattr(type(each.layer), method)
        }
        for parameter in each.parameters.values():
            place = parameter.place
            owners.setdefault(id(place.owner), (place.owner, parameter.label.rpartition(".")[0]))
            own = guards.setdefault(id(place.owner), {})
            own[place.attribute] = GuardedAttribute(
                type(place.owner), place.attribute, parameter.missing, parameter.fixed
            )
        for gradient in each.gradients.values():
            place = gradient.place
            own = guards.setdefault(id(place.owner), {})
            guard = GuardedAttribute(type(place.owner), place.attribute, gradient.says, None)
            own.setdefault(place.attribute, guard)
    return [
        (
            owner,
            type(owner),
            guarded_class(owner, name, guards.get(number, {}), runs.get(number, {})),
        )
        for number, (owner, name) in owners.items()
    ]
