"""Reductions: what an op does to a dtype, and the canonical order in which ranks are combined.

The canonical order is a binary tree over rank order, built bottom up: (0,1), (2,3), ...; an odd
one out moves up unchanged. At height h a node covers the aligned block of ranks
[k * 2**h, (k + 1) * 2**h), cut off at the number of ranks. Every algorithm that combines in this
order gives the same bits, since floating-point addition is not associative.

float16 and bfloat16 are accumulated in float32 and rounded once, at the end; a mean divides the
accumulated sum before that rounding. ``ReduceOp.mean_as`` takes the mean of integers in float64.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.buffers import BFLOAT16, Array
from fsdpcore.core.errors import ArgumentError

# 128 KiB of float32: the operands of one block stay in a core's second-level cache.
BLOCK = 32 * 1024


Combine = Callable[..., Any]


class ReduceOp(enum.Enum):
    """How the values of the ranks are combined. Functions also take the names as strings.

    On bool, ``sum`` and ``max`` are the logical or, ``prod`` and ``min`` the logical and (as in
    NumPy). Integers wrap around. ``mean`` needs a floating-point or complex dtype; that of integers
    and bool is ``mean_as(dtype)``. ``min`` and ``max`` need an ordered one. ``band``, ``bor`` and
    ``bxor`` combine the bits of bool and integers; ``land``, ``lor`` and ``lxor`` are for bool
    alone: compare with zero first. ``ReduceOp.create(name, function)`` makes one of your own.
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PROD = "prod"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    LAND = "land"
    LOR = "lor"
    LXOR = "lxor"

    @property
    def own_function(self) -> Combine | None:
        """The function of a reduction that ``create`` has made."""
        return vars(self).get("_own_function")

    @property
    def result(self) -> np.dtype[Any] | None:
        """The dtype of the results of what ``mean_as`` has made; None where it is the input's."""
        return vars(self).get("_result")

    @classmethod
    def mean_as(cls, dtype: DTypeLike) -> ReduceOp:
        """The mean of integers or bool, as an array of a float dtype.

        Values are summed in float64 in the canonical order, the sum is divided, and the mean is
        rounded to ``dtype``. Sums below 2**53 are exact; larger ones are rounded, and never wrap
        around. For single calls of ``all_reduce``, ``reduce``, ``reduce_scatter``,
        ``reduce_scatter_v`` and ``scan``, with arrays of the host; ``out`` is of ``dtype``.

        Raises:
            ArgumentError: results of that dtype are not to be had.

        Example::

            share = fc.all_reduce(mask, backend, op=fc.ReduceOp.mean_as(np.float32))
        """
        return _mean_as(np.dtype(dtype))

    @classmethod
    def create(cls, name: str, function: Callable[[Array, Array], Array]) -> ReduceOp:
        """Make a reduction of your own.

        Args:
            name: tells the ranks whether they call the same. It is all that they compare, so that
                two functions of one name are not told apart.
            function: combines two arrays of equal shape, the one of lower ranks first, into a new
                one, element by element. It must be associative; it need not be commutative. For
                float16 and bfloat16 it gets float32, for arrays of a GPU those of CuPy. It must
                not change its arguments.

        Raises:
            ArgumentError: the name is one of ours or no identifier, or the function is none.

        Example::

            last = fc.ReduceOp.create("last", lambda left, right: np.where(right > 0, right, left))
            fc.all_reduce(array, backend, op=last)
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(f"a reduction's name is an identifier, got {name!r}")
        if name in cls._value2member_map_:
            raise ArgumentError(f"there is a reduction {name!r} already; take another name")
        if not callable(function):
            raise ArgumentError(f"reduction {name!r}: {function!r} is no function of two arrays")
        made = object.__new__(cls)  # as ``enum.Flag`` makes members that have no name in the class
        made._name_ = made._value_ = name
        vars(made)["_own_function"] = function
        return made


@functools.cache  # equal calls bring the same op, by which a group remembers them
def _mean_as(dtype: np.dtype[Any]) -> ReduceOp:
    if dtype not in _MEANS:
        known = ", ".join(known.name for known in _MEANS)
        raise ArgumentError(f"a mean is a float: mean_as takes one of {known}, got {dtype}")
    made = object.__new__(ReduceOp)
    made._name_ = made._value_ = f"mean_as({dtype.name})"
    vars(made)["_result"] = dtype
    return made


_FLOAT64 = np.dtype(np.float64)
_MEANS = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), _FLOAT64)

_UFUNCS: dict[ReduceOp, Combine] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
    ReduceOp.LAND: np.logical_and,
    ReduceOp.LOR: np.logical_or,
    ReduceOp.LXOR: np.logical_xor,
}

# But for those that depend on the dtype.
_IDENTITIES: dict[ReduceOp, int] = {
    ReduceOp.SUM: 0,
    ReduceOp.PROD: 1,
    ReduceOp.BOR: 0,
    ReduceOp.BXOR: 0,
    ReduceOp.LAND: 1,
    ReduceOp.LOR: 0,
    ReduceOp.LXOR: 0,
}

# The kinds of dtypes that the ops with a limited meaning are for, in words too.
_LIMITED = {
    **dict.fromkeys(("band", "bor", "bxor"), ("biu", "the bits of bool and integers")),
    **dict.fromkeys(("land", "lor", "lxor"), ("b", "bool alone: compare with zero first")),
}


class _Quiet(threading.local):
    """Calls NumPy without its warnings of overflow, at a tenth of the cost of ``np.errstate``.

    NumPy keeps its error state in a context variable; here is a context, for each thread, in which
    it is set for good.
    """

    def __init__(self) -> None:
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        self.run = context.run


_quiet = _Quiet()


@dataclass(frozen=True)
class Reduction:
    """An op bound to a dtype.

    Attributes:
        op: what is computed.
        dtype: of the arrays.
        accumulator: in which partial results are held.
        function: combines two arrays in the accumulator dtype into a third, which may be either.
        result: the dtype of the caller's results, where that is not the one of the arrays that are
            reduced; inputs are then converted by ``load``, results by ``store``.
    """

    op: ReduceOp
    dtype: np.dtype[Any]
    accumulator: np.dtype[Any]
    function: Combine
    result: np.dtype[Any] | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, op: ReduceOp | str, dtype: np.dtype[Any], *, converts: bool = False) -> Reduction:
        """Bind ``op`` to ``dtype``.

        Args:
            op: what is computed.
            dtype: of the inputs.
            converts: the caller converts inputs and results, for an op that asks for that.

        Raises:
            ArgumentError: there is no such op, or it has no meaning for that dtype.
        """
        try:
            op = ReduceOp(op)
        except ValueError:
            names = ", ".join(repr(known.value) for known in ReduceOp)
            raise ArgumentError(f"unknown reduction {op!r}; known are {names}") from None
        if op.result is not None:
            if dtype.kind not in "biu":
                raise ArgumentError(f"{op.value} is for integers and bool; of {dtype}, take 'mean'")
            if not converts:
                raise ArgumentError(
                    f"{op.value} is for single calls of all_reduce, reduce, reduce_scatter and "
                    "scan, with arrays of the host; elsewhere convert the array to float64 first"
                )
            return cls(ReduceOp.MEAN, _FLOAT64, _FLOAT64, np.add, result=op.result)
        if op is ReduceOp.MEAN and dtype.kind in "biu":
            raise ArgumentError(
                f"the mean of {dtype} values is not {dtype} in general; "
                "take op=ReduceOp.mean_as(np.float64), or another float dtype"
            )
        if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.kind == "c":
            raise ArgumentError(
                f"{op.value} is undefined for {dtype}: complex numbers have no order"
            )
        kinds, what = _LIMITED.get(op.value, ("", ""))
        if kinds and dtype.kind not in kinds:
            raise ArgumentError(f"{op.value} of {dtype} is undefined: it is for {what}")
        half = dtype in (np.dtype(np.float16), BFLOAT16)
        accumulator = np.dtype(np.float32) if half else dtype
        product_of_complex = op is ReduceOp.PROD and accumulator.kind == "c"
        own = op.own_function
        if own is not None:
            function = _own(op.value, own, accumulator)
        else:
            function = _multiply_complex if product_of_complex else _UFUNCS[op]
        return cls(op, dtype, accumulator, function)

    @property
    def name(self) -> str:
        """The op's name, as users write it."""
        return self.op.value if self.result is None else _mean_as(self.result).value

    @property
    def identity(self) -> Any:
        """The value that changes none that it is combined with; what a sum of nothing is.

        Raises:
            ArgumentError: there is none, or it is not known.
        """
        if self.op in (ReduceOp.MIN, ReduceOp.MAX):
            if self.dtype.kind == "b":
                return self.op is ReduceOp.MIN
            if self.dtype.kind in "iu":
                limits = np.iinfo(self.dtype)
                return limits.max if self.op is ReduceOp.MIN else limits.min
            return np.inf if self.op is ReduceOp.MIN else -np.inf
        if self.op is ReduceOp.BAND:
            return ~self.dtype.type(0)
        if self.op in _IDENTITIES:
            return _IDENTITIES[self.op]
        raise ArgumentError(
            f"no value is known that stands for the {self.name} of nothing; use scan(), or "
            "combine what you need by hand"
        )

    def load(self, source: Array, out: Array | None = None) -> Array:
        """Return ``out``, or a new array, with ``source`` in the accumulator dtype."""
        if out is None:
            return _quiet.run(source.astype, self.accumulator)
        _quiet.run(np.copyto, out, source)
        return out

    def combine(self, left: Array, right: Array, out: Array) -> None:
        """Write ``left op right`` into ``out`` (which may be either), in the accumulator dtype."""
        _quiet.run(self.function, left, right, out=out)

    def store(self, accumulated: Array, out: Array, count: int) -> None:
        """Finish the reduction of ``count`` ranks: divide for a mean, round, write ``out``.

        ``accumulated`` may be overwritten.
        """
        if self.op is ReduceOp.MEAN and count > 1:
            # Of complex numbers, both parts by themselves: a complex division would round
            # differently, and turn one infinite part into two NaNs.
            parts = accumulated.view(accumulated.real.dtype)
            _quiet.run(np.divide, parts, parts.dtype.type(count), parts)
        if accumulated is not out:
            _quiet.run(np.copyto, out, accumulated, "unsafe")

    def reduce(self, parts: Sequence[Array], out: Array) -> None:
        """Reduce one flat array per rank into ``out``, in the canonical order.

        ``out`` may be one of ``parts``. Works block by block, so that scratch stays small and
        partial results stay in cache. Of no parts, the result is ``identity``.
        """
        if not parts:
            out.fill(self.identity)
            return
        self._reduce(parts, out, np.empty, BLOCK)

    def reduce_at_once(
        self, parts: Sequence[Array], out: Array, empty: Callable[..., Array]
    ) -> None:
        """Do as ``reduce`` in whole arrays, of any library that NumPy's functions know.

        Args:
            parts: one array per rank.
            out: the result; may be one of ``parts``.
            empty: makes scratch of ``(shape, dtype)``, of that library.
        """
        self._reduce(parts, out, empty, max(out.size, 1))

    def _reduce(
        self, parts: Sequence[Array], out: Array, empty: Callable[..., Array], block: int
    ) -> None:
        rounds = self.accumulator is not self.dtype
        if len(parts) == 2 and not rounds:  # nothing is read or written twice
            self.combine(parts[0], parts[1], out)
            if self.op is ReduceOp.MEAN:
                self.store(out, out, 2)
            return
        rows = len(parts) if rounds else (len(parts) + 1) // 2
        scratch = empty((rows, min(block, out.size)), self.accumulator)
        for start in range(0, out.size, block):
            target = out[start : start + block]
            room = scratch[:, : target.size]
            values = [part[start : start + block] for part in parts]
            if rounds:
                for row, value in zip(room, values, strict=True):
                    _quiet.run(np.copyto, row, value)
                values = list(room)
            self._combine_tree(values, room, None if rounds else target)
            self.store(values[0], target, len(parts))

    def _combine_tree(self, values: list[Array], scratch: Array, last: Array | None) -> None:
        """Combine ``values`` bottom up into ``values[0]``.

        The leaves of the first level may be the callers' arrays, so results go to ``scratch``;
        the very last one goes to ``last`` if given, which saves a copy. By then every leaf has
        been read, so ``last`` may be one of them.
        """
        count = len(values)
        owned = self.accumulator is not self.dtype
        stride = 1
        while stride < count:
            for low in range(0, count - stride, 2 * stride):
                target = values[low] if owned or stride > 1 else scratch[low // 2]
                if last is not None and 2 * stride >= count:
                    target = last
                self.combine(values[low], values[low + stride], target)
                values[low] = target
            stride *= 2


def _own(name: str, function: Combine, dtype: np.dtype[Any]) -> Combine:
    """Return a user's function as a ufunc is called, tried out on two elements.

    Raises:
        ArgumentError: it does not work on arrays of the dtype.
    """
    try:
        found = np.asarray(_quiet.run(function, np.ones(2, dtype), np.ones(2, dtype)))
    except Exception as error:
        raise ArgumentError(f"reduction {name!r} of {dtype} arrays failed: {error}") from error
    if found.shape != (2,) or not np.can_cast(found.dtype, dtype, "same_kind"):
        raise ArgumentError(
            f"reduction {name!r} makes {found.dtype} of shape {found.shape} of two {dtype} "
            "arrays of shape (2,); it has to keep shape and dtype"
        )

    def combine(left: Array, right: Array, out: Array) -> None:
        np.copyto(out, function(left, right), "same_kind")

    return combine


def _multiply_complex(left: Array, right: Array, out: Array) -> None:
    """Write the product into ``out``, which may be either factor.

    NumPy's own multiplication fuses operations in some of its loops and not in others, so that
    the bits would depend on how an array was cut into chunks.
    """
    real = left.real * right.real
    real -= left.imag * right.imag
    imaginary = left.real * right.imag
    imaginary += left.imag * right.real
    out.real, out.imag = real, imaginary
