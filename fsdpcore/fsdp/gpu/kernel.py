"""One pass over arrays on a GPU: kernels made of a formula in C, launched with CuPy.

Such a pass does little arithmetic per byte, so it takes as long as its bytes do. It takes four
neighbouring elements of every array to a thread, as one access to memory each, wherever the arrays
begin. For that they have to begin equally far from a multiple of four elements, as slices of
buffers do that are cut in the same places; of an array that does not, they are four accesses.

Their results are those of the same operations one by one, see ``core/gpu_kernel.py``; passes wait
for memory, not for arithmetic, and are no slower.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpcore.core.array_module import address, array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.gpu_kernel import KernelSource

LANES = 4
"""Elements to a thread."""

_TYPES = "ABCDEFGH"  # what kernels call the types of their arrays, in order


@dataclass(frozen=True)
class Formula:
    """What is done to the elements of some arrays that have the same index.

    Attributes:
        name: of the kernel, as profilers show it; a C identifier.
        reads: names of the arrays that are only read.
        updates: of those that are read and written.
        writes: of those that are only written.
        scalars: names of further numbers.
        body: C statements. Each of these names is a variable of the type ``W``: what was read,
            widened; what is in it at the end is rounded and written, if it is to be.
    """

    name: str
    reads: tuple[str, ...]
    updates: tuple[str, ...]
    writes: tuple[str, ...]
    scalars: tuple[str, ...]
    body: str

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of all arrays, in the order in which a kernel takes them."""
        return (*self.reads, *self.updates, *self.writes)


FOUR = f"""
template <typename E> struct alignas({LANES} * sizeof(E)) Four {{ E of[{LANES}]; }};
"""
"""Neighbouring elements that are read and written as one."""

_PREAMBLE = string.Template(
    """
typedef $wide W;
$four
static inline __device__ void ${name}_of_one($variables) {
$body
}
"""
)

# skew: how many elements arrays begin behind a multiple of four; -1 for one element to a thread.
# apart: a bit for each array that begins elsewhere.
_OPERATION = string.Template(
    """
const long long start = skew < 0 ? i : $lanes * (long long)i - skew;
const long long stop = skew < 0 ? start + 1 : start + $lanes;
if (skew >= 0 && start >= 0 && stop <= n) {
  $load
  #pragma unroll
  for (int lane = 0; lane < $lanes; ++lane) {
    $take_lane
    ${name}_of_one($arguments);
    $put_lane
  }
  $store
} else {
  #pragma unroll 1
  for (long long at = start < 0 ? 0 : start; at < stop && at < n; ++at) {
    $take
    ${name}_of_one($arguments);
    $put
  }
}
"""
)

_LOAD = """
if (apart & $bit) {
  #pragma unroll
  for (int lane = 0; lane < $lanes; ++lane) four_$name.of[lane] = $name[start + lane];
} else four_$name = *reinterpret_cast<const Four<$type>*>(&$name[start]);
"""
_STORE = """
if (apart & $bit) {
  #pragma unroll
  for (int lane = 0; lane < $lanes; ++lane) $name[start + lane] = four_$name.of[lane];
} else *reinterpret_cast<Four<$type>*>(&$name[start]) = four_$name;
"""


def source(formula: Formula, wide: np.dtype[Any]) -> KernelSource:
    """Return the kernel of a formula that computes in ``wide``, float32 or float64."""
    ctype = {"float32": "float", "float64": "double"}[wide.name]
    types = dict(zip(formula.arrays, _TYPES, strict=False))
    read, written = (*formula.reads, *formula.updates), (*formula.updates, *formula.writes)

    def lines(names: Sequence[str], text: str) -> str:
        template, order = string.Template(text), formula.arrays
        return "\n".join(
            template.substitute(name=n, type=types[n], bit=1 << order.index(n), lanes=LANES)
            for n in names
        )

    variables = [f"W {name}" for name in (*formula.reads, *formula.scalars)]
    variables += [f"W &{name}" for name in written]
    params = [f"raw {types[name]} {name}" for name in formula.reads]
    params += [f"{wide.name} {name}" for name in formula.scalars]
    params += ["int64 n", "int32 skew", "int32 apart"]
    unset = "\n".join(f"W one_{name};" for name in formula.writes)
    operation = _OPERATION.substitute(
        lanes=LANES,
        name=formula.name,
        load=lines(formula.arrays, "Four<$type> four_$name;") + lines(read, _LOAD),
        take_lane=lines(read, "W one_$name = static_cast<W>(four_$name.of[lane]);") + unset,
        put_lane=lines(written, "four_$name.of[lane] = static_cast<$type>(one_$name);"),
        store=lines(written, _STORE),
        take=lines(read, "W one_$name = static_cast<W>($name[at]);") + unset,
        put=lines(written, "$name[at] = static_cast<$type>(one_$name);"),
        arguments=", ".join(
            [f"one_{name}" for name in formula.reads]
            + list(formula.scalars)
            + [f"one_{name}" for name in written]
        ),
    )
    return KernelSource(
        in_params=", ".join(params),
        out_params=", ".join(f"raw {types[name]} {name}" for name in written),
        operation=operation,
        name=formula.name,
        preamble=_PREAMBLE.substitute(
            wide=ctype,
            four=FOUR,
            name=formula.name,
            variables=", ".join(variables),
            body=formula.body,
        ),
    )


def run_pass(
    formula: Formula,
    arrays: Mapping[str, Array],
    scalars: Sequence[float],
    wide: np.dtype[Any],
    *,
    lanes: int = LANES,
    block_size: int = 128,
) -> None:
    """Enqueue one kernel over all elements on the current stream; does not wait for it.

    Args:
        formula: what to do.
        arrays: the arrays that it names, of one GPU, which is the current device: contiguous, of
            one size, and not overlapping. Of floating dtypes.
        scalars: its numbers, in its order; rounded to ``wide``.
        wide: in which to compute, float32 or float64.
        lanes: 1 has one element to a thread.
        block_size: threads of a block.
    """
    taken = [arrays[name] for name in formula.arrays]
    size = taken[0].size
    if not size:
        return
    skew, apart = _alignment(taken) if lanes == LANES else (-1, 0)
    kernel = _compiled(array_module(taken[0]), formula, wide)
    threads = size if skew < 0 else -(-(size + skew) // LANES)
    reads, others = taken[: len(formula.reads)], taken[len(formula.reads) :]
    kernel(*reads, *scalars, size, skew, apart, *others, size=threads, block_size=block_size)


def skew_of(array: Array) -> int:
    """Return how many elements an array begins behind a multiple of four."""
    return address(array) // array.itemsize % LANES


def _alignment(arrays: Sequence[Array]) -> tuple[int, int]:
    """Return the skew of most arrays, and a bit for each of the others."""
    skews = [skew_of(array) for array in arrays]
    common = max(skews, key=skews.count)
    return common, sum(1 << i for i, skew in enumerate(skews) if skew != common)


@functools.cache
def _compiled(cupy: Any, formula: Formula, wide: np.dtype[Any]) -> Any:
    return source(formula, wide).compiled(cupy)
