"""The record of one evaluation of a function of HIPS autograd, from which its gradients follow.

Made of autograd's nodes and rules of differentiation, but not of ``autograd.core.make_vjp``:

- Every array is a root of its own. As one nested dict, they would first be zeros as large as all of
  them together, to which each gradient is added.
- autograd tells nested differentiations apart by counting how many are open, in the whole process.
  Where ranks are threads they would disturb each other's count; so ours does not take part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fsdpcore.adapters.trees import leaves, map_leaves
from fsdpcore.core.buffers import BFLOAT16, Array
from fsdpcore.core.errors import ArgumentError, MissingDependencyError, StateError, UnsupportedError

# Of two differentiations the one with the larger number is the inner one. autograd counts from 0,
# and takes -1 for none: so what the function differentiates by itself lies inside of ours.
_LEVEL = -0.5


def check_installed() -> None:
    """Raise MissingDependencyError unless autograd is installed."""
    try:
        import autograd.numpy  # noqa: F401
    except ImportError as error:
        install = "pip install -e '.[autograd]'"
        raise MissingDependencyError(
            f"this adapter needs HIPS autograd; in the checkout of fsdpcore: {install}", install
        ) from error


def is_variable(leaf: Any) -> bool:
    """Whether it is an array with a gradient: of floating-point or complex numbers."""
    return isinstance(leaf, np.ndarray) and (leaf.dtype.kind in "fc" or leaf.dtype == BFLOAT16)


def check_not_gpu(leaf: Any) -> None:
    """Raise UnsupportedError for an array of a GPU, with which autograd cannot compute."""
    if not isinstance(leaf, np.ndarray) and hasattr(leaf, "__cuda_array_interface__"):
        raise UnsupportedError(
            "autograd computes with NumPy, and got an array of a GPU; choose a transport whose "
            "ranks compute on the host, such as sim, zmq or mpi"
        )


class Tape:
    """Calls ``function(*args)`` and records what is done with the arrays in ``args``.

    It holds all of them, and what was computed on the way, until the gradients are taken.

    Args:
        function: written with ``autograd.numpy``.
        args: nested mappings (which the function gets as dicts), tuples and lists of arrays. What
            is no array, or of integers, is passed on as it is.

    Attributes:
        value: what the function has returned; an array, or nested like ``args``.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        from autograd.core import VJPNode
        from autograd.tracer import new_box

        def boxed(leaf: Any) -> tuple[Any, Any]:
            check_not_gpu(leaf)
            if not is_variable(leaf):
                return leaf, None
            node = VJPNode.new_root()
            return new_box(np.asarray(leaf), _LEVEL, node), node  # not one of a derived class

        pairs = map_leaves(lambda leaf: _Pair(*boxed(leaf)), args)
        self._roots: Any = map_leaves(lambda pair: pair.node, pairs)
        returned = function(*map_leaves(lambda pair: pair.value, pairs))
        ends = [_opened(leaf) for leaf in leaves(returned)]
        self._ends: list[_Pair] | None = ends
        values = iter(ends)
        self.value: Any = map_leaves(lambda leaf: next(values).value, returned)

    def gradients(self, d_value: Any) -> tuple[Any, ...]:
        """Return the gradients of ``args``, nested alike, and forget all that was recorded.

        Args:
            d_value: gradients of ``value``, nested alike; None where there is none.

        Returns:
            For each argument arrays in the shape of its arrays, maybe of a wider dtype, some of
            them read-only; None for what does not lead to the value, or has no gradient.

        Raises:
            ArgumentError: a gradient of another shape than its value.
            StateError: they were taken before.
        """
        if self._ends is None:
            raise StateError("the gradients of an evaluation are taken once; evaluate it again")
        given = [None] * len(self._ends) if d_value is None else list(leaves(d_value))
        if len(given) != len(self._ends):
            raise ArgumentError(
                f"the function has returned {len(self._ends)} values, and got gradients of "
                f"{len(given)}; None stands for one that does not matter"
            )
        seeds = [(e.node, _seed(e.value, d)) for e, d in zip(self._ends, given, strict=True)]
        self._ends = None
        found = _pull_back([(node, d) for node, d in seeds if node is not None and d is not None])
        result: tuple[Any, ...] = map_leaves(found.get, self._roots)
        return result


class _Pair:
    """A value and the node that it comes from, or None; no tuple, which would be gone into."""

    __slots__ = ("node", "value")

    def __init__(self, value: Any, node: Any) -> None:
        self.value = value
        self.node = node


class _End:
    """A node behind several others, so that one walk begins at all of them."""

    __slots__ = ("parents", "vjp")

    def __init__(self, seeds: list[tuple[Any, Array]]) -> None:
        self.parents = [node for node, _ in seeds]
        self.vjp: Any = lambda _: [gradient for _, gradient in seeds]


def _opened(leaf: Any) -> _Pair:
    """Return what a function has returned, and its node."""
    from autograd.tracer import isbox

    if not isbox(leaf):
        return _Pair(leaf, None)
    if isinstance(leaf._value, (Mapping, tuple, list)):
        raise ArgumentError(
            f"the function returned autograd's {type(leaf).__name__}; return its elements in a "
            "plain tuple instead"
        )
    return _Pair(leaf._value, leaf._node)


def _seed(value: Any, gradient: Any) -> Array | None:
    """Return the gradient of a value in its dtype; None without one."""
    if gradient is None:
        return None
    value, given = np.asarray(value), np.asarray(gradient)
    if given.shape != value.shape:
        raise ArgumentError(
            f"the gradient of an output of shape {value.shape} must have that shape, got "
            f"{given.shape}"
        )
    seed: Array = given.astype(value.dtype, copy=False)
    return seed


def _pull_back(seeds: list[tuple[Any, Array]]) -> dict[Any, Array]:
    """Return the gradient at every root that leads to these nodes; uses them up."""
    from autograd.core import add_outgrads
    from autograd.util import toposort

    last = _End(seeds)
    pending: dict[Any, tuple[Any, bool]] = {last: (None, False)}
    roots = {}
    for node in toposort(last):
        gradient, _ = pending.pop(node)
        if node.parents:
            for parent, part in zip(node.parents, node.vjp(gradient), strict=True):
                pending[parent] = add_outgrads(pending.get(parent), part)
            node.vjp = None  # and what it keeps of the evaluation, before the walk is over
        elif node is not last:
            roots[node] = gradient
    return roots
