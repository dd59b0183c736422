"""Runs functions of NumPy on arrays of a device, later, on the current stream.

What comes out is known at once: its shapes and dtypes are those that the function gives for other
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.fake_cuda import current
from support.fake_cuda.arrays import ndarray, new
from support.fake_cuda.copies import enqueue

Host = NDArray[Any]


def check_device(*arrays: ndarray) -> None:
    """Raise for an array of another device than the current one, or one that is not aligned."""
    machine = current.machine()
    device = machine.place.device
    for array in arrays:
        if array.data.device_id != device and not machine.faults.peer_access:
            raise ValueError(
                f"The device where the array resides ({array.data.device_id}) is different from "
                f"the current device ({device}). Peer access is unavailable between these devices."
            )
        if array.size and array.data.ptr % array.dtype.itemsize:
            # On a device that ends in cudaErrorMisalignedAddress, after which nothing works.
            raise RuntimeError(f"a kernel reads {array.dtype} at {array.data.ptr:#x}")


def launch(
    name: str,
    work: Callable[[], None],
    reads: Sequence[ndarray] = (),
    writes: Sequence[ndarray] = (),
    stream: Any = None,
    **noted: Any,
) -> None:
    """Enqueue work that reads and writes arrays."""
    check_device(*reads, *writes)
    machine = current.machine()
    queue = machine.queue(stream)
    machine.note(name, queue, **noted)
    enqueue(queue, name, work, [touched(a) for a in reads], [touched(a) for a in writes])


def touched(array: ndarray) -> tuple[int, Host]:
    """An array as ``enqueue`` wants it."""
    if not array.size:
        return 0, array._host
    return current.machine().memories.find(array.data.ptr).number, array._host


def arrays_in(value: Any) -> list[ndarray]:
    """All arrays of a device in arguments; NumPy's are refused, as CuPy does."""
    if isinstance(value, ndarray):
        return [value]
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in arrays_in(item)]
    if isinstance(value, Mapping):
        return [array for item in value.values() for array in arrays_in(item)]
    return []


def replaced(value: Any, how: Callable[[ndarray], Any]) -> Any:
    """The arguments with every array replaced."""
    if isinstance(value, ndarray):
        return how(value)
    if isinstance(value, list):
        return [replaced(item, how) for item in value]
    if isinstance(value, tuple):
        return tuple(replaced(item, how) for item in value)
    return value


def stand_in(array: ndarray) -> Host:
    """An array of NumPy with the same shape and dtype that takes no memory.

    Its integers are zeros, which are in bounds as indices.
    """
    value = 0 if array.dtype.kind in "iu" else 1
    return np.broadcast_to(np.full((), value, array.dtype), array.shape)


def host_of(array: ndarray) -> Host:
    """The memory of an array, which only work on a stream may touch."""
    return array._host


def run(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    out: ndarray | None = None,
    casting: Any = "same_kind",
) -> Any:
    """Enqueue ``function(*args, **kwargs)``; return new arrays for its results, or ``out``."""
    kwargs = dict(kwargs or {})
    reads = arrays_in([args, kwargs])
    with np.errstate(all="ignore"):
        shown = function(
            *replaced(list(args), stand_in), **{k: replaced(v, stand_in) for k, v in kwargs.items()}
        )
    several = isinstance(shown, (tuple, list))
    shapes = [np.asanyarray(one) for one in (shown if several else [shown])]
    if out is not None:
        _check_out(out, shapes[0], casting)
        results = [out]
    else:
        results = [new(one.shape, one.dtype) for one in shapes]
    hosts = [result._host for result in results]
    real_args = replaced(list(args), host_of)
    real_kwargs = {k: replaced(v, host_of) for k, v in kwargs.items()}

    def work() -> None:
        found = function(*real_args, **real_kwargs)
        for target, value in zip(hosts, found if several else [found], strict=True):
            np.copyto(target, value, casting="unsafe")

    launch(name, work, reads, results)
    if out is not None:
        return out
    return type(shown)(results) if several else results[0]


def _check_out(out: Any, shown: Host, casting: Any) -> None:
    if not isinstance(out, ndarray):
        raise TypeError("Output arguments type must be cupy.ndarray")
    if out.shape != shown.shape:
        raise ValueError("Out shape is mismatched")
    if not np.can_cast(shown.dtype, out.dtype, casting):
        raise TypeError(
            f"Cannot cast output operand from {shown.dtype!r} to {out.dtype!r} "
            f"with casting rule '{casting}'"
        )
