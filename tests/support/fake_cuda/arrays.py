"""``cupy.ndarray``: an array in memory of a device. What computes with it is in ``launch``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray
from support.fake_cuda import current
from support.fake_cuda.array_methods import Methods
from support.fake_cuda.memory import BaseMemory, MemoryPointer, MemoryPool
from support.fake_cuda.operators import Operators

Host = NDArray[Any]
_TYPES = "?bhilqBHILQefdFD"
_REFUSED = (
    "Implicit conversion to a NumPy array is not allowed. "
    "Please use `.get()` to construct a NumPy array explicitly."
)


def checked(dtype: DTypeLike) -> np.dtype[Any]:
    """A dtype that a device has."""
    found = np.dtype(dtype)
    if found.char not in _TYPES and found != ml_dtypes.bfloat16:
        raise ValueError(f"Unsupported dtype {found}")
    return found


class Flags:
    """``ndarray.flags``: says nothing of writing."""

    def __init__(self, host: Host, owns: bool) -> None:
        self.c_contiguous = host.flags.c_contiguous
        self.f_contiguous = host.flags.f_contiguous
        self.owndata = owns

    def __getitem__(self, name: str) -> bool:
        return bool(getattr(self, name.lower()))

    @property
    def fnc(self) -> bool:
        """Fortran's order and not C's."""
        return self.f_contiguous and not self.c_contiguous

    @property
    def forc(self) -> bool:
        """One of the two orders."""
        return self.f_contiguous or self.c_contiguous

    def __repr__(self) -> str:
        return (
            f"  C_CONTIGUOUS : {self.c_contiguous}\n  F_CONTIGUOUS : {self.f_contiguous}\n"
            f"  OWNDATA : {self.owndata}"
        )


class ndarray(Operators, Methods):
    """An array of a device."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        shape: Any,
        dtype: DTypeLike = float,
        memptr: MemoryPointer | None = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        found = checked(dtype)
        sizes = (int(shape),) if np.ndim(shape) == 0 else tuple(int(n) for n in shape)
        if any(n < 0 for n in sizes):
            raise ValueError("Negative dimensions are not allowed")
        count = int(np.prod(sizes, dtype=object))
        if memptr is None:
            memptr = MemoryPool().malloc(count * found.itemsize)
        self._base: ndarray | None = None
        self.data = memptr
        memories = current.machine().memories
        if strides is None:
            flat = memories.at(memptr.ptr, count * found.itemsize)
            self._host: Host = flat.view(found).reshape(sizes, order=order)
        else:
            chunk = memories.find(memptr.ptr)
            begin = memptr.ptr - chunk.address
            self._host = np.ndarray(sizes, found, chunk.data, begin, strides)

    def _of(self, host: Host) -> ndarray:
        """A view: another array in the same memory."""
        made: ndarray = ndarray.__new__(ndarray)
        made._host = host
        made._base = self if self._base is None else self._base
        address = host.__array_interface__["data"][0]
        mem: BaseMemory = self.data.mem
        inside = 0 <= address - mem.ptr <= mem.size
        made.data = MemoryPointer(mem, address - mem.ptr if inside and mem.ptr else 0)
        return made

    # What it is.

    @property
    def base(self) -> ndarray | None:
        return self._base

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._host.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._host.shape

    @shape.setter
    def shape(self, shape: Any) -> None:
        view = self._host.view()
        view.shape = shape
        self._host = view

    @property
    def strides(self) -> tuple[int, ...]:
        return self._host.strides

    @property
    def size(self) -> int:
        return self._host.size

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    @property
    def itemsize(self) -> int:
        return self._host.itemsize

    @property
    def ndim(self) -> int:
        return self._host.ndim

    @property
    def flags(self) -> Flags:
        return Flags(self._host, self._base is None)

    @property
    def device(self) -> Any:
        return self.data.device

    @property
    def real(self) -> ndarray:
        return self._of(self._host.real) if self.dtype.kind == "c" else self

    @real.setter
    def real(self, value: Any) -> None:
        self.real[...] = value

    @property
    def imag(self) -> ndarray:
        """The imaginary parts, as a view; of real arrays, as CuPy has it, zeros."""
        if self.dtype.kind == "c":
            return self._of(self._host.imag)
        made = new(self.shape, self.dtype, "C")
        made.fill(0)
        return made

    @imag.setter
    def imag(self, value: Any) -> None:
        if self.dtype.kind != "c":
            raise TypeError("cupy.ndarray does not have imaginary part to set")
        self.imag[...] = value

    @property
    def T(self) -> ndarray:
        return self._of(self._host.T)

    @property
    def mT(self) -> ndarray:
        return self._of(self._host.mT)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = current.machine().queue(None).handle
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": 1 if stream == 0 else stream,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr, False),
        }

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[ndarray]:
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    # What NumPy does with it.

    def __array__(self, dtype: Any = None, copy: Any = None) -> Host:
        raise TypeError(_REFUSED)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from support.fake_cuda.namespace import lookup

        found = lookup(ufunc.__name__)
        if found is None:
            return NotImplemented
        if "out" in kwargs:
            outs = kwargs["out"]
            kwargs["out"] = outs[0] if len(outs) == 1 else outs
        if method == "__call__":
            return found(*inputs, **kwargs)
        function = getattr(found, method, None)
        return NotImplemented if function is None else function(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from support.fake_cuda.namespace import lookup

        path = func.__module__.split(".")[1:]
        found = lookup(".".join([*path, func.__name__]))
        if found is None or found is func:
            return NotImplemented
        if any(kind not in (ndarray, np.ndarray) for kind in types):
            return NotImplemented
        return found(*args, **kwargs)

    # What the host reads, which waits for the current stream.

    def __bool__(self) -> bool:
        if self.size > 1:
            raise ValueError(
                "The truth value of an array with more than one element is ambiguous. "
                "Use a.any() or a.all()"
            )
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __index__(self) -> int:
        return int(self.get().__index__())

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def __reduce__(self) -> Any:
        return functools.partial(_from_host), (self.get(),)


def _from_host(values: Host) -> ndarray:
    from support.fake_cuda.creation import array

    return array(values)


def new(shape: Any, dtype: DTypeLike, order: str = "C") -> ndarray:
    """An array of the current device whose values are anything."""
    return ndarray(shape, dtype, order=order)
