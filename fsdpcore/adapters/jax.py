"""Functions written with JAX in place of hand-written passes; computed on the host.

``layer`` makes a function a unit of a ``LayerStack``, gathered for its own passes only::

    import jax.numpy as jnp
    from fsdpcore.adapters import jax as adapter

    def dense(params, x):
        return jnp.tanh(x @ params["w"] + params["b"])

    stack = fc.LayerStack([("a", adapter.layer(dense, start_a)), ("b", adapter.layer(...))])

``loss`` gives a stack's backward pass what it begins with. ``loss_and_grads`` is for a loss that is
one function of all parameters; ``fc.train_step`` gathers all units at once for it.

Parameters reach JAX without a copy where their alignment allows (see ``jax_host.py``), gradients
come back with one, into the engine's buffer. Functions are compiled by ``jax.jit`` once for every
shape; layers of one function share what is compiled, so name it once, outside of loops.

Arrays that go in decide what comes out: where inputs (``x``, ``dy``, ``y``) are NumPy's, so are
results, read-only, in JAX's memory; if any of them is JAX's, results are. All is there when a call
returns: nothing is computed in the background.

JAX has threads of its own, as many as the process may use cores, which ``blas_threads`` does not
limit. Where several ranks are processes of one host, give each its share of the cores by ``NPROC``
in the environment, which JAX reads when it starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, MutableMapping
from typing import Any, TypeVar

import numpy as np

from fsdpcore.adapters.jax_host import Lent, has_jax_arrays, to_numpy
from fsdpcore.adapters.jax_passes import (
    Backward,
    Ended,
    Forward,
    Pass,
    Taped,
    Untaped,
    Valued,
    ValuedWithAux,
    ordered,
)
from fsdpcore.adapters.layers import Initials, as_initials, initials, of_tree
from fsdpcore.adapters.trees import is_array, without_none
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_callable, as_int, kind_of
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.jax_host import import_jax, on_host
from fsdpcore.core.skeleton import Skeleton

__all__ = ["fold_in", "layer", "loss", "loss_and_grads"]

Key = TypeVar("Key", str, int)


def __dir__() -> list[str]:
    return __all__


def layer(
    function: Callable[[dict[str, Any], Any], Any],
    init: Initials | Callable[[np.random.Generator], Initials],
    *,
    recompute: bool = True,
    jit: bool = True,
) -> JaxLayer:
    """Make a ``Layer`` of a function.

    Args:
        function: ``function(params, x) -> y``, with parameters by name in a dict. ``x`` and ``y``
            are arrays, or trees of them, such as tuples. It must do the same whenever it is called:
            what is random belongs into ``x``, as a key of ``jax.random``.
        init: initial parameters by name (arrays may be JAX's), or what makes them from a NumPy
            generator. They may be nested, a module of Equinox for instance, and ``params`` are like
            that then. As always in an engine, an array that occurs in several layers is one
            parameter of all of them.
        recompute: the forward pass keeps ``x`` only, and the backward pass evaluates the function
            once more. False keeps what JAX needs of the evaluation: faster, and more memory from
            one pass to the other. Parameters and ``x`` are not part of that, but what was computed
            from a parameter alone, such as its transpose in another dtype, is. It works with every
            strategy.
        jit: compile. False runs the function operation by operation, to debug it.

    Returns:
        The layer, for a ``LayerStack``.

    Raises:
        ArgumentError: ``function`` or ``init`` is of another kind.
        MissingDependencyError: JAX is not installed.

    Example::

        from fsdpcore.adapters import jax as jax_adapter

        dense = jax_adapter.layer(lambda p, x: x @ p["w"], {"w": w})
    """
    return JaxLayer(function, init, recompute, jit)


class JaxLayer:
    """A function and its derivative, as ``layer`` describes it."""

    def __init__(
        self,
        function: Callable[[dict[str, Any], Any], Any],
        init: Initials | Callable[[np.random.Generator], Initials],
        recompute: bool,
        jit: bool,
    ) -> None:
        self._jax = import_jax()
        as_callable(function, "layer(function, init)", "params, x")
        as_initials(init)
        self._init = init
        self._recompute, self._jit = recompute, jit
        self._prepare(function)

    def _prepare(self, function: Callable[..., Any]) -> None:
        self._function = function
        passes = (Forward, Backward) if self._recompute else (Taped, Untaped)
        self._forward, self._backward = (
            _prepared(self._jax, each(function), self._jit) for each in passes
        )

    def init(self, rng: np.random.Generator) -> Initials:
        """Return the initial parameters by name."""
        found, function = of_tree(initials(self._init, rng), self._function)
        if function is not self._function:
            self._prepare(function)
        return {
            name: np.asarray(value) if isinstance(value, self._jax.Array) else value
            for name, value in found.items()
        }

    def forward(self, params: Mapping[str, Array], x: Any) -> tuple[Any, Any]:
        """Evaluate the function; the output does not lie in the memory of parameters.

        Raises:
            ArgumentError: a float64 parameter, while JAX computes with 32 bits.
            UnsupportedError: a parameter is on a GPU.
        """
        with Lent(OrderedDict(params), compiled=self._jit) as lent:
            found = lent.settled(self._forward(lent.arrays, x))
        y, tape = (found, None) if self._recompute else found
        return _like(self._jax, y, x), (tape, x)

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Any, grads: MutableMapping[str, Array]
    ) -> Any:
        """Write the gradients into ``grads`` and return that of ``x``, nested like it.

        Each is of the dtype of what it belongs to. Parameters that ``grads`` has no name for are
        left out. The gradient of integers and random keys is None; so may be ``dy``, or parts of
        it.

        Raises:
            ArgumentError: ``dy`` is not nested or shaped like the output; or as ``forward``.
            UnsupportedError: as ``forward``.
        """
        tape, x = saved
        trained, fixed = _split(self._jax, params, grads)
        kept = () if self._recompute else (tape,)
        with Lent((trained, fixed), compiled=self._jit) as lent:
            found = self._backward(*kept, *lent.arrays, ordered(params), x, dy)
            gradients, dx = lent.settled(found)
        for name, gradient in gradients.items():
            grads[name] = np.asarray(gradient)
        return _like(self._jax, dx, dy, x)


def loss_and_grads(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, jit: bool = True
) -> Callable[..., tuple[Any, Any]]:
    """Make of a loss what ``fc.train_step`` takes: ``(params, *batch) -> (loss, grads)``.

    Args:
        loss_fn: ``loss_fn(params, *batch)`` returns a number; ``params[unit][name]`` are arrays, in
            dicts; where the engine was made of a tree, ``params`` is nested like that, a module of
            Equinox for instance. What it is summed or averaged over has to go with the ``divisor``
            of the step. Its batch may be anything that ``jax.jit`` takes. Which parameters are
            frozen it cannot know: where many are, ``layer`` saves the computation of their
            gradients.
        has_aux: as of ``jax.value_and_grad``: ``loss_fn`` returns ``(loss, aux)``, with arrays in
            ``aux``, such as new running statistics. Then so does the step, ``(loss, aux)``, of this
            rank. What should be the same on all ranks is averaged by ``fc.all_reduce``.
        jit: compile.

    Returns:
        A function that returns a NumPy number, or ``(number, aux)`` with arrays of JAX if the batch
        has any and of NumPy otherwise; and gradients nested like ``params``: read-only NumPy arrays
        of the parameters' dtypes; left out of dicts, and None elsewhere, where there is none. It
        raises ArgumentError if the loss is no number or JAX would round float64 parameters, and
        UnsupportedError for arrays of a GPU.

    Raises:
        ArgumentError: ``loss_fn`` cannot be called.
        MissingDependencyError: JAX is not installed.

    Example::

        def loss_fn(params, x, y, key, stats):
            ...
            return loss, new_stats

        step = adapter.loss_and_grads(loss_fn, has_aux=True)
        key = adapter.fold_in(root, engine.steps, backend.rank)  # for each step and rank its own
        loss, stats = fc.train_step(engine, step, x, y, key, stats)

        def mean(own):  # a count, which all ranks have, stays
            own = np.asarray(own)
            return fc.all_reduce(own, backend, op="mean") if own.dtype.kind == "f" else own

        stats = jax.tree.map(mean, stats)
    """
    jax = import_jax()
    as_callable(loss_fn, "loss_and_grads(loss_fn)", "params, *batch")
    valued = _prepared(jax, (ValuedWithAux if has_aux else Valued)(loss_fn), jit)

    def compute(params: Any, *batch: Any) -> tuple[Any, Any]:
        skeleton = Skeleton(params, is_array)
        trained, fixed = _split(jax, dict(enumerate(skeleton.leaves)), range(len(skeleton)))
        skeleton.forget()
        build = jax.tree_util.Partial(skeleton)
        with Lent((trained, fixed), compiled=jit) as lent:
            value, found = lent.settled(valued(*lent.arrays, build, batch))
        grads = to_numpy(jax, found)
        value, *aux = value if has_aux else (value,)
        value = np.asarray(value)[()]
        result = (value, _like(jax, aux[0], batch)) if has_aux else value
        return result, without_none(skeleton([grads.get(at) for at in range(len(skeleton))]))

    return compute


def fold_in(key: Any, *numbers: int) -> Any:
    """Return a random key for each step and rank: ``fold_in(key, engine.steps, backend.rank)``.

    After a resume it is the same, and nothing of it has to be saved.

    Args:
        key: the job's, the same on all ranks.
        *numbers: folded into it by ``jax.random.fold_in``, one after the other. With the number of
            a row in place of the rank, ``jax.vmap`` over the rows, results do not depend on the
            number of ranks.

    Raises:
        ArgumentError: that is no key, or a number is not an integer in [0, 2**32).
        MissingDependencyError: JAX is not installed.

    Example::

        key = jax_adapter.fold_in(jax.random.key(0), engine.steps, backend.rank)
    """
    jax = import_jax()
    what = "fold_in(key, *numbers): a number"
    for number in numbers:
        given = isinstance(number, jax.Array) and jax.numpy.issubdtype(number.dtype, np.integer)
        folded = number if given else as_int(number, what, minimum=0, maximum=2**32 - 1)
        try:
            key = jax.random.fold_in(key, folded)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                "fold_in takes a key such as jax.random.key(0), and integers such as engine.steps; "
                f"got {kind_of(key)} and {kind_of(number)}: {error}"
            ) from error
    return key


def loss(loss_fn: Callable[..., Any], *, jit: bool = True) -> Callable[..., tuple[Any, Any]]:
    """Make of a loss what a backward pass begins with: ``(y, *targets) -> (loss, dy)``.

    Args:
        loss_fn: ``loss_fn(y, *targets)`` returns a number.
        jit: compile.

    Returns:
        A function that returns a NumPy number, and ``dy``, nested like ``y`` and of its dtypes. It
        raises ArgumentError if the loss is no number.

    Raises:
        ArgumentError: ``loss_fn`` cannot be called.
        MissingDependencyError: JAX is not installed.
    """
    jax = import_jax()
    as_callable(loss_fn, "loss(loss_fn)", "y, *targets")
    ended = _prepared(jax, Ended(loss_fn), jit)

    def compute(y: Any, *targets: Any) -> tuple[Any, Any]:
        with on_host(jax):
            value, dy = jax.block_until_ready(ended(y, targets))
        return np.asarray(value)[()], _like(jax, dy, y)

    return compute


def _prepared(jax: Any, computation: Pass, jit: bool) -> Any:
    return jax.jit(computation) if jit else computation


def _like(jax: Any, results: Any, *given: Any) -> Any:
    """Return results as arrays of JAX if any of what was given is, and of NumPy otherwise."""
    return results if has_jax_arrays(jax, given) else to_numpy(jax, results)


def _split(
    jax: Any, params: Mapping[Key, Array], wanted: Container[Key]
) -> tuple[OrderedDict[Key, Array], OrderedDict[Key, Array]]:
    """Return the parameters that have gradients, which are wanted, and the others."""
    trained: OrderedDict[Key, Array] = OrderedDict()
    fixed: OrderedDict[Key, Array] = OrderedDict()
    for name, array in params.items():
        varies = jax.numpy.issubdtype(array.dtype, jax.numpy.inexact)
        (trained if varies and name in wanted else fixed)[name] = array
    return trained, fixed
