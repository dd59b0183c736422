"""``Device``: where arrays are and what computes with them: the host by NumPy, or a GPU by CuPy.

A backend has one (``backend.device``). Collectives take NumPy arrays on any transport and, where
the device is a GPU, its arrays as well; everything above them makes its arrays with
``backend.device`` and computes with ``device.xp``, so that it runs on either.

Work on a GPU is done in the order in which it was enqueued on a stream, while the host goes on.
What a thread enqueues goes to its *current stream*, as the array library has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fsdpcore.core.buffers import (
    Array,
    Bytes,
    check_out,
    input_array,
    lined_up,
    lined_up_zeros,
)
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.foreign import as_numpy, is_foreign


class Ticket(ABC):
    """The end of what was enqueued in the background, known once its block was left."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has come to it; does not block."""

    @abstractmethod
    def join(self) -> None:
        """Let what this thread enqueues from now on wait for it; the host does not."""

    @abstractmethod
    def block(self, seconds: float) -> bool:
        """Wait on the host, at most so long; return ``done()``."""


class Device(ABC):
    """Where arrays are.

    Attributes:
        name: "cpu", or for instance "cuda:0".
        on_host: arrays are NumPy's.
    """

    name: str
    on_host: bool

    @property
    @abstractmethod
    def xp(self) -> Any:
        """The module of array functions: ``numpy``, or ``cupy``."""

    @abstractmethod
    def owns(self, array: object) -> bool:
        """Whether it is an array of this device."""

    def claims(self, array: object) -> bool:
        """Whether an array is of this GPU or of another one, and not of the host.

        Another GPU's is for this device to refuse, which says what is wrong with it.
        """
        if self.on_host or isinstance(array, np.ndarray):
            return False
        return self.owns(array) or hasattr(array, "__cuda_array_interface__")

    @abstractmethod
    def operand(self, value: ArrayLike) -> Array:
        """Return ``value`` as a C-contiguous array of a dtype that travels, copied if needed.

        Raises:
            ArgumentError: it is not an array of a supported dtype.
        """

    @abstractmethod
    def check_out(self, out: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return ``out`` after checking that a result of ``shape`` and ``dtype`` fits into it.

        Raises:
            ArgumentError: it is not a writable array of this device, of that shape and dtype.
        """

    @abstractmethod
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        """Return a new array with any content."""

    def lined_up(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Do as ``empty`` for an array that is used again and again."""
        return self.empty(shape, dtype)

    @abstractmethod
    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        """Return a new array of zeros."""

    def lined_up_zeros(self, size: int, dtype: np.dtype[Any]) -> Array:
        """Do as ``lined_up`` for a flat array of zeros."""
        return self.zeros(size, dtype)

    @abstractmethod
    def to_host(self, array: Array) -> NDArray[Any]:
        """Return the values of what ``given`` returns as a NumPy array; blocks.

        A copy of an array of a GPU, and an array of the host itself.
        """

    @abstractmethod
    def from_host(self, array: NDArray[Any]) -> Array:
        """Return the values of a NumPy array here: a copy, or the array itself on the host.

        What is copied may be changed at once.
        """

    @abstractmethod
    def write(self, target: Array, source: NDArray[Any]) -> None:
        """Copy the values of a NumPy array into an array of this device, rounded to its dtype.

        Both have the same shape. ``source`` may be changed at once.
        """

    def given(self, value: ArrayLike, what: str) -> Array:
        """Return what a caller passed as an array of the host or of this device, where it is.

        Args:
            value: an array, also of another library on the host, or what NumPy makes one of.
            what: the words that messages use for it.

        Raises:
            ArgumentError: it is no array, or one of a GPU that is not this device.
        """
        elsewhere = not isinstance(value, np.ndarray)
        if elsewhere and self.owns(value):
            return cast(Array, value)
        if elsewhere and hasattr(value, "__cuda_array_interface__"):
            raise ArgumentError(f"{what} is {self.foreign(value)}")
        return as_numpy(value, what)

    def foreign(self, array: object) -> str:
        """Say of an array of some GPU, but not of this device, what it is and what to do."""
        return (
            f"an array of a GPU, but this rank computes on {self.name}: copy it to the host "
            "(CuPy: array.get()), or use a transport for GPUs, with CuPy's arrays"
        )

    def assign(self, target: Array, source: Array) -> None:
        """Copy what ``given`` has returned into an array of this device, rounded to its dtype.

        Both have the same shape; what is too large for the dtype becomes inf. ``source`` may be
        changed at once, by what is enqueued after this where it is of this device.
        """
        if self.on_host or not self.owns(source):
            self.write(target, source)
        else:
            target[...] = source

    def fetch(self, target: NDArray[Any], source: Array) -> None:
        """Enqueue a copy of an array of this device into a NumPy array of its shape and dtype.

        ``target`` is C-contiguous, and is filled when this thread has waited for the device: with
        a ``Ticket``, or ``synchronize``. Sooner, where copies into such memory cannot be enqueued.
        """
        np.copyto(target, self.to_host(source))

    def page_locked(self, nbytes: int) -> Bytes:
        """Return new memory of the host that is copied from, and into, as fast as it can be.

        With any content, as a NumPy array; ordinary memory where there is none better.
        """
        return np.empty(nbytes, np.uint8)

    @abstractmethod
    def overlap(self, first: Array, second: Array) -> bool:
        """Whether two contiguous arrays may share memory."""

    @abstractmethod
    def address(self, array: Array) -> int:
        """Where the first element of an array is."""

    @abstractmethod
    def background(self) -> AbstractContextManager[Ticket]:
        """Enqueue what is enqueued in the block beside what this thread enqueues after it.

        It begins after everything that the thread has enqueued before. On devices other than the
        host only.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""

    @abstractmethod
    def pinned(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        """Return a new array of this device in the memory of the host, which it reads from there.

        With any content; slower than the device's own memory, of which it takes none.
        """

    def __repr__(self) -> str:
        return self.name


class HostDevice(Device):
    """The host, with NumPy."""

    name = "cpu"
    on_host = True

    @property
    def xp(self) -> Any:
        return np

    def owns(self, array: object) -> bool:
        return isinstance(array, np.ndarray)

    def operand(self, value: ArrayLike) -> Array:
        if is_foreign(value) and not hasattr(value, "__cuda_array_interface__"):
            value = as_numpy(value, "the array")
        return input_array(value)

    def check_out(self, out: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return check_out(out, shape, dtype)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        return np.empty(shape, dtype)

    def lined_up(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return lined_up(shape, dtype)

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        return np.zeros(shape, dtype)

    def lined_up_zeros(self, size: int, dtype: np.dtype[Any]) -> Array:
        return lined_up_zeros(size, dtype)

    def to_host(self, array: Array) -> NDArray[Any]:
        return array

    def from_host(self, array: NDArray[Any]) -> Array:
        return array

    def write(self, target: Array, source: NDArray[Any]) -> None:
        if target.dtype == source.dtype:
            target[...] = source
            return
        with np.errstate(over="ignore"):  # what is too large becomes inf
            target[...] = source

    def overlap(self, first: Array, second: Array) -> bool:
        return np.may_share_memory(first, second)

    def address(self, array: Array) -> int:
        return array.ctypes.data

    def background(self) -> AbstractContextManager[Ticket]:
        raise NotImplementedError("on the host, what runs beside others has a thread")

    def synchronize(self) -> None:
        """Nothing to do: what was called has ended."""

    def pinned(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        return np.empty(shape, dtype)


HOST = HostDevice()
