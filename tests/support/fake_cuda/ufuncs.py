"""``cupy.ufunc``: NumPy's functions by element, with what CuPy takes and refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.fake_cuda.arrays import ndarray, new
from support.fake_cuda.launch import check_device, launch

# What CuPy's have `at` for; others say that it is not supported.
_SCATTERS = {"add", "subtract", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor"}
_SCATTER_TYPES = "ilILqQefdFD"


class ufunc:
    """A function by element."""

    def __init__(self, name: str) -> None:
        self._numpy: Any = getattr(np, name)
        self.name = f"cupy_{self._numpy.__name__}"
        self.__name__ = self.name
        self.nin: int = self._numpy.nin
        self.nout: int = self._numpy.nout
        self.nargs = self.nin + self.nout

    def __repr__(self) -> str:
        return f"<ufunc '{self.name}'>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        dtype = kwargs.pop("dtype", None)
        casting = kwargs.pop("casting", "same_kind")
        if kwargs:
            raise TypeError(f"Wrong arguments {kwargs}")
        if not self.nin <= len(args) <= self.nargs:
            raise TypeError(
                f"Wrong number of arguments for {self.name!r}. It must be either {self.nin} or "
                f"{self.nargs} (with outputs), but given {len(args)}."
            )
        inputs, outs = args[: self.nin], args[self.nin :]
        if out is not None:
            if outs:
                raise ValueError("Cannot specify 'out' as both a positional and keyword argument")
            outs = out if isinstance(out, tuple) else (out,)
            if len(outs) != self.nout:
                raise ValueError("'out' must be a tuple of arrays")
        outs = (*outs, *[None] * (self.nout - len(outs)))
        return self._run(inputs, outs, dtype, casting)

    def _run(self, inputs: Any, outs: Any, dtype: Any, casting: Any) -> Any:
        for value in (*inputs, *[o for o in outs if o is not None]):
            _check_operand(value)
        arrays = [value for value in inputs if isinstance(value, ndarray)]
        given = [value for value in outs if value is not None]
        if any(not isinstance(value, ndarray) for value in given):
            raise TypeError("Output arguments type must be cupy.ndarray")
        check_device(*arrays, *given)
        shape = np.broadcast_shapes(*[a.shape for a in (*arrays, *given)])
        shown = [np.empty(0, v.dtype) if isinstance(v, ndarray) else v for v in inputs]
        options = {} if dtype is None else {"dtype": dtype}
        with np.errstate(all="ignore"):
            found = self._numpy(*shown, **options)
        results = []
        for one, made in zip(found if self.nout > 1 else [found], outs, strict=True):
            results.append(_result(np.asarray(one).dtype, shape, made, casting))
        hosts = [value._host if isinstance(value, ndarray) else value for value in inputs]
        targets = tuple(result._host for result in results)

        def work() -> None:
            self._numpy(*hosts, out=targets, casting="unsafe", **options)

        launch(self.name, work, arrays, results)
        return results[0] if self.nout == 1 else tuple(results)

    def outer(self, A: Any, B: Any, **kwargs: Any) -> Any:
        """For all pairs."""
        first = A.reshape(A.shape + (1,) * B.ndim)
        return self(first, B.reshape((1,) * A.ndim + B.shape), **kwargs)

    def at(self, a: ndarray, indices: Any, b: Any = None) -> None:
        """In place, at indices, which may repeat."""
        if self._numpy.__name__ not in _SCATTERS:
            raise NotImplementedError(f"`{self.name}.at` is not supported yet")
        if a.dtype.char not in _SCATTER_TYPES:
            raise TypeError(f"scatter is not supported for {a.dtype}")
        parts = indices if isinstance(indices, tuple) else (indices,)
        arrays = [p for p in (*parts, b) if isinstance(p, ndarray)]
        real = tuple(p._host if isinstance(p, ndarray) else p for p in parts)
        value = b._host if isinstance(b, ndarray) else b
        target = a._host

        def work() -> None:
            self._numpy.at(target, real if len(real) > 1 else real[0], value)

        launch(f"{self.name}.at", work, [a, *arrays], [a])

    def reduce(
        self,
        array: ndarray,
        axis: Any = 0,
        dtype: Any = None,
        out: Any = None,
        keepdims: bool = False,
    ) -> Any:
        """Of add and multiply only."""
        if self.name == "cupy_add":
            return array.sum(axis, dtype, out, keepdims)
        if self.name == "cupy_multiply":
            return array.prod(axis, dtype, out, keepdims)
        raise NotImplementedError(f"`{self.name}.reduce` is not supported yet")

    def accumulate(self, array: ndarray, axis: Any = 0, dtype: Any = None, out: Any = None) -> Any:
        """Of add and multiply only."""
        if self.name == "cupy_add":
            return array.cumsum(axis, dtype, out)
        if self.name == "cupy_multiply":
            return array.cumprod(axis, dtype, out)
        raise NotImplementedError(f"`{self.name}.accumulate` is not supported yet")

    def reduceat(
        self, array: ndarray, indices: Any, axis: int = 0, dtype: Any = None, out: Any = None
    ) -> Any:
        """Of add only."""
        if self.name != "cupy_add":
            raise NotImplementedError(f"`{self.name}.reduceat` is not supported yet")
        from support.fake_cuda.launch import run

        where = indices.get() if isinstance(indices, ndarray) else np.asarray(indices)
        return run("reduceat", lambda a: np.add.reduceat(a, where, axis, dtype), [array], out=out)


def _check_operand(value: Any) -> None:
    if not isinstance(value, (ndarray, int, float, complex, np.generic)):
        raise TypeError(f"Unsupported type {type(value)}")


def _result(dtype: Any, shape: tuple[int, ...], out: ndarray | None, casting: Any) -> ndarray:
    if out is None:
        return new(shape, dtype)
    if out.shape != shape:
        raise ValueError("Out shape is mismatched")
    if not np.can_cast(dtype, out.dtype, casting):
        raise TypeError(
            f"Cannot cast output operand from {dtype!r} to {out.dtype!r} "
            f"with casting rule '{casting}'"
        )
    return out


_NAMES = """
add subtract multiply divide true_divide floor_divide power remainder mod fmod negative positive
absolute abs sign square sqrt cbrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan arcsin
arccos arctan arctan2 sinh cosh tanh arcsinh arccosh arctanh floor ceil trunc rint maximum minimum
fmax fmin isfinite isinf isnan signbit copysign logaddexp logaddexp2 hypot equal not_equal less
less_equal greater greater_equal logical_and logical_or logical_not logical_xor bitwise_and
bitwise_or bitwise_xor invert bitwise_not left_shift right_shift conj conjugate nextafter
modf frexp fabs pow float_power
"""


def ufuncs() -> dict[str, ufunc]:
    """All of them by name."""
    made = {name: ufunc(name) for name in _NAMES.split()}
    # As in NumPy, some have two names.
    for alias, name in (("abs", "absolute"), ("true_divide", "divide"), ("mod", "remainder")):
        made[alias] = made[name]
    return made
