"""From a device to the host's memory: many copies are enqueued, then waited for once."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

from fsdpcore.checkpoint.format.metadata import BLOCK_BYTES
from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.device import Device, Ticket
from fsdpcore.core.errors import CheckpointError

WINDOW_BYTES = 128 * BLOCK_BYTES
"""Of the memory by way of which arrays are written to files; whole blocks of checksums."""

_ALIGNMENT = 64
_PATIENCE = 3600.0
"""Seconds for all that was enqueued before, in which collectives have a timeout of their own."""


def aligned(nbytes: int) -> int:
    """Return the bytes that an array takes beside others."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def fetch(pairs: Sequence[tuple[Array, Array]], device: Device) -> None:
    """Fill arrays of the host with what is on a device; blocks.

    The values are those after everything that this thread has enqueued so far.

    Args:
        pairs: C-contiguous arrays of the host, and of each the one of the device, of the same shape
            and dtype, to be copied.
        device: where these are.

    Raises:
        CheckpointError: the device has not come to it for an hour.
    """
    if not pairs:
        return
    with device.background() as copied:
        for target, source in pairs:
            device.fetch(target, source)
    if not copied.block(_PATIENCE):
        # The device may come to it yet, when others have long been given this memory.
        held = (copied, tuple(pairs))
        threading.Thread(target=_hold, args=held, name="fsdpcore-held", daemon=True).start()
        raise CheckpointError(
            f"{device} has not come to the arrays to be saved for {_PATIENCE:g} s: it is busy with "
            "what was enqueued before, or hangs"
        )


def _hold(copied: Ticket, held: object) -> None:
    """Keep what is copied until it is; whatever error ends that, nothing is copied after it."""
    with contextlib.suppress(Exception):
        copied.block(math.inf)


def fetched(arrays: Sequence[Array], device: Device) -> Iterator[Sequence[Array]]:
    """Give arrays in the host's memory, some at a time; blocks.

    Those of a device come by way of one window of memory, flat, and in parts if they are large: of
    whole blocks of checksums, all but the last one of an array. One that is not C-contiguous is
    copied on the device before.

    Yields:
        The next arrays, or parts of one. They are overwritten when more are asked for.

    Raises:
        CheckpointError: as ``fetch``.
    """
    if all(map(on_host, arrays)):
        yield arrays
        return
    memory = device.page_locked(WINDOW_BYTES)
    given: list[Array] = []
    pairs: list[tuple[Array, Array]] = []
    used = 0
    for array in arrays:
        if on_host(array):
            given.append(array)
            continue
        flat = device.xp.ascontiguousarray(array).reshape(-1)
        step = WINDOW_BYTES // flat.itemsize
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            if used + part.nbytes > WINDOW_BYTES:
                fetch(pairs, device)
                yield given
                given, pairs, used = [], [], 0
            room = memory[used : used + part.nbytes].view(part.dtype)
            pairs.append((room, part))
            given.append(room)
            used += aligned(part.nbytes)
    fetch(pairs, device)
    yield given
