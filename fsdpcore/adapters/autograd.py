"""Functions written with HIPS autograd (``autograd.numpy``) in place of hand-written passes.

``layer`` makes a function a unit of a ``LayerStack``, gathered for its own passes only::

    import autograd.numpy as np
    from fsdpcore.adapters import autograd

    def dense(params, x):
        return np.tanh(x @ params["w"] + params["b"])

    stack = fc.LayerStack([("a", autograd.layer(dense, start_a)), ("b", autograd.layer(...))])

``loss`` gives a stack's backward pass what it begins with. ``loss_and_grads`` is for a loss that is
one function of all parameters; ``fc.train_step`` gathers all units at once for it.

Everything is computed on the host, with NumPy. Functions must not write to what they are given, as
always with autograd. They may differentiate inside; but autograd counts nested differentiations for
the whole process, so that a function which nests two or more of its own needs ranks that are
processes (``zmq``, ``mpi``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np

from fsdpcore.adapters.autograd_tape import Tape, check_installed, check_not_gpu, is_variable
from fsdpcore.adapters.layers import Initials, as_initials, initials, of_tree
from fsdpcore.adapters.trees import detached_from, is_array, leaves, map_leaves, without_none
from fsdpcore.core.array_module import address
from fsdpcore.core.buffers import BFLOAT16, Array
from fsdpcore.core.checks import as_callable
from fsdpcore.core.errors import ArgumentError, StateError

__all__ = ["layer", "loss", "loss_and_grads"]


def __dir__() -> list[str]:
    return __all__


def layer(
    function: Callable[[dict[str, Array], Any], Any],
    init: Initials | Callable[[np.random.Generator], Initials],
    *,
    recompute: bool = True,
) -> AutogradLayer:
    """Make a ``Layer`` of a function.

    Args:
        function: ``function(params, x) -> y``, with parameters by name in a dict. ``x`` and ``y``
            are arrays, or nested tuples, lists and mappings of arrays. With ``recompute`` it is
            called in either pass and must do the same in both: what is random belongs into ``x``.
        init: initial parameters by name, or what makes them from a NumPy generator; they may be
            nested, and ``params`` are like that then. Layers that are
            given the same arrays share them: they are tied.
        recompute: the forward pass keeps ``x`` only, and the backward pass evaluates the function
            once more, under the parameters that are gathered for it. False keeps the record of the
            evaluation, with all that was computed and the gathered parameters: faster, and only
            where parameters stay gathered between the passes (``Step.keeps_params``).

    Raises:
        ArgumentError: ``function`` or ``init`` is of another kind.
        MissingDependencyError: autograd is not installed.
    """
    return AutogradLayer(function, init, recompute)


class AutogradLayer:
    """A function and its derivative, as ``layer`` describes it.

    Attributes:
        holds_params: what ``forward`` keeps refers to the parameters, which have to stay where they
            are until ``backward``.
    """

    def __init__(
        self,
        function: Callable[[dict[str, Array], Any], Any],
        init: Initials | Callable[[np.random.Generator], Initials],
        recompute: bool,
    ) -> None:
        check_installed()
        as_callable(function, "layer(function, init)", "params, x")
        as_initials(init)
        self._function: Callable[..., Any] = function
        self._init = init
        self.holds_params = not recompute

    def init(self, rng: np.random.Generator) -> Initials:
        """Return the initial parameters by name."""
        found, self._function = of_tree(initials(self._init, rng), self._function)
        return found

    def forward(self, params: Mapping[str, Array], x: Any) -> tuple[Any, Any]:
        """Evaluate the function; the output belongs to the caller, though it may be ``x``.

        Raises UnsupportedError for arrays of a GPU.
        """
        given = dict(params)
        if self.holds_params:
            tape = Tape(self._function, given, x)
            return detached_from(tape.value, given.values()), (tape, given, x)
        for leaf in leaves((given, x)):
            check_not_gpu(leaf)
        return detached_from(self._function(given, x), given.values()), x

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Any, grads: MutableMapping[str, Array]
    ) -> Any:
        """Write the gradients into ``grads`` and return that of ``x``, nested like it.

        Each is of the dtype of what it belongs to. Parameters that ``grads`` has no name for are
        left out. The gradient of integers is None; so may be ``dy``, or parts of it.

        Raises:
            ArgumentError: ``dy`` is not nested or shaped like the output.
            StateError: without ``recompute``: the parameters are not where they were in the
                forward pass, or ``saved`` was used before.
        """
        if self.holds_params:
            tape, given, x = saved
            _check_in_place(given, params)
        else:
            given, x = dict(params), saved
            function = self._function
            trained = {name: array for name, array in given.items() if name in grads}
            tape = Tape(lambda some, x: function({**given, **some}, x), trained, x)
        d_params, dx = tape.gradients(dy)
        for name, gradient in d_params.items():
            if gradient is not None and name in grads:
                grads[name] = np.asarray(gradient, given[name].dtype)
        return detached_from(_like(x, dx), given.values())


def loss_and_grads(
    loss_fn: Callable[..., Any],
) -> Callable[..., tuple[Any, Any]]:
    """Make of a loss what ``fc.train_step`` takes: ``(params, *batch) -> (loss, grads)``.

    Args:
        loss_fn: ``loss_fn(params, *batch)`` returns a number; ``params[unit][name]`` are arrays, in
            dicts, or in the tree that the engine was made of. What it is summed or averaged over
            has to go with the ``divisor`` of the step.

    Returns:
        A function whose gradients are nested like ``params`` and of their dtypes; zeros where the
        loss does not depend on a parameter, and none of integers. It raises ArgumentError if the
        loss is no number, and UnsupportedError for arrays of a GPU.

    Raises:
        ArgumentError: ``loss_fn`` cannot be called.
        MissingDependencyError: autograd is not installed.

    Example::

        from fsdpcore.adapters import autograd

        loss = fc.train_step(engine, autograd.loss_and_grads(loss_fn), x, y)
    """
    check_installed()
    as_callable(loss_fn, "loss_and_grads(loss_fn)", "params, *batch")

    def compute(params: Any, *batch: Any) -> tuple[Any, Any]:
        tape = Tape(lambda given: loss_fn(given, *batch), params)
        (grads,) = tape.gradients(_one(tape.value))
        lent = filter(is_array, leaves(params))
        return detached_from(tape.value, lent), without_none(_like(params, grads))

    return compute


def loss(loss_fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Make of a loss what a backward pass begins with: ``(y, *targets) -> (loss, dy)``.

    Args:
        loss_fn: ``loss_fn(y, *targets)`` returns a number.

    Returns:
        A function whose ``dy`` is nested like ``y`` and of its dtypes. It raises ArgumentError if
        the loss is no number.

    Raises:
        ArgumentError: ``loss_fn`` cannot be called.
        MissingDependencyError: autograd is not installed.
    """
    check_installed()
    as_callable(loss_fn, "loss(loss_fn)", "y, *targets")

    def compute(y: Any, *targets: Any) -> tuple[Any, Any]:
        tape = Tape(lambda y: loss_fn(y, *targets), y)
        (dy,) = tape.gradients(_one(tape.value))
        return tape.value, _like(y, dy)

    return compute


