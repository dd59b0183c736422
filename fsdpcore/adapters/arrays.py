"""Models that are written with arrays of another library: PyTorch, JAX, or one of the array API.

``function`` and ``layer`` show such a model the engine's parameters as arrays of its library, and
the engine the gradients as NumPy's. On the host memory is shared, by DLPack, wherever both sides
can; what they cannot share is copied::

    import torch

    def loss_and_grads(params, x, wanted):  # of tensors
        w = params["linear"]["w"].requires_grad_()
        loss = ((x @ w - wanted) ** 2).sum()
        loss.backward()
        return loss, {"linear": {"w": w.grad}}

    fc.train_step(engine, arrays.function(loss_and_grads, torch), x, wanted)

The engine's arrays are read-only, which most libraries do not know: a parameter must not be written
there either, nor be read after the call. Rounding, threads and random numbers are the library's.
On a GPU the engine's arrays are CuPy's, and this module is of no use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from fsdpcore.adapters.function import loss_and_found
from fsdpcore.adapters.layers import Initials, Layer
from fsdpcore.adapters.trees import detached_from, is_array, leaves, map_leaves
from fsdpcore.core.buffers import BFLOAT16, Array
from fsdpcore.core.checks import as_callable
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.foreign import REFUSED, as_numpy, detached, is_foreign

__all__ = ["from_numpy", "function", "layer", "to_numpy"]


def __dir__() -> list[str]:
    return __all__


def from_numpy(array: Array, xp: Any) -> Any:
    """Return a NumPy array as one of another library.

    Args:
        array: of a dtype that the library has. It is shared where the library can share it, also
            if it is read-only, and then must not be written through what is returned.
        xp: the library's module: ``torch``, ``jax.numpy``, ``array_api_strict``, or another one
            with ``from_dlpack`` or ``asarray``.

    Returns:
        The array of that library.

    Raises:
        ArgumentError: it is no NumPy array, or the library has no such arrays.

    Example::

        t = arrays.from_numpy(np.ones(3), torch)
    """
    if not isinstance(array, np.ndarray):
        raise ArgumentError(
            f"from_numpy takes arrays of NumPy, got {type(array).__name__}; an engine on a GPU "
            "computes with CuPy's"
        )
    if xp is np:
        return array
    if any(step < 0 for step in array.strides):
        array = array.copy()  # consumers of DLPack differ in what they do: PyTorch aborts
    problem: Exception | None = None
    for way in (_shared, _aliased, _copied):
        try:
            return way(array, xp)
        except REFUSED as error:
            problem = error
    name = getattr(xp, "__name__", repr(xp))
    raise ArgumentError(
        f"{name} makes no array of a NumPy array of dtype {array.dtype} and shape {array.shape}: "
        f"{problem}"
    )


def _shared(array: Array, xp: Any) -> Any:
    if array.dtype == BFLOAT16:  # which NumPy does not export
        return xp.from_dlpack(array.view(np.uint16)).view(xp.bfloat16)
    return xp.from_dlpack(array)


def _aliased(array: Array, xp: Any) -> Any:
    """Share an array that is read-only with a library that takes none of those."""
    if array.flags.writeable:
        raise BufferError(f"{array.dtype} is not shared")
    return _shared(np.asarray(_Writable(array)).view(array.dtype), xp)


def _copied(array: Array, xp: Any) -> Any:
    return xp.asarray(array.copy())


class _Writable:
    """The memory of a read-only array, said to be writable."""

    def __init__(self, array: Array) -> None:
        self._array = array  # whose memory stays for as long as this is there
        bits = array.view(np.uint16) if array.dtype == BFLOAT16 else array
        interface = dict(bits.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def to_numpy(array: Any) -> Array:
    """Return an array of any library as a NumPy array; waits until it is computed.

    It shares memory where the array is in that of the host, and is a copy of one on a GPU.

    Args:
        array: of any library with DLPack or the buffer protocol.

    Returns:
        The array of NumPy.

    Raises:
        ArgumentError: it is no array, or cannot be taken over.

    Example::

        from fsdpcore.adapters import arrays

        x = arrays.to_numpy(torch.ones(3))
    """
    if is_foreign(array):
        array = detached(array)
        if hasattr(array, "__cuda_array_interface__"):
            fetch = getattr(array, "get", None) or getattr(array, "cpu", None)  # CuPy's, PyTorch's
            array = array if fetch is None else fetch()
    return as_numpy(array, "what was computed")


def function(
    loss_and_grads: Callable[..., tuple[Any, Any]], xp: Any
) -> Callable[..., tuple[Any, Any]]:
    """Return a function of the whole model for ``train_step``, made of one with other arrays.

    Args:
        loss_and_grads: as ``train_step`` takes it, but for its arrays: parameters are given to it
            as arrays of ``xp``, and so are the NumPy arrays of the batch, also inside of tuples,
            lists and dictionaries. It returns gradients of that library; None counts as zeros. The
            loss comes back from ``train_step`` as a NumPy number where it was an array. Parameters
            and gradients are nested like the tree that the engine was made of, if it was.
        xp: as of ``from_numpy``.

    Returns:
        A function for ``fc.train_step``.

    Raises:
        ArgumentError: the first is no function, or the second no such module.

    Example::

        loss = fc.train_step(engine, arrays.function(loss_and_grads, torch), x, y)
    """
    as_callable(loss_and_grads, "arrays.function(loss_and_grads, xp)", "params, *batch")
    _check_library(xp, "arrays.function(loss_and_grads, xp)")

    def of_numpy(params: Any, *batch: Any) -> tuple[Any, Any]:
        found = loss_and_grads(_to_theirs(params, xp), *_to_theirs(batch, xp))
        loss, grads = loss_and_found(found, nested=True)
        grads = map_leaves(lambda each: to_numpy(each) if is_foreign(each) else each, grads)
        arrays = filter(is_array, leaves(params))
        loss = _to_ours(loss, arrays)
        return loss[()] if isinstance(loss, np.ndarray) else loss, grads

    return of_numpy


def layer(layer: Layer, xp: Any) -> Layer:
    """Return a layer for a ``LayerStack``, made of one that computes with arrays of ``xp``.

    Parameters, inputs and gradients of outputs are given to it as arrays of ``xp``, what it returns
    is taken over as NumPy's; so layers of several libraries can follow each other. Inputs and
    outputs may be tuples, lists and dictionaries of arrays. ``init`` may return arrays of either.
    In ``backward`` a gradient is given as ``grads[name] = array``, or written in place where the
    library can write to memory that it shares.

    Args:
        layer: as ``Layer``, but for its arrays. ``holds_params`` is taken over.
        xp: as of ``from_numpy``.

    Raises:
        ArgumentError: the first has no such methods, or the second is no such module.
    """
    missing = [name for name in ("init", "forward", "backward") if not hasattr(layer, name)]
    if missing:
        raise ArgumentError(
            "arrays.layer(layer, xp) needs an object with init, forward and backward; a "
            f"{type(layer).__name__} has no {missing[0]}"
        )
    _check_library(xp, "arrays.layer(layer, xp)")
    return _LayerOf(layer, xp)


class _LayerOf:
    """See ``layer``."""

    def __init__(self, inner: Layer, xp: Any) -> None:
        self._inner = inner
        self._xp = xp
        self.holds_params = bool(getattr(inner, "holds_params", False))

    def init(self, rng: np.random.Generator) -> Initials:
        return {
            name: to_numpy(value) if is_foreign(value) else value
            for name, value in self._inner.init(rng).items()
        }

    def forward(self, params: Mapping[str, Array], x: Any) -> tuple[Any, Any]:
        y, saved = self._inner.forward(_given(params, self._xp), _to_theirs(x, self._xp))
        for each in leaves(saved):
            _await(each)
        return _to_ours(y, params.values()), saved

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Any, grads: MutableMapping[str, Array]
    ) -> Any:
        theirs = _given(params, self._xp), saved, _to_theirs(dy, self._xp)
        dx = self._inner.backward(*theirs, _TheirGradients(grads, self._xp))
        return _to_ours(dx, (*params.values(), *(grads[name] for name in grads)))


class _TheirGradients(MutableMapping[str, Any]):
    """A unit's gradients, as a layer with other arrays writes them."""

    def __init__(self, grads: MutableMapping[str, Array], xp: Any) -> None:
        self._grads = grads
        self._xp = xp

    def __getitem__(self, name: str) -> Any:
        ours = self._grads[name]
        theirs = from_numpy(ours, self._xp)
        if ours.size and not np.shares_memory(to_numpy(theirs), ours):
            raise ArgumentError(
                f"the gradient of {name!r} cannot be written in place, as {self._xp.__name__} does "
                f"not share its memory; assign it: grads[{name!r}] = array"
            )
        return theirs

    def __setitem__(self, name: str, value: Any) -> None:
        self._grads[name] = to_numpy(value)

    def __delitem__(self, name: str) -> None:
        del self._grads[name]

    def __contains__(self, name: object) -> bool:
        return name in self._grads

    def __iter__(self) -> Iterator[str]:
        return iter(self._grads)

    def __len__(self) -> int:
        return len(self._grads)


def _check_library(xp: Any, where: str) -> None:
    if not (hasattr(xp, "from_dlpack") or hasattr(xp, "asarray")):
        raise ArgumentError(
            f"{where} needs a library's module, such as torch or jax.numpy, got "
            f"{getattr(xp, '__name__', type(xp).__name__)}"
        )


def _given(params: Mapping[str, Array], xp: Any) -> dict[str, Any]:
    return {name: from_numpy(array, xp) for name, array in params.items()}


def _to_theirs(value: Any, xp: Any) -> Any:
    """Convert the NumPy arrays of a value."""
    return map_leaves(
        lambda each: from_numpy(each, xp) if isinstance(each, np.ndarray) else each, value
    )


def _to_ours(value: Any, lent: Iterable[Array]) -> Any:
    """Convert the arrays of a value; those that lie in memory that was lent only are copied."""
    ours = map_leaves(lambda each: to_numpy(each) if is_foreign(each) else each, value)
    return detached_from(ours, lent)


def _await(value: Any) -> None:
    """Wait for what JAX computes in the background, maybe from parameters that are freed now."""
    wait = getattr(value, "block_until_ready", None)
    if callable(wait):
        wait()
