"""Forward and backward passes of a function of JAX, as functions that JAX can compile.

JAX keeps what it has compiled by the function that it was given, and compares those: objects here
are equal if they are the same pass of the same function. So all layers of one function, and all
ranks that are threads, share what is compiled for a shape.

JAX sorts what is in a dict, but not what is in an OrderedDict. So parameters come in those, and the
user's function gets them in the order in which they are declared, compiled or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpcore.adapters.layers import OfTree
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.jax_host import import_jax

Function = Callable[..., Any]


class Pass:
    """Something to be computed with a function of the user."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def output(self, *args: Any) -> Any:
        """Call the function, with arrays in the place of Python's numbers that it returns."""
        jax = import_jax()

        def one(leaf: Any) -> Any:
            return jax.numpy.asarray(leaf) if isinstance(leaf, (bool, int, float)) else leaf

        return jax.tree_util.tree_map(one, self.function(*args))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _same(other.function, self.function)

    def __hash__(self) -> int:
        function = self.function
        return hash(
            (type(self), id(function.function if isinstance(function, OfTree) else function))
        )


def _same(one: Function, other: Function) -> bool:
    return one is other or (isinstance(one, OfTree) and one == other)


def ordered(names: Iterable[str]) -> OrderedDict[str, None]:
    """Return names as an argument that is part of what is compiled."""
    return OrderedDict.fromkeys(names)


