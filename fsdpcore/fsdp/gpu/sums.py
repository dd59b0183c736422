"""Sums of powers and maxima over many arrays on a GPU, in float64, that the host waits for once.

A fixed number of threads adds up what each of them reads, into a slot of its own; the next array is
added to the same slots, and in the end they are folded into one number. All of it is enqueued in
order, so that the same arrays give the same bits.
"""

from __future__ import annotations

import functools
import string
from typing import Any, Literal

from fsdpcore.core.buffers import Array
from fsdpcore.core.gpu_kernel import KernelSource
from fsdpcore.fsdp.gpu.kernel import FOUR, LANES, skew_of

SumKind = Literal["square", "absolute", "power", "largest"]

SLOTS = 2**18
"""Threads; enough for every processor of a large GPU."""

_FOLD = 64  # slots become so many times fewer in one kernel

_TERMS: dict[SumKind, str] = {
    "square": "value * value",
    "absolute": "fabs(value)",
    "power": "pow(fabs(value), p)",
    "largest": "fabs(value)",
}
_SUM = "return total + term;"
# nan is larger than everything, and stays.
_LARGEST = "return total != total || term <= total ? total : term;"

_TERM = string.Template(
    """
static inline __device__ double term_of(double value, double by, double p) {
  if (by != 1) value = value / by;
  return $term;
}
"""
)
_JOIN = string.Template(
    """
static inline __device__ double joined(double total, double term) { $join }
"""
)

# Several loads are under way at a time, as nothing has to be asked before the next one: groups that
# lie in the array as a whole, and by themselves the few elements before and behind them.
_ADD = string.Template(
    """
const double by = divisor[0];
const long long first = skew ? 1 : 0;
const long long last = (n + skew) / $lanes > first ? (n + skew) / $lanes : first;
double total = slots[i];
#pragma unroll 4
for (long long group = first + i; group < last; group += $slots) {
  const Four<A> four = *reinterpret_cast<const Four<A>*>(&values[$lanes * group - skew]);
  #pragma unroll
  for (int lane = 0; lane < $lanes; ++lane)
    total = joined(total, term_of(static_cast<double>(four.of[lane]), by, p));
}
if (i == 0) {
  const long long begin = $lanes * first - skew, end = $lanes * last - skew;
  #pragma unroll 1
  for (long long at = 0; at < begin && at < n; ++at)
    total = joined(total, term_of(static_cast<double>(values[at]), by, p));
  #pragma unroll 1
  for (long long at = end; at < n; ++at)
    total = joined(total, term_of(static_cast<double>(values[at]), by, p));
}
slots[i] = total;
"""
)

_FOLDED = string.Template(
    """
double total = slots[i];
for (int part = 1; part < $fold; ++part) total = joined(total, slots[i + part * left]);
folded[i] = total;
"""
)


class Slots:
    """One number of all arrays that were added: of ``kind``, with the power ``p``.

    Args:
        cupy: the module.
        kind: what is made of the elements. The largest is nan if one of them is.
        p: of "power".
        divisor: divides every element first; ``total()`` of something else, which need not be
            known to the host. None for 1.
    """

    def __init__(
        self, cupy: Any, kind: SumKind, p: float = 1.0, divisor: Array | None = None
    ) -> None:
        self._cupy = cupy
        self._kind: SumKind = kind
        self._p = p
        self._divisor = cupy.ones(1, "float64") if divisor is None else divisor
        self._slots = cupy.zeros(SLOTS, "float64")

    def add(self, array: Array) -> None:
        """Add the elements of a contiguous array; does not wait for it."""
        if not array.size:
            return
        skew = skew_of(array)
        add = _add_kernel(self._cupy, self._kind)
        add(array, self._divisor, self._p, array.size, skew, self._slots, size=SLOTS)

    def total(self) -> Array:
        """Return the number, as an array of one element on the GPU; does not wait for it."""
        slots: Array = self._slots
        fold = _fold_kernel(self._cupy, self._kind)
        while slots.size > 1:
            left = slots.size // _FOLD
            folded = self._cupy.empty(left, "float64")
            fold(slots, left, folded, size=left)
            slots = folded
        return slots


def add_source(kind: SumKind) -> KernelSource:
    """Return the kernel that adds an array to the slots."""
    return KernelSource(
        in_params="raw A values, raw float64 divisor, float64 p, int64 n, int32 skew",
        out_params="raw float64 slots",
        operation=_ADD.substitute(slots=SLOTS, lanes=LANES),
        name=f"add_{kind}",
        preamble=FOUR + _TERM.substitute(term=_TERMS[kind]) + _join(kind),
    )


def fold_source(kind: SumKind) -> KernelSource:
    """Return the kernel that makes fewer slots of many."""
    return KernelSource(
        in_params="raw float64 slots, int64 left",
        out_params="raw float64 folded",
        operation=_FOLDED.substitute(fold=_FOLD),
        name=f"fold_{kind}",
        preamble=_join(kind),
    )


def _join(kind: SumKind) -> str:
    return _JOIN.substitute(join=_LARGEST if kind == "largest" else _SUM)


@functools.cache
def _add_kernel(cupy: Any, kind: SumKind) -> Any:
    return add_source(kind).compiled(cupy)


@functools.cache
def _fold_kernel(cupy: Any, kind: SumKind) -> Any:
    return fold_source(kind).compiled(cupy)
