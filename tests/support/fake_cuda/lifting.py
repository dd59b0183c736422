"""Makes functions of arrays of a device out of NumPy's, with CuPy's signatures."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from support.fake_cuda.arrays import ndarray
from support.fake_cuda.creation import array
from support.fake_cuda.launch import run

Function = Callable[..., Any]
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def need_array(name: str, value: Any) -> None:
    """Raise ``TypeError`` for what is no array of a device."""
    if not isinstance(value, ndarray):
        raise TypeError(f"{name} takes arrays of a device, not {type(value)}")


def _signature(text: str) -> inspect.Signature:
    """Of "a axis=-1": words, with defaults that are literals."""
    parameters = []
    for word in text.split():
        name, _, default = word.partition("=")
        value = ast.literal_eval(default) if default else inspect.Parameter.empty
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(name, kind, default=value))
    return inspect.Signature(parameters)


def _bound(name: str, parameters: str, call: Callable[[Any, dict[str, Any]], Any]) -> Function:
    """A function that calls ``call(first argument, others that were given)``."""
    signature = _signature(parameters)
    first = next(iter(signature.parameters))

    def function(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        return call(given.pop(first), given)

    function.__name__ = name
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def lifted(name: str, parameters: str) -> Function:
    """A function of an array, or of a sequence of arrays, whose result is new."""
    numpy = getattr(np, name)

    def call(a: Any, given: dict[str, Any]) -> Any:
        for one in a if isinstance(a, (list, tuple)) and a else [a]:
            need_array(name, one)
        out = given.pop("out", None)
        return run(name, numpy, [a], given, out)

    return _bound(name, parameters, call)


def viewing(name: str, parameters: str) -> Function:
    """A function whose result is views of the array."""
    numpy = getattr(np, name)

    def call(a: Any, given: dict[str, Any]) -> Any:
        need_array(name, a)
        found = numpy(a._host, **given)
        several = isinstance(found, (list, tuple))
        return [a._of(one) for one in found] if several else a._of(found)

    return _bound(name, parameters, call)


def known_later(name: str, parameters: str) -> Function:
    """A function whose result is as large as the values have it: the host waits for them."""
    numpy = getattr(np, name)

    def call(a: Any, given: dict[str, Any]) -> Any:
        need_array(name, a)
        found = numpy(
            a.get(), **{n: v.get() if isinstance(v, ndarray) else v for n, v in given.items()}
        )
        return tuple(array(one) for one in found) if isinstance(found, tuple) else array(found)

    return _bound(name, parameters, call)


def reduction(name: str) -> Function:
    """A function like sum. Half precision is added in single, as on a GPU."""
    numpy = getattr(np, name)

    def reduced(
        a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> Any:
        need_array(name, a)
        result = a.dtype if dtype is None else np.dtype(dtype)
        wide = np.float32 if result in HALVES else dtype

        def work(host: Any) -> Any:
            value = numpy(host, axis=axis, dtype=wide, keepdims=keepdims)
            return value.astype(result) if result in HALVES else value

        return run(name, work, [a], out=out)

    reduced.__name__ = name
    return reduced


def selection(name: str) -> Function:
    """A function like max."""
    numpy = getattr(np, name)

    def selected(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        need_array(name, a)
        return run(name, lambda host: numpy(host, axis=axis, keepdims=keepdims), [a], out=out)

    selected.__name__ = name
    return selected


def argument(name: str) -> Function:
    """A function like argmax."""
    numpy = getattr(np, name)

    def found(
        a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> Any:
        need_array(name, a)
        if dtype is not None:
            raise NotImplementedError(f"the stand-in has no dtype for {name}")
        return run(name, lambda host: numpy(host, axis=axis, keepdims=keepdims), [a], out=out)

    found.__name__ = name
    return found


def accumulation(name: str) -> Function:
    """A function like cumsum."""
    numpy = getattr(np, name)

    def accumulated(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        need_array(name, a)
        return run(name, lambda host: numpy(host, axis=axis, dtype=dtype), [a], out=out)

    accumulated.__name__ = name
    return accumulated