def _joined(order: Iterable[str], *parts: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return what is in any of ``parts``, in order."""
    return OrderedDict((name, next(p[name] for p in parts if name in p)) for name in order)


class Forward(Pass):
    """The output."""

    def __call__(self, params: OrderedDict[str, Any], x: Any) -> Any:
        return self.output(dict(params), x)


class Backward(Pass):
    """The gradients of trained parameters and input, by evaluating the function anew."""

    def __call__(self, trained: Any, fixed: Any, order: Any, x: Any, dy: Any) -> Any:
        jax = import_jax()

        def function(trained: Any, x: Any) -> Any:
            return self.output(dict(_joined(order, trained, fixed)), x)

        y, pull = jax.vjp(function, trained, x)
        gradients, dx = pull(_matching(dy, jax.tree_util.tree_map(_kind, y)))
        return gradients, _without_float0(dx)


class Taped(Pass):
    """The output, and what its gradients need besides parameters and input."""

    def __call__(self, params: OrderedDict[str, Any], x: Any) -> Any:
        jax = import_jax()
        y, pull = jax.vjp(lambda params, x: self.output(dict(params), x), params, x)
        leaves, structure = jax.tree_util.tree_flatten(pull)
        # What of it is a parameter, or the input, is found by identity. It is there again in the
        # backward pass: no memory of the engine is kept, nor a copy of it.
        inputs = {id(leaf): at for at, leaf in enumerate(jax.tree_util.tree_leaves((params, x)))}
        sources = tuple(inputs.get(id(leaf)) for leaf in leaves)
        kept = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
        kinds, outputs = jax.tree_util.tree_flatten(jax.tree_util.tree_map(_kind, y))
        return y, jax.tree_util.Partial(_Pull(structure, sources, outputs, tuple(kinds)), *kept)


class Untaped(Pass):
    """The gradients, from what ``Taped`` has kept."""

    def __call__(self, tape: Any, trained: Any, fixed: Any, order: Any, x: Any, dy: Any) -> Any:
        gradients, dx = tape((_joined(order, trained, fixed), x), dy)
        return {name: gradients[name] for name in trained}, _without_float0(dx)


@dataclass(frozen=True)
class _ShapeDtype:
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: Any


def _kind(array: Any) -> _ShapeDtype:
    return _ShapeDtype(array.shape, array.dtype)


@dataclass(frozen=True)
class _Pull:
    """How to take gradients from what was kept.

    Attributes:
        structure: of what JAX has returned for that.
        sources: for each of its arrays which of the inputs it is, or None if it was kept.
        outputs, kinds: structure of the output, and shapes and dtypes of its arrays.
    """

    structure: Any
    sources: tuple[int | None, ...]
    outputs: Any
    kinds: tuple[_ShapeDtype, ...]

    def __call__(self, *kept_inputs_dy: Any) -> Any:
        *kept, inputs, dy = kept_inputs_dy
        tree = import_jax().tree_util
        given, own = tree.tree_leaves(inputs), iter(kept)
        leaves = [next(own) if at is None else given[at] for at in self.sources]
        pull = tree.tree_unflatten(self.structure, leaves)
        return pull(_matching(dy, tree.tree_unflatten(self.outputs, self.kinds)))


class Valued(Pass):
    """A loss and its gradients with respect to what is trained.

    Arrays come by their numbers. ``build``, without leaves of its own, makes the tree of all of
    them, with which the function is called, and the batch.
    """

    has_aux = False

    def __call__(self, trained: Any, fixed: Any, build: Any, batch: Any) -> Any:
        def function(trained: Any) -> Any:
            arrays = [(trained if at in trained else fixed)[at] for at in range(len(build.func))]
            result = self.function(build.func(arrays), *batch)
            if not self.has_aux:
                return number(result, "; if the function returns (loss, aux), say has_aux=True")
            if not (isinstance(result, tuple) and len(result) == 2):
                raise ArgumentError(
                    "with has_aux the function returns (loss, aux), a tuple of two; got "
                    f"{type(result).__name__}"
                )
            return number(result[0]), result[1]

        return import_jax().value_and_grad(function, has_aux=self.has_aux)(trained)


class ValuedWithAux(Valued):
    """The same of a function that returns ``(loss, aux)``."""

    has_aux = True


class Ended(Pass):
    """A loss and its gradient with respect to the output of a model."""

    def __call__(self, y: Any, targets: Any) -> Any:
        def function(y: Any) -> Any:
            return number(self.function(y, *targets))

        value, dy = import_jax().value_and_grad(function, allow_int=True)(y)
        return value, _without_float0(dy)


def number(value: Any, of_tuples: str = "") -> Any:
    """Return a loss; raise ArgumentError if it is not a single real number.

    Args:
        value: what a function has returned.
        of_tuples: what the error says at its end where that is a tuple.
    """
    if isinstance(value, (int, float)):
        return float(value)  # it depends on nothing
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape != () or not import_jax().numpy.issubdtype(dtype, np.floating):
        found = type(value).__name__ if shape is None else f"an array of {shape} and {dtype}"
        raise ArgumentError(
            f"the loss must be a single real number, got {found}; sum it, or average it"
            f"{of_tuples if isinstance(value, tuple) else ''}"
        )
    return value


def _matching(dy: Any, kinds: Any) -> Any:
    """Return ``dy`` in the dtypes of the output, with zeros in the place of None.

    Raises ArgumentError if it is not nested or shaped like the output.
    """
    jax = import_jax()
    jnp = jax.numpy

    def one(kind: _ShapeDtype, leaf: Any) -> Any:
        if not jnp.issubdtype(kind.dtype, jnp.inexact):
            return np.zeros(kind.shape, jax.dtypes.float0)
        if leaf is None:
            return jnp.zeros(kind.shape, kind.dtype)
        if np.shape(leaf) != kind.shape:
            raise ArgumentError(
                f"the gradient of an output of shape {kind.shape} has shape {np.shape(leaf)}"
            )
        return jnp.asarray(leaf, kind.dtype)

    if dy is None:
        dy = jax.tree_util.tree_map(lambda kind: None, kinds)
    try:
        return jax.tree_util.tree_map(one, kinds, dy)
    except (ValueError, TypeError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"the gradient is not nested like the output: {error}") from error


def _without_float0(tree: Any) -> Any:
    """Put None where JAX has the gradient of integers, which is nothing."""
    jax = import_jax()

    return jax.tree_util.tree_map(
        lambda leaf: None if leaf.dtype == jax.dtypes.float0 else leaf, tree
    )
