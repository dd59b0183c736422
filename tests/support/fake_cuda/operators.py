"""The operators of an array: each is the ufunc of its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
    "matmul": "matmul",
}
_COMPARISONS = {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
_UNARY = {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}


def _ufunc(name: str) -> Callable[..., Any]:
    from support.fake_cuda.namespace import lookup

    return lookup(name)  # type: ignore[return-value]


def _make() -> dict[str, Callable[..., Any]]:
    made: dict[str, Callable[..., Any]] = {}
    for operator, name in _BINARY.items():
        made[f"__{operator}__"] = lambda a, b, n=name: _ufunc(n)(a, b)
        made[f"__r{operator}__"] = lambda a, b, n=name: _ufunc(n)(b, a)
        made[f"__i{operator}__"] = lambda a, b, n=name: _ufunc(n)(a, b, out=a)
    for operator, name in _COMPARISONS.items():
        made[f"__{operator}__"] = lambda a, b, n=name: _ufunc(n)(a, b)
    for operator, name in _UNARY.items():
        made[f"__{operator}__"] = lambda a, n=name: _ufunc(n)(a)
    return made


Operators = type("Operators", (), _make())
