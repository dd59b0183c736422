"""Functions that make arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from support.fake_cuda import current
from support.fake_cuda.arrays import checked, ndarray, new


def empty(shape: Any, dtype: DTypeLike = float, order: str = "C") -> ndarray:
    return new(shape, dtype, order)


def zeros(shape: Any, dtype: DTypeLike = float, order: str = "C") -> ndarray:
    made = new(shape, dtype, order)
    made.fill(0)
    return made


def ones(shape: Any, dtype: DTypeLike = float, order: str = "C") -> ndarray:
    made = new(shape, dtype, order)
    made.fill(1)
    return made


def full(shape: Any, fill_value: Any, dtype: DTypeLike = None, order: str = "C") -> ndarray:
    if dtype is None:
        is_array = isinstance(fill_value, ndarray)
        dtype = fill_value.dtype if is_array else np.array(fill_value).dtype
    made = new(shape, dtype, order)
    made.fill(fill_value)
    return made


def empty_like(
    prototype: ndarray, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None
) -> ndarray:
    if not isinstance(prototype, ndarray):
        raise TypeError(f"{type(prototype)} is not an array of a device")
    wanted = prototype.shape if shape is None else shape
    found = prototype.dtype if dtype is None else dtype
    return new(
        wanted, found, "F" if order == "F" or (order in "KA" and prototype.flags.fnc) else "C"
    )


def zeros_like(
    a: ndarray, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None
) -> ndarray:
    made = empty_like(a, dtype, order, subok, shape)
    made.fill(0)
    return made


def ones_like(
    a: ndarray, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None
) -> ndarray:
    made = empty_like(a, dtype, order, subok, shape)
    made.fill(1)
    return made


def full_like(
    a: ndarray,
    fill_value: Any,
    dtype: Any = None,
    order: str = "K",
    subok: None = None,
    shape: Any = None,
) -> ndarray:
    made = empty_like(a, dtype, order, subok, shape)
    made.fill(fill_value)
    return made


def array(
    obj: Any,
    dtype: Any = None,
    copy: bool | None = True,
    order: str = "K",
    subok: bool = False,
    ndmin: int = 0,
    *,
    blocking: bool = False,
) -> ndarray:
    """What is copied from ordinary memory of the host may be changed at once, from pinned not."""
    if subok:
        raise NotImplementedError
    if isinstance(obj, ndarray):
        here = obj.data.device_id == current.machine().place.device
        found = obj.dtype if dtype is None else checked(dtype)
        if here:
            made = obj.astype(found, order=order or "K", copy=bool(copy))
        else:
            made = _from_other_device(obj).astype(found, copy=False)
        return made.reshape((1,) * (ndmin - made.ndim) + made.shape) if ndmin > made.ndim else made
    if hasattr(obj, "__cuda_array_interface__"):
        raise NotImplementedError("the stand-in takes no arrays of other libraries")
    if isinstance(obj, (list, tuple)) and obj and _has_arrays(obj):
        from support.fake_cuda.namespace import lookup

        stacked = lookup("stack")([array(one) for one in obj])  # type: ignore[misc]
        return stacked if dtype is None else stacked.astype(dtype, copy=False)
    # Something with arrays of a device deeper inside is refused by their `__array__`.
    host = np.array(obj, dtype=dtype, ndmin=ndmin)
    host = host.astype(checked(host.dtype).newbyteorder("<"), copy=False)
    if isinstance(obj, np.ndarray) and current.machine().memories.is_pinned(obj.ctypes.data):
        # The device may read it when it comes to it.
        host = np.array(obj, dtype=dtype, ndmin=ndmin, copy=None)
    fortran = order == "F" or (order in ("K", "A", None) and _is_fortran(obj))
    made = new(host.shape, host.dtype, "F" if fortran else "C")
    if host.size:
        made._receive(host)
        if blocking:
            current.machine().place.stream(made.data.device_id).synchronize()
    return made


def _has_arrays(obj: Any) -> bool:
    return any(isinstance(one, ndarray) for one in obj)


def _is_fortran(obj: Any) -> bool:
    return isinstance(obj, np.ndarray) and obj.flags.fnc


def _from_other_device(obj: ndarray) -> ndarray:
    from support.fake_cuda.device import Device

    with Device(obj.data.device_id):
        values = obj.get()
    return array(values)


def asarray(
    a: Any,
    dtype: Any = None,
    order: str | None = None,
    *,
    copy: bool | None = None,
    blocking: bool = False,
) -> ndarray:
    return array(a, dtype, bool(copy), order or "K", blocking=blocking)


def asanyarray(
    a: Any,
    dtype: Any = None,
    order: str | None = None,
    *,
    copy: bool | None = None,
    blocking: bool = False,
) -> ndarray:
    return asarray(a, dtype, order, copy=copy, blocking=blocking)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    made = asarray(a, dtype)
    return made if made.flags.c_contiguous else made.copy()


def asnumpy(
    a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True
) -> Any:
    """The values on the host; blocks."""
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    host = np.asarray(a)
    if out is not None:
        np.copyto(out, host)
        return out
    return host


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    values = np.arange(start, dtype=dtype) if stop is None else np.arange(start, stop, step, dtype)
    return array(values)


def linspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, **kwargs: Any) -> ndarray:
    return array(np.linspace(start, stop, num, endpoint, **kwargs))


def eye(
    N: int, M: int | None = None, k: int = 0, dtype: DTypeLike = float, order: str = "C"
) -> ndarray:
    return array(np.eye(N, M, k, dtype), order=order)


def identity(n: int, dtype: DTypeLike = float) -> ndarray:
    return eye(n, dtype=dtype)


def frombuffer(buffer: Any, dtype: DTypeLike = float, count: int = -1, offset: int = 0) -> ndarray:
    return array(np.frombuffer(buffer, dtype, count, offset))
