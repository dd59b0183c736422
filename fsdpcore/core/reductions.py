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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.buffers import BFLOAT16, Array
from fsdpcore.core.digests import function_digest
from fsdpcore.core.errors import ArgumentError

# 128 KiB of float32: the operands of one block stay in a core's second-level cache.
BLOCK = 32 * 1024


Combine = Callable[..., Any]


class _Domain(NamedTuple):
    """The dtypes that an op has a meaning for.

    Attributes:
        refused: the kinds of all others.
        why: the words for them.
    """

    refused: str
    why: str


_ALL = _Domain("", "")
_ORDERED = _Domain("c", "{op} is undefined for {dtype}: complex numbers have no order")
_FRACTIONS = _Domain(
    "biu",
    "the mean of {dtype} values is not {dtype} in general; take op=ReduceOp.mean_as(np.float64), "
    "or another float dtype",
)
_BITS = _Domain("fcV", "{op} of {dtype} is undefined: it is for the bits of bool and integers")
_BOOL = _Domain(
    "iufcV", "{op} of {dtype} is undefined: it is for bool alone: compare with zero first"
)
_INTEGERS = _Domain("fcV", "{op} is for integers and bool; of {dtype}, take 'mean'")


class _Arithmetic(NamedTuple):
    """What an op does.

    Attributes:
        function: combines two arrays into ``out``, as a ufunc does.
        domain: what it has a meaning for.
        identity: the value that changes none that it is combined with, or how to find it for a
            dtype; None where there is none, or it is not known.
        of_complex: combines complex numbers instead of ``function``.
        own: the digest of a function that is a user's, and returns what it makes of two arrays.
        result: the dtype of the results; None where it is the input's.
    """

    function: Combine
    domain: _Domain = _ALL
    identity: Callable[[np.dtype[Any]], Any] | int | None = None
    of_complex: Combine | None = None
    own: str = ""
    result: np.dtype[Any] | None = None


def _highest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


def _lowest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _all_bits(dtype: np.dtype[Any]) -> Any:
    return ~dtype.type(0)


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


class ReduceOp(enum.Enum):
    """How the values of the ranks are combined. Functions also take the names as strings.

    On bool, ``sum`` and ``max`` are the logical or, ``prod`` and ``min`` the logical and (as in
    NumPy). Integers wrap around. ``mean`` needs a floating-point or complex dtype; that of integers
    and bool is ``mean_as(dtype)``. ``min`` and ``max`` need an ordered one. ``band``, ``bor`` and
    ``bxor`` combine the bits of bool and integers; ``land``, ``lor`` and ``lxor`` are for bool
    alone: compare with zero first. ``ReduceOp.create(name, function)`` makes one of your own.
    """

    SUM = "sum", _Arithmetic(np.add, _ALL, 0)
    MEAN = "mean", _Arithmetic(np.add, _FRACTIONS)
    MIN = "min", _Arithmetic(np.minimum, _ORDERED, _highest)
    MAX = "max", _Arithmetic(np.maximum, _ORDERED, _lowest)
    PROD = "prod", _Arithmetic(np.multiply, _ALL, 1, _multiply_complex)
    BAND = "band", _Arithmetic(np.bitwise_and, _BITS, _all_bits)
    BOR = "bor", _Arithmetic(np.bitwise_or, _BITS, 0)
    BXOR = "bxor", _Arithmetic(np.bitwise_xor, _BITS, 0)
    LAND = "land", _Arithmetic(np.logical_and, _BOOL, 1)
    LOR = "lor", _Arithmetic(np.logical_or, _BOOL, 0)
    LXOR = "lxor", _Arithmetic(np.logical_xor, _BOOL, 0)

    _value_: str
    _arithmetic: _Arithmetic

    # The default is for type checkers, who take ReduceOp("sum") for a call of this.
    def __new__(cls, name: object, arithmetic: _Arithmetic | None = None) -> ReduceOp:
        """Make an op; its value is the name."""
        if arithmetic is None:
            raise TypeError(f"reduction {name!r} needs its arithmetic")
        made = object.__new__(cls)
        made._value_ = str(name)
        made._arithmetic = arithmetic
        return made

    @property
    def own_function(self) -> Combine | None:
        """The function of a reduction that ``create`` has made."""
        return self._arithmetic.function if self._arithmetic.own else None

    @property
    def result(self) -> np.dtype[Any] | None:
        """The dtype of the results of what ``mean_as`` has made; None where it is the input's."""
        return self._arithmetic.result

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
            name: in errors. The ranks compare it, and the function: its code if it is written in
                Python (of one version, on all ranks), else what it is called. Values that the
                code takes from outside may differ unnoticed.
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
        return cls._make(name, _Arithmetic(function, own=function_digest(function)))

    @classmethod
    def _make(cls, name: str, arithmetic: _Arithmetic) -> ReduceOp:
        """Make an op outside of the class, as ``enum.Flag`` makes members without a name there."""
        made = object.__new__(cls)
        made._name_ = made._value_ = name
        made._arithmetic = arithmetic
        return made


