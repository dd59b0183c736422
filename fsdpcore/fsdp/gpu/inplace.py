"""What is done to gradients in place, on a GPU: one kernel each, and nothing allocated.

Half precision is computed in float32 and rounded once, as on the host. Arrays are contiguous and of
one GPU, the current device; the work is enqueued on the current stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.gpu.kernel import Formula, run_pass

ADD = Formula("add_into", ("values",), ("total",), (), (), "total = total + values;")
DIVIDE = Formula("divide", (), ("value",), (), ("divisor",), "value = value / divisor;")
CUT = Formula(
    "cut",
    (),
    ("value",),
    (),
    ("limit",),
    "if (value > limit) value = limit; else if (value < -limit) value = -limit;",  # nan stays
)


def add(total: Array, values: Array) -> None:
    """Add ``values``, of the same dtype and size, to ``total``."""
    run_pass(ADD, {"total": total, "values": values}, (), _wide(total))


def divide(array: Array, divisor: float) -> None:
    """Divide all elements."""
    run_pass(DIVIDE, {"value": array}, (divisor,), _wide(array))


def cut(array: Array, limit: float) -> None:
    """Bring all elements between ``-limit`` and ``limit``, which is positive, rounded first."""
    with np.errstate(over="ignore"):  # nothing lies beyond inf
        rounded = float(array.dtype.type(limit))
    run_pass(CUT, {"value": array}, (rounded,), _wide(array))


def _wide(array: Array) -> np.dtype[Any]:
    return array.dtype if array.itemsize >= 4 else np.dtype(np.float32)
