"""Where a collective writes its result, and what to copy first if that overlaps its input."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.spec import Layout, Operation, Shape
from fsdpcore.core.buffers import DTYPES, Array
from fsdpcore.core.device import HOST, Device
from fsdpcore.core.errors import ArgumentError, MismatchError


class Output:
    """The result of a collective: the caller's array, or a new one.

    Attributes:
        flat: flat contiguous memory to communicate into; the result's own where that is contiguous.
    """

    __slots__ = ("_device", "_given", "_result", "_staged", "flat")

    def __init__(
        self,
        out: Array | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: Device = HOST,
    ) -> None:
        self._given = out
        self._device = device
        self._result = result = (
            device.empty(shape, dtype) if out is None else device.check_out(out, shape, dtype)
        )
        self._staged = not result.flags.c_contiguous
        if self._staged:
            self.flat = device.empty(result.size, dtype)
        else:
            self.flat = result if result.ndim == 1 else result.reshape(-1)

    @property
    def held(self) -> int:
        """Bytes that were allocated here, and that a queued operation therefore holds."""
        fresh = self._result.nbytes if self._given is None else 0
        return fresh + (self.flat.nbytes if self._staged else 0)

    def separate(self, source: Array, operation: Operation, layout: Layout, rank: int) -> Array:
        """Return flat ``source``, or a copy of it if it overlaps the result; see ``separated``."""
        if self._given is None:
            return source
        return separated(source, self.flat, operation, layout, rank, self._device)

    def deliver(self) -> Array:
        """Return the result array, filled."""
        if self._staged:
            np.copyto(self._result, self.flat.reshape(self._result.shape))
        return self._result


def check_unsized_out(
    out: object, device: Device, shape: Shape | None = None, dtype: np.dtype[Any] | None = None
) -> None:
    """Check as much of ``out`` as is known before the ranks have told each other their sizes.

    Args:
        out: what the caller passed, or None.
        device: where it must be.
        shape: of the result, but for axis 0; None if that is for another rank to tell.
        dtype: likewise.

    Raises:
        ArgumentError: no result could fit into it.
    """
    if out is None:
        return
    own = tuple(getattr(out, "shape", ()))
    wanted = own if shape is None else (own[:1] or (0,)) + shape[1:]
    found = device.check_out(out, wanted, getattr(out, "dtype", None) if dtype is None else dtype)
    if found.dtype not in DTYPES:
        raise ArgumentError(f"out has the dtype {found.dtype}, of which no array is sent")
    if not own:
        raise ArgumentError("out must have rows (axis 0), which a 0-d array does not have")


def sized_output(
    context: CollectiveContext,
    out: Array | None,
    shape: Shape,
    dtype: np.dtype[Any],
    device: Device,
) -> Output:
    """Return the ``Output`` of a result whose size the ranks have told each other in the call.

    Raises:
        MismatchError: ``out`` does not fit what the others send.
    """
    try:
        return Output(out, shape, dtype, device)
    except ArgumentError as error:
        raise MismatchError(
            f"{context.name}: what the ranks send does not fit into out of rank "
            f"{context.global_rank(context.rank)}: {error}. The sizes are known only inside of the "
            "call: pass no out, or agree on them before"
        ) from None


def separated(
    source: Array,
    out: Array,
    operation: Operation,
    layout: Layout,
    rank: int,
    device: Device = HOST,
) -> Array:
    """Return flat ``source`` as an algorithm may read it while it writes to flat ``out``.

    It may write to ``out`` before it has read all of ``source``. The one overlap that all
    algorithms allow is a rank's own part in place. Where the two are the same memory, the result
    is ``out`` itself; where they overlap in any other way, it is a copy.
    """
    if source is not out and not device.overlap(source, out):
        return source
    parts = operation.own_parts(layout, rank)
    if parts is None:
        return source.copy()
    if source is out:
        return out
    part, place = source[parts[0]], out[parts[1]]
    if device.address(part) == device.address(place) and part.nbytes == place.nbytes:
        return out if source.nbytes == out.nbytes else source
    return source.copy()
