"""Gathered parameters for JAX on the host, without a copy where that is possible.

JAX computes on a NumPy array where it lies if the array begins at a multiple of 64 bytes, and on a
copy otherwise. The engine's parameters are read-only, which JAX's ``from_dlpack`` refuses; what it
does with arrays of NumPy, as arguments of a compiled function or by ``device_put``, comes to the
same. Buffers in memory that ranks share begin at such a multiple, and so do in each unit all
parameters whose predecessors have together a multiple of 64 bytes.

The memory of parameters is used for something else after a pass. So all that was computed is waited
for, nothing that is returned lies in it, and the arrays that show it to JAX are deleted.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import numpy as np

from fsdpcore.core.array_module import address
from fsdpcore.core.errors import UnsupportedError
from fsdpcore.core.foreign import is_random_key, refuse_traced
from fsdpcore.core.jax_host import check_width, import_jax, on_host


class Lent:
    """Gathered parameters as arguments for JAX, within a ``with`` block.

    Args:
        params: a tree of NumPy arrays.
        compiled: they are for compiled functions, which take them as they are. Otherwise they are
            made arrays of JAX, which cannot be used any more after the block.

    Attributes:
        arrays: what to pass, nested like ``params``.

    Raises:
        ArgumentError: JAX would round them to a narrower dtype.
        UnsupportedError: an array of a GPU.
    """

    def __init__(self, params: Any, *, compiled: bool) -> None:
        self._jax = import_jax()
        self.arrays: Any = params
        self._leaves = self._jax.tree_util.tree_leaves(params)
        for leaf in self._leaves:
            _check(self._jax, leaf)
        self._compiled = compiled
        self._made: list[Any] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Lent:
        self._stack.enter_context(on_host(self._jax))
        if not self._compiled:
            device = self._jax.local_devices(backend="cpu")[0]
            self.arrays = self._jax.device_put(self.arrays, device, may_alias=True)
            self._made = self._jax.tree_util.tree_leaves(self.arrays)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for array in self._made:
            array.delete()
        self._made, self.arrays, self._leaves = [], None, []
        self._stack.close()

    def settled(self, results: Any) -> Any:
        """Return results once they are there, with copies of those that lie in the parameters."""
        # Also in what was made of them, as the function may return that itself.
        places = [(address(leaf), leaf.nbytes) for leaf in self._leaves]
        places += [_place(array) for array in self._made]
        spans = [(start, start + nbytes) for start, nbytes in places]

        def apart(leaf: Any) -> Any:
            start, nbytes = _place(leaf)
            if any(start < stop and first < start + nbytes for first, stop in spans):
                return leaf.copy()
            return leaf

        tree = self._jax.tree_util
        return self._jax.block_until_ready(
            tree.tree_map(apart, self._jax.block_until_ready(results))
        )


def has_jax_arrays(jax: Any, tree: Any) -> bool:
    """Whether any array in a tree is JAX's."""
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(tree))


def to_numpy(jax: Any, tree: Any) -> Any:
    """Return a tree with NumPy's arrays, read-only, which share memory with JAX's.

    Random keys stay what they are.
    """

    def one(leaf: Any) -> Any:
        if is_random_key(leaf):
            return leaf
        refuse_traced(leaf)
        return np.asarray(leaf)

    return jax.tree_util.tree_map(one, tree)


def _check(jax: Any, leaf: Any) -> None:
    if not isinstance(leaf, np.ndarray):
        raise UnsupportedError(
            "this adapter computes on the host, and got a parameter that is no NumPy array: "
            f"{type(leaf).__module__}.{type(leaf).__qualname__}; choose a transport whose ranks "
            "compute on the host, such as sim, zmq or mpi"
        )
    check_width(jax, leaf.dtype)


def _place(leaf: Any) -> tuple[int, int]:
    """From where on, and how many bytes, an array takes on the host; zeros if unknown."""
    if isinstance(leaf, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(leaf)
        return low, high - low
    try:
        return leaf.unsafe_buffer_pointer(), leaf.nbytes
    except Exception:  # a number, a random key, an array on several devices: never a parameter
        return 0, 0
