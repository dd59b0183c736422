"""The methods of an array that move, look at or change values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from support.fake_cuda import current
from support.fake_cuda.copies import enqueue

if TYPE_CHECKING:
    from support.fake_cuda.arrays import ndarray

Host = NDArray[Any]


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    from support.fake_cuda.namespace import lookup

    return lookup(name)(*args, **kwargs)  # type: ignore[misc]


def _by_name(name: str) -> Any:
    def method(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        return _call(name, self, *args, **kwargs)

    method.__name__ = name
    return method


_FUNCTIONS = (
    "all any argsort conj cumprod cumsum diagonal dot max mean min nonzero "
    "prod repeat std sum swapaxes take trace var squeeze round"
)


class _Named:
    """Methods that are functions of the same name."""

    for _name in _FUNCTIONS.split():
        locals()[_name] = _by_name(_name)
    del _name


class Methods(_Named):
    """Methods of ``cupy.ndarray``."""

    _host: Host
    data: Any

    # To and from the host.

    def get(
        self: Any,
        stream: Any = None,
        order: str = "C",
        out: Host | None = None,
        blocking: bool = True,
    ) -> Host:
        """The values on the host. Without ``blocking`` they are there when the stream is done."""
        if out is None:
            out = np.empty(self.shape, self.dtype, "F" if order == "F" else "C")
        elif not isinstance(out, np.ndarray):
            raise TypeError(f"Only numpy.ndarray can be obtained from cupy.ndarray: {type(out)}")
        elif out.dtype != self.dtype:
            raise TypeError(
                f"{out.dtype.name} array cannot be obtained from {self.dtype.name} array"
            )
        elif out.shape != self.shape:
            raise ValueError(
                f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}"
            )
        elif not (out.flags.c_contiguous or out.flags.f_contiguous):
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        if not self.size:
            return out
        from support.fake_cuda.launch import check_device, touched

        if self.data.mem.device_id != current.machine().place.device and stream is None:
            check_device(self)
        machine = current.machine()
        queue = machine.queue(stream)
        # Ordinary memory of the host is never written behind its back.
        blocks = blocking or not machine.memories.is_pinned(out.ctypes.data)
        machine.note("get", queue, size=self.size, blocks=blocks)
        source = self._host
        enqueue(queue, "get", lambda: np.copyto(out, source), [touched(self)])
        if blocks:
            clock = machine.order.clock_of(queue)
            queue.wait()
            machine.order.host_saw(clock)
        return out

    def set(self: Any, arr: Host, stream: Any = None) -> None:
        """Take the values of a NumPy array; only one in pinned memory must be left as it is."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        if self.size:
            pinned = current.machine().memories.is_pinned(arr.ctypes.data)
            self._receive(arr if pinned else arr.copy(), stream)

    def _receive(self: Any, values: Host, stream: Any = None) -> None:
        from support.fake_cuda.launch import launch

        target = self._host
        launch("set", lambda: np.copyto(target, values), (), [self], stream)

    def item(self: Any) -> Any:
        """The value of an array of one."""
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self: Any) -> Any:
        """The values as lists."""
        return self.get().tolist()

    def tobytes(self: Any, order: str = "C") -> bytes:
        """The values as bytes."""
        return bytes(self.get().tobytes(order))

    # Other arrays in the same memory, where that is possible.

    def view(self: Any, dtype: DTypeLike = None, type: Any = None) -> ndarray:
        """The same bytes."""
        if dtype is None:
            return self._of(self._host.view())
        from support.fake_cuda.arrays import checked

        return self._of(self._host.view(checked(dtype)))

    def reshape(self: Any, *shape: Any, order: str = "C", copy: bool | None = None) -> ndarray:
        """Another shape: a view, or a copy where there is none."""
        wanted = shape[0] if len(shape) == 1 else shape
        made = self._host.reshape(wanted, order=order)
        if made.size == 0 or np.may_share_memory(made, self._host):
            return self._of(made)
        if copy is False:
            raise ValueError("Unable to avoid creating a copy while reshaping.")
        return self.copy(order).reshape(wanted, order=order)

    def ravel(self: Any, order: str = "C") -> ndarray:
        """One dimension: a view of contiguous arrays."""
        return self.reshape(-1, order=order)

    def transpose(self: Any, *axes: Any) -> ndarray:
        """Other order of the axes, backwards by default."""
        return self._of(self._host.transpose(*axes))

    # New arrays.

    def argmax(
        self: Any, axis: Any = None, out: Any = None, dtype: Any = None, keepdims: bool = False
    ) -> ndarray:
        """Where the largest are."""
        return _call("argmax", self, axis, dtype, out, keepdims)

    def argmin(
        self: Any, axis: Any = None, out: Any = None, dtype: Any = None, keepdims: bool = False
    ) -> ndarray:
        """Where the smallest are."""
        return _call("argmin", self, axis, dtype, out, keepdims)

    def clip(self: Any, min: Any = None, max: Any = None, out: Any = None) -> ndarray:
        """Values within limits."""
        return _call("clip", self, min, max, out)

    def copy(self: Any, order: str = "C") -> ndarray:
        """A copy."""
        return self.astype(self.dtype, order=order)

    def astype(
        self: Any,
        dtype: DTypeLike,
        order: str = "K",
        casting: str | None = None,
        subok: bool | None = None,
        copy: bool = True,
    ) -> ndarray:
        """A copy of another dtype, or the array itself where it has it and ``copy`` is false."""
        if subok is not None:
            raise TypeError("subok is not supported yet")
        from support.fake_cuda.arrays import checked, new
        from support.fake_cuda.launch import launch

        found = checked(dtype)
        if not copy and found == self.dtype:
            return self
        if casting is not None and not np.can_cast(self.dtype, found, casting):
            raise TypeError(f"Cannot cast array data from {self.dtype!r} to {found!r}")
        order = ("F" if self.flags.fnc else "C") if order in "KA" else order
        made = new(self.shape, found, order)
        source, target = self._host, made._host
        launch("copy", lambda: np.copyto(target, source, casting="unsafe"), [self], [made])
        return made

    # Changes.

    def fill(self: Any, value: Any) -> None:
        """Set all."""
        if isinstance(value, np.ndarray):
            if value.shape:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            value = value.item()
        self[...] = value

    def __getitem__(self: Any, key: Any) -> ndarray:
        from support.fake_cuda.indexing import taken

        return taken(self, key)

    def __setitem__(self: Any, key: Any, value: Any) -> None:
        from support.fake_cuda.indexing import put

        put(self, key, value)
