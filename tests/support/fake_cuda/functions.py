"""Functions of arrays that are no ufuncs: NumPy's, run on a stream."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.fake_cuda.arrays import ndarray
from support.fake_cuda.creation import array
from support.fake_cuda.launch import launch, run
from support.fake_cuda.lifting import (
    HALVES,
    Function,
    accumulation,
    argument,
    known_later,
    lifted,
    need_array,
    reduction,
    selection,
    viewing,
)

# Functions whose signatures differ from NumPy's.


def concatenate(
    tup: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: Any = "same_kind"
) -> Any:
    arrays = list(tup)
    for one in arrays:
        if not isinstance(one, ndarray):
            raise TypeError(f"Only cupy arrays can be concatenated: {type(one)}")
    return run(
        "concatenate",
        lambda *parts: np.concatenate(parts, axis, dtype=dtype, casting=casting),
        arrays,
        out=out,
    )


def stack(
    tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: Any = "same_kind"
) -> Any:
    return concatenate(
        [expand_dims(one, axis) for one in tup], axis, out, dtype=dtype, casting=casting
    )


def expand_dims(a: ndarray, axis: Any) -> ndarray:
    return a._of(np.expand_dims(a._host, axis))


def copyto(dst: ndarray, src: Any, casting: Any = "same_kind", where: Any = None) -> None:
    if not isinstance(dst, ndarray):
        raise AttributeError("'memoryview' object has no attribute 'copy_from_async'")
    if isinstance(src, np.ndarray) and src.ndim:
        raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
    shown = np.ones((), src.dtype) if isinstance(src, ndarray) else np.asarray(src)
    if isinstance(src, ndarray) and not np.can_cast(src.dtype, dst.dtype, casting):
        raise TypeError(f"Cannot cast {src.dtype} to {dst.dtype} in {casting} casting mode")
    shape = src.shape if isinstance(src, ndarray) else shown.shape
    np.broadcast_to(np.ones((), dst.dtype), dst.shape)
    if np.broadcast_shapes(shape, dst.shape) != dst.shape:
        raise ValueError(f"could not broadcast input array from shape {shape} into {dst.shape}")
    reads = [one for one in (src, where) if isinstance(one, ndarray)]
    source = src._host if isinstance(src, ndarray) else shown
    mask = where._host if isinstance(where, ndarray) else True if where is None else where
    target = dst._host
    launch(
        "copyto",
        lambda: np.copyto(target, source, casting="unsafe", where=mask),
        reads if where is None else [*reads, dst],
        [dst],
    )


def _without_bfloat16(function: Any) -> Any:
    """What CuPy has in float32 at the least."""

    def found(*args: Any) -> Any:
        result = np.asarray(function(*args))
        return result.astype(np.float32) if result.dtype == HALVES[1] else result

    return found


def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if (x is None) != (y is None):
        raise ValueError("Must provide both 'x' and 'y' or neither.")
    if x is None:
        return FUNCTIONS["nonzero"](condition)
    need_array("where", condition)
    return run("where", _without_bfloat16(np.where), [condition, x, y])


def clip(a: Any, a_min: Any, a_max: Any, out: Any = None) -> Any:
    need_array("clip", a)
    return run("clip", _without_bfloat16(np.clip), [a, a_min, a_max], out=out)


def may_share_memory(a: ndarray, b: ndarray, max_work: Any = None) -> bool:
    need_array("may_share_memory", b)
    return bool(np.may_share_memory(a._host, b._host))


def shares_memory(a: ndarray, b: ndarray, max_work: Any = None) -> bool:
    need_array("shares_memory", b)
    return bool(np.shares_memory(a._host, b._host))


def reshape(a: ndarray, newshape: Any, order: str = "C", *, copy: Any = None) -> ndarray:
    return a.reshape(newshape, order=order, copy=copy)


def ravel(a: ndarray, order: str = "C") -> ndarray:
    return a.ravel(order)


def copy(a: ndarray, order: str = "K") -> ndarray:
    return a.copy("C" if order == "K" else order)


def shape(a: Any) -> tuple[int, ...]:
    return a.shape if isinstance(a, ndarray) else np.shape(a)


def ndim(a: Any) -> int:
    return len(shape(a))


def size(a: Any, axis: int | None = None) -> int:
    sizes = shape(a)
    return int(np.prod(sizes, dtype=int)) if axis is None else sizes[axis]


def result_type(*args: Any) -> Any:
    return np.result_type(*[a.dtype if isinstance(a, ndarray) else a for a in args])


def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    return bool(np.can_cast(from_.dtype if isinstance(from_, ndarray) else from_, to, casting))


def iscomplexobj(x: Any) -> bool:
    return bool(x.dtype.kind == "c") if isinstance(x, ndarray) else bool(np.iscomplexobj(x))


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    if a1.shape != a2.shape:
        return array(False)
    return run("array_equal", lambda a, b: np.bool_(np.array_equal(a, b, equal_nan)), [a1, a2])


def _argsort(a: Any, axis: Any = -1, kind: Any = None) -> Any:
    need_array("argsort", a)
    return run("argsort", lambda host: np.argsort(host, axis, kind="stable"), [a])


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    need_array("norm", x)
    return run("norm", lambda host: np.linalg.norm(host, ord, axis, keepdims), [x])


def count_nonzero(a: Any, axis: Any = None) -> Any:
    need_array("count_nonzero", a)
    return run("count_nonzero", lambda host: np.asarray(np.count_nonzero(host, axis)), [a])


_LIFTED = """
take a indices axis=None out=None
tile A reps
triu m k=0
tril m k=0
roll a shift axis=None
flip a axis=None
outer a b out=None
diff a n=1 axis=-1 prepend=None append=None
searchsorted a v side='left' sorter=None
interp x xp fp left=None right=None period=None
nan_to_num x copy=True nan=0.0 posinf=None neginf=None
round a decimals=0 out=None
take_along_axis a indices axis
diag v k=0
kron a b
cross a b axisa=-1 axisb=-1 axisc=-1 axis=None
isclose a b rtol=1e-05 atol=1e-08 equal_nan=False
vstack tup dtype=None casting='same_kind'
hstack tup dtype=None casting='same_kind'
std a axis=None dtype=None out=None ddof=0 keepdims=False
var a axis=None dtype=None out=None ddof=0 keepdims=False
median a axis=None out=None overwrite_input=False keepdims=False
sort a axis=-1 kind=None
trace a offset=0 axis1=0 axis2=1 dtype=None out=None
"""
_VIEWING = """
split ary indices_or_sections axis=0
array_split ary indices_or_sections axis=0
transpose a axes=None
swapaxes a axis1 axis2
moveaxis a source destination
squeeze a axis=None
broadcast_to array shape
diagonal a offset=0 axis1=0 axis2=1
rollaxis a axis start=0
"""
_KNOWN_LATER = """
repeat a repeats axis=None
bincount x weights=None minlength=None
nonzero a
flatnonzero a
argwhere a
unique ar return_index=False return_inverse=False return_counts=False axis=None equal_nan=True
"""

_SELECTIONS = "max min amax amin all any nanmax nanmin"


def _table(make: Any, table: str) -> dict[str, Function]:
    lines = [line.partition(" ") for line in table.strip().splitlines()]
    return {name: make(name, parameters) for name, _, parameters in lines}


FUNCTIONS: dict[str, Any] = {
    **_table(lifted, _LIFTED),
    **_table(viewing, _VIEWING),
    **_table(known_later, _KNOWN_LATER),
    **{name: reduction(name) for name in ("sum", "prod", "mean", "nansum")},
    **{name: selection(name) for name in _SELECTIONS.split()},
    **{name: argument(name) for name in ("argmax", "argmin")},
    **{name: accumulation(name) for name in ("cumsum", "cumprod")},
    "argsort": _argsort,
    **{
        function.__name__: function
        for function in (
            concatenate, stack, expand_dims, copyto, where, clip, may_share_memory, shares_memory,
            reshape, ravel, copy, shape, ndim, size, result_type, can_cast, iscomplexobj,
            array_equal, count_nonzero,
        )
    },
}  # fmt: skip
