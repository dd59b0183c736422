"""What NCCL's calls do to memory, once they have met.

Sums are made in the order of the ranks from the last to the first, in the dtype of the data and
rounded after each: one of the orders that NCCL may choose, and none that the library's own
algorithms have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from support.fake_cuda.nccl_match import Call

Host = NDArray[Any]
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
SUM, PROD, MAX, MIN, AVG = range(5)
DTYPES: dict[int, np.dtype[Any]] = {
    INT8: np.dtype(np.int8),
    UINT8: np.dtype(np.uint8),
    INT32: np.dtype(np.int32),
    UINT32: np.dtype(np.uint32),
    INT64: np.dtype(np.int64),
    UINT64: np.dtype(np.uint64),
    FLOAT16: np.dtype(np.float16),
    FLOAT32: np.dtype(np.float32),
    FLOAT64: np.dtype(np.float64),
    BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_COMBINE: dict[int, Any] = {
    SUM: np.add,
    PROD: np.multiply,
    MAX: np.maximum,
    MIN: np.minimum,
    AVG: np.add,
}


def _reduced(parts: Sequence[Host], op: int) -> Host:
    # Floats are scaled before they are added, as NCCL does for averages.
    floats = parts[0].dtype.kind in "fV"
    if op == AVG and floats:
        scale = np.ones((), parts[0].dtype) / np.asarray(len(parts), parts[0].dtype)
        parts = [part * scale for part in parts]
    total = parts[-1].copy()
    for part in parts[-2::-1]:
        total = _COMBINE[op](total, part).astype(total.dtype)
    if op == AVG and not floats:
        total //= len(parts)
    return total


def _sent(calls: Sequence[Call]) -> list[Host]:
    """What all send, before anybody receives."""
    return [call.send.copy() for call in calls if call.send is not None]


def _all_reduce(calls: Sequence[Call]) -> None:
    total = _reduced(_sent(calls), calls[0].op)
    for call in calls:
        np.copyto(call.receive, total)


def _reduce(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    np.copyto(root.receive, _reduced(_sent(calls), root.op))


def broadcast_at_root(root: Call) -> None:
    """The part of a broadcast's root: from then on its memory is the caller's again."""
    assert root.send is not None
    root.send = root.send.copy()
    np.copyto(root.receive, root.send)
    root.receive = None


def _broadcast(calls: Sequence[Call]) -> None:
    sent = calls[calls[0].root].send
    for call in calls:
        if call.receive is not None:
            np.copyto(call.receive, sent)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    parts = _sent(calls)
    for call, part in zip(calls, np.split(_reduced(parts, calls[0].op), len(calls)), strict=True):
        np.copyto(call.receive, part)


def _all_gather(calls: Sequence[Call]) -> None:
    whole = np.concatenate(_sent(calls))
    for call in calls:
        np.copyto(call.receive, whole)


def transfer(send: Call, receive: Call) -> None:
    """What a send does."""
    np.copyto(receive.receive, send.send)


BROADCASTS = ("broadcast", "bcast")
MOVES: dict[str, Callable[[Sequence[Call]], None]] = {
    "allReduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "bcast": _broadcast,
    "reduceScatter": _reduce_scatter,
    "allGather": _all_gather,
}
