"""Layers with hand-written forward and backward passes, each a unit of the engine."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from fsdpcore.adapters.trees import detached_from, lies_in, may_lie_in
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_instance
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.core.skeleton import Skeleton
from fsdpcore.core.trees import branch
from fsdpcore.fsdp.step.step import Step
from fsdpcore.fsdp.units.leaves import has_params, nested
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.fsdp.units.special import Tied
from fsdpcore.fsdp.units.unit import Unit
from fsdpcore.parallel.scope import Scope, prefixed

Initial: TypeAlias = Array | Spec | BoxShard | Tied
"""A parameter to begin with."""

Initials: TypeAlias = Mapping[str, Initial]
"""Those of a layer, by name."""


def as_initials(init: object) -> None:
    """Raise ArgumentError unless a layer can have its initial parameters from this."""
    if not callable(init) and not has_params(init):
        as_instance(
            init,
            Mapping,
            "init",
            "a mapping from names to arrays, or a function of a generator that returns one",
        )


def initials(init: Any, rng: np.random.Generator) -> Any:
    """Return initial parameters, from a function of ``rng`` or as they are.

    A module that can be called, such as one of Equinox, is a container of parameters.
    """
    return init(rng) if callable(init) and branch(init) is None else init


class OfTree:
    """A function of nested parameters, to be called with those that a unit has, by name.

    Two are equal if they are of the same function and of trees with the same containers.
    """

    def __init__(
        self, function: Callable[..., Any], skeleton: Skeleton, names: Iterable[str]
    ) -> None:
        self.function = function
        self._skeleton = skeleton
        self._names = tuple(names)

    def __call__(self, params: Mapping[str, Any], x: Any) -> Any:
        return self.function(self._skeleton([params[name] for name in self._names]), x)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, OfTree)
            and other.function is self.function
            and (other._names, other._skeleton) == (self._names, self._skeleton)
        )

    def __hash__(self) -> int:
        return hash((id(self.function), self._names))


def of_tree(params: Any, function: Callable[..., Any]) -> tuple[Initials, Callable[..., Any]]:
    """Return the parameters of a layer by name, and a function that takes them so.

    Args:
        params: by name, or nested.
        function: ``function(params, x)``, of parameters that are nested in the same way; or what
            was returned here before.
    """
    found, skeleton = nested("of the layer", params)
    if skeleton is None:
        return found, function
    inner = function.function if isinstance(function, OfTree) else function
    return found, OfTree(inner, skeleton, found)


class Layer(Protocol):
    """A function with parameters and its derivative. It owns no parameters.

    On a GPU all arrays but those of ``init`` are CuPy's: parameters and gradients come so from the
    engine, and inputs are best made so, by ``engine.xp.asarray(batch)``.

    A layer whose ``backward`` reads parameters that its ``forward`` was given, as a tape does, says
    so by an attribute ``holds_params = True``; see ``LayerStack``.
    """

    def init(self, rng: np.random.Generator) -> Initials:
        """Return the initial parameters by name, always in the same order.

        Args:
            rng: the only source of random numbers, so that all ranks have the same values.

        Returns:
            Arrays of float32 or float64, ``Spec``, ``BoxShard`` or ``Tied``. NumPy arrays are fine
            on a GPU, too: the engine moves them.
        """

    def forward(self, params: Mapping[str, Array], x: Any) -> tuple[Any, Any]:
        """Return the output and what ``backward`` needs, without parameters or views of them.

        Those are in ``backward`` again. An output that lies in a parameter is copied.

        Args:
            params: this layer's, by name: read-only, and valid during the call only.
            x: the output of the layer before, or what the model was given.
        """

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Any, grads: MutableMapping[str, Array]
    ) -> Any:
        """Write the parameters' gradients into ``grads``, return the input's gradient.

        ``grads`` has an array of zeros for every parameter that is trained. It may have a method
        ``empty(name)``, as the engine's mappings do: the same array without filling it with zeros,
        for a layer that writes all of it.

        Args:
            params: as in ``forward``.
            saved: what ``forward`` returned beside its output.
            dy: gradient of the output, of its shape.
            grads: by name; may be written once or added to, valid during the call only.
        """


class Chain:
    """Several layers one after the other as one layer, and so as one unit.

    A parameter has the name of its layer before its own: ``norm.gain``.

    Args:
        layers: pairs of a name and a layer, in order.

    Attributes:
        layers: as given.
        holds_params: one of the layers does.

    Raises:
        ArgumentError: these are no such pairs; a name occurs twice, or is the beginning of another
            one, up to a dot.

    Example::

        block = fc.Chain([("norm", fc.parallel.LayerNorm(64)), ("dense", Dense())])
        stack = fc.LayerStack([("block0", block)])
    """

    def __init__(self, layers: Sequence[tuple[str, Layer]]) -> None:
        self.layers = _named(layers)
        prefixes = [f"{name}." for name, _ in self.layers]
        for outer in prefixes:
            within = [
                inner[:-1] for inner in prefixes if inner != outer and inner.startswith(outer)
            ]
            if within:
                raise ArgumentError(
                    f"parameters of layer {within[0]!r} would be among those of layer "
                    f"{outer[:-1]!r}; rename one of them"
                )
        self.holds_params = any(_holds_params(layer) for _, layer in self.layers)

    def init(self, rng: np.random.Generator) -> dict[str, Initial]:
        """Initialise all layers, in order.

        Args:
            rng: the one generator of all of them.

        Returns:
            The parameters by name, such as ``norm.gain``.
        """
        entries: dict[str, Initial] = {}
        for name, layer in self.layers:
            entries.update(prefixed(f"{name}.", layer.init(rng)))
        return entries

    def forward(self, params: Mapping[str, Array], x: Any) -> tuple[Any, list[Any]]:
        """Run all layers; returns the output and what ``backward`` needs.

        Args:
            params: of all layers, by name: read-only, and valid during the call only.
            x: the input of the first layer.
        """
        saved = []
        for name, layer in self.layers:
            own = Scope(params, f"{name}.")
            x, kept = layer.forward(own, x)
            x = detached_from(x, own.values())  # before the next layer keeps it
            saved.append(kept)
        return x, saved

    def backward(
        self,
        params: Mapping[str, Array],
        saved: list[Any],
        dy: Any,
        grads: MutableMapping[str, Array],
    ) -> Any:
        """Run all layers backwards; returns the gradient of the input.

        Args:
            params: as in ``forward``.
            saved: what ``forward`` returned beside its output.
            dy: gradient of the output, of its shape.
            grads: of all layers, by name; written.
        """
        for (name, layer), kept in zip(reversed(self.layers), reversed(saved), strict=True):
            prefix = f"{name}."
            dy = layer.backward(Scope(params, prefix), kept, dy, Scope(grads, prefix))
        return detached_from(dy, (*params.values(), *grads.values()))


class LayerStack:
    """Layers one after the other, each gathered for its own forward and backward pass only.

    Outputs and gradients of inputs that lie in parameters, whose memory is freed after the pass,
    are copied: alone, or in tuples, lists and mappings. A layer with ``holds_params`` needs
    parameters that stay from its forward to its backward pass; see ``Step.keeps_params``.

    Args:
        layers: pairs of a unit's name and its layer, in order.

    Raises:
        ArgumentError: these are no such pairs, or a name occurs twice.

    Example::

        stack = fc.LayerStack([("first", Dense()), ("second", Dense())])
        engine = fc.FSDP(stack.units(np.random.default_rng(0)), backend, optimizer=fc.optim.AdamW())
        with engine.step() as step:
            y, saved = stack.forward(step, x)
            stack.backward(step, saved, loss_gradient(y))
            step.update()
    """

    def __init__(self, layers: Sequence[tuple[str, Layer]]) -> None:
        self.layers = _named(layers)

    def units(self, rng: np.random.Generator) -> list[Unit]:
        """Initialise all layers, in order, and return a unit for each, to give to an engine.

        Args:
            rng: the one generator of all layers. On all ranks it is seeded alike, so that they
                have the same values.
        """
        return [Unit(name, layer.init(rng)) for name, layer in self.layers]

    def forward(self, step: Step, x: Any) -> tuple[Any, list[Any]]:
        """Run all layers; returns the output and what ``backward`` needs.

        A collective, which blocks: each layer's parameters are gathered for its pass.

        Args:
            step: an open step of the engine that has the units, or an evaluation.
            x: the input of the first layer.

        Raises:
            StateError: a layer holds parameters, which the strategy frees after the forward pass;
                or has kept one, or a view of it, in what it saved, without saying so by
                ``holds_params``: in a training step, with every strategy.
        """
        if step.training and not step.keeps_params:
            _check_letting_go(self.layers)
        saved = []
        for name, layer in self.layers:
            with step.forward(name) as params:
                x, kept = layer.forward(params, x)
                if step.training and not _holds_params(layer):
                    _check_not_kept(name, layer, params, kept, step.ignored(name))
                x = detached_from(x, params.values())
            saved.append(kept)
        return x, saved

    def backward(self, step: Step, saved: list[Any], dy: Any) -> Any:
        """Run all layers backwards, consuming ``saved``; returns the gradient of the input.

        A collective, which blocks as the passes of the step do.

        Args:
            step: the one that ``forward`` was called with, still open.
            saved: what ``forward`` returned beside its output.
            dy: gradient of the output, of its shape.
        """
        for name, layer in reversed(self.layers):
            with step.backward(name) as unit:
                dy = layer.backward(unit.params, saved.pop(), dy, unit.grads)
                dy = detached_from(dy, (*unit.params.values(), *unit.grads.values()))
        return dy


def _named(layers: Sequence[tuple[str, Layer]]) -> tuple[tuple[str, Layer], ...]:
    layers = list(layers) if isinstance(layers, Iterable) else [layers]
    for each in layers:
        if not (isinstance(each, (tuple, list)) and len(each) == 2 and isinstance(each[0], str)):
            raise ArgumentError(
                "layers are given as a list of pairs of a name and a layer, such as "
                f"[('dense0', layer), ...]; got {type(each).__name__} in it"
            )
    names = [name for name, _ in layers]
    if len(set(names)) != len(names):
        raise ArgumentError(f"the names of layers must be unique, got {names}")
    return tuple((name, layer) for name, layer in layers)


def _holds_params(layer: Layer) -> bool:
    return bool(getattr(layer, "holds_params", False))


def _check_letting_go(layers: Sequence[tuple[str, Layer]]) -> None:
    """Raise StateError if a layer holds parameters beyond its forward pass."""
    holding = [name for name, layer in layers if _holds_params(layer)]
    if holding:
        raise StateError(
            f"layers {holding} hold their parameters until the backward pass, but the strategy "
            "frees them after the forward pass; have them recompute (recompute=True), or keep the "
            "parameters: Strategy('full_shard', reshard_after_forward=False)"
        )


def _check_not_kept(
    unit: str, layer: Layer, params: Mapping[str, Array], saved: Any, ignored: Container[str]
) -> None:
    """Raise StateError if a layer saves what lies in its parameters, whose memory is lent only."""
    kept = may_lie_in(saved, params.values())
    for name, array in params.items():
        if name not in ignored and any(lies_in(leaf, array) for leaf in kept):
            raise StateError(
                f"layer {unit!r}, a {type(layer).__name__}, has kept parameter {name!r}, or a view "
                "of it, in what it saved: its memory is freed after the forward pass. Save what it "
                "was computed from, and take params again in backward; a layer that needs "
                "parameters to stay says so by holds_params = True"
            )