def _check_in_place(given: Mapping[str, Array], params: Mapping[str, Array]) -> None:
    """Raise StateError unless ``params`` lie where ``given`` did, so that these show them, too."""
    moved = [name for name, array in given.items() if address(array) != address(params[name])]
    if moved:
        raise StateError(
            f"parameters {moved} were freed after the forward pass, whose record refers to them; "
            "make the layer with recompute=True, or choose a strategy that keeps them gathered, "
            'such as fc.Strategy("full_shard", reshard_after_forward=False)'
        )


def _one(value: Any) -> Array:
    """Return the gradient of a loss by itself; raise ArgumentError if it is no real number."""
    nested = isinstance(value, (Mapping, tuple, list))
    if nested or np.shape(value) != () or not _is_real(np.asarray(value).dtype):
        kind = f"an array of shape {np.shape(value)}" if hasattr(value, "shape") else repr(value)
        raise ArgumentError(f"the loss must be a single number, got {kind}; sum it, or average it")
    return np.ones(())


def _is_real(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fiu" or dtype == BFLOAT16


def _like(tree: Any, gradients: Any) -> Any:
    """Give gradients the dtypes of what they belong to; zeros where nothing depends on that."""
    found = leaves(gradients)

    def one(leaf: Any) -> Any:
        gradient = next(found)
        if gradient is not None:
            return np.asarray(gradient, leaf.dtype)
        return np.zeros(leaf.shape, leaf.dtype) if is_variable(leaf) else None

    return map_leaves(one, tree)