@functools.cache  # equal calls bring the same op, by which a group remembers them
def _mean_as(dtype: np.dtype[Any]) -> ReduceOp:
    if dtype not in _MEANS:
        known = ", ".join(known.name for known in _MEANS)
        raise ArgumentError(f"a mean is a float: mean_as takes one of {known}, got {dtype}")
    return ReduceOp._make(f"mean_as({dtype.name})", _Arithmetic(np.add, _INTEGERS, result=dtype))


_FLOAT64 = np.dtype(np.float64)
_MEANS = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), _FLOAT64)


class _Quiet(threading.local):
    """Calls NumPy without its warnings of overflow, at a tenth of the cost of ``np.errstate``.

    NumPy keeps its error state in a context variable; here is a context, for each thread, in which
    it is set for good.
    """

    def __init__(self) -> None:
        self.run = _QUIET.copy().run


_QUIET = contextvars.Context()  # to be copied: one thread at a time can be in a context
_QUIET.run(np.seterr, all="ignore")
_quiet = _Quiet()


# What other libraries call some of them.
_OTHER_NAMES = {"avg": "mean", "average": "mean", "add": "sum", "product": "prod"}


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
            meant = _OTHER_NAMES.get(op) if isinstance(op, str) else None
            hint = f" (did you mean {meant!r}?)" if meant else ""
            raise ArgumentError(
                f"unknown reduction {op!r}{hint}; known are {names}, and what ReduceOp.create makes"
            ) from None
        what = op._arithmetic
        if dtype.kind in what.domain.refused:
            raise ArgumentError(what.domain.why.format(op=op.value, dtype=dtype))
        if what.result is not None:
            if not converts:
                raise ArgumentError(
                    f"{op.value} is for single calls of all_reduce, reduce, reduce_scatter and "
                    "scan, with arrays of the host; elsewhere convert the array to float64 first"
                )
            return cls(ReduceOp.MEAN, _FLOAT64, _FLOAT64, what.function, result=what.result)
        half = dtype in (np.dtype(np.float16), BFLOAT16)
        accumulator = np.dtype(np.float32) if half else dtype
        function = what.function
        if what.own:
            function = _own(op.value, function, accumulator)
        elif what.of_complex is not None and dtype.kind == "c":
            function = what.of_complex
        return cls(op, dtype, accumulator, function)

    @property
    def name(self) -> str:
        """The op's name, as users write it."""
        op = self.op if self.result is None else _mean_as(self.result)
        return op._value_

    @property
    def told(self) -> str:
        """What the ranks tell each other of it: the name, and the digest of a user's function."""
        own = self.op._arithmetic.own
        return f"{self.name} (function {own})" if own else self.name

    @property
    def identity(self) -> Any:
        """The value that changes none that it is combined with; what a sum of nothing is.

        Raises:
            ArgumentError: there is none, or it is not known.
        """
        identity = self.op._arithmetic.identity
        if identity is not None:
            return identity(self.dtype) if callable(identity) else identity
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

    def combining(self, left: Array, right: Array) -> Callable[[Array], None]:
        """Return what does ``combine`` of two arrays again and again, and looks up less for it.

        It has a context of its own: no two threads may call it at the same time, nor it itself.
        """
        run, function = _QUIET.copy().run, self.function

        def combine(out: Array) -> None:
            run(function, left, right, out=out)

        return combine

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
        if type(out) is not np.ndarray and getattr(out, "valueless", False):
            return  # see ``simulation.abstract``; block by block, it would take minutes
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

    def scan(self, parts: Sequence[Array], outs: Sequence[Array]) -> None:
        """Reduce the parts up to each one, with the bits of ``reduce`` of these parts alone.

        The last of ``outs`` gets what comes of all parts, the one before it what comes of all but
        the last part, and so on; of no parts, ``identity`` comes. ``outs`` may be the ``parts``.

        Every prefix is combined within its aligned block of 2, 4, 8, ... parts first; where that is
        the right half of the next block, all of the left half then comes before it (J. Sklansky,
        "Conditional-sum addition logic", 1960). Blocks are those of the canonical tree.
        """
        count, size = len(parts), outs[-1].size
        rounds = self.accumulator is not self.dtype
        block = max(1, 4 * BLOCK // len(outs))  # of all arrays together, it stays in cache
        scratch = np.empty((count if rounds else 0, min(block, size)), self.accumulator)
        for start in range(0, size, block):
            place = slice(start, min(start + block, size))
            totals = [part[place] for part in parts]
            results = [out[place] for out in outs]
            room = results
            if rounds:
                room = list(scratch[:, : results[-1].size])
                totals = [self.load(total, row) for total, row in zip(totals, room, strict=True)]
            stride = 1
            while stride < count:
                for i in (i for i in range(count) if i & stride):
                    self.combine(totals[i // stride * stride - 1], totals[i], room[i])
                    totals[i] = room[i]
                stride *= 2
            # Backwards: a result may stand where the one behind it was combined.
            for result, ends in zip(reversed(results), range(count, -1, -1), strict=False):
                if ends:
                    self.store(totals[ends - 1], result, ends)
                else:
                    result.fill(self.identity)

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
