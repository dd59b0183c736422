"""``average_metrics``: numbers by name, averaged over the ranks in one call."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsdpcore.collectives import all_reduce
from fsdpcore.collectives.consensus import compare
from fsdpcore.collectives.objects import all_gather_object
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_choice, as_finite, as_instance, as_name, kind_of
from fsdpcore.core.disagreement import Disagreement, grouped, in_short
from fsdpcore.core.errors import ArgumentError, MismatchError
from fsdpcore.core.foreign import as_numpy, is_foreign, refuse_traced
from fsdpcore.core.text import name_ranks
from fsdpcore.core.work import Deadline

_Shapes = Mapping[str, Sequence[int]]
_SHOWN = 8  # names in a message


def average_metrics(
    metrics: Mapping[str, Any],
    backend: Backend,
    *,
    weight: float = 1.0,
    missing: str = "error",
    timeout: float | None = None,
    label: str = "",
) -> dict[str, Any]:
    """Average numbers by name over the ranks, each rank's with its weight; blocks.

    That is the sum of weight times value, divided by the sum of the weights, in float64: one
    ``all_reduce`` of all values together, behind a comparison of the names. Every rank gets the
    same bits, those that ``all_reduce`` gives.

    Args:
        metrics: real numbers, or arrays of them (also of this rank's GPU), by name, in any order. A
            name has a number, or arrays of one shape, on all ranks.
        backend: the group. All its ranks call this, in the same order of collectives.
        weight: of this rank's values, 0 or more; the rows that they are of, for instance. With 0
            they do not count at all, not even nan. (For an average of ranks, leave it at 1.)
        missing: "error" if all ranks must have the same names; "skip" if a rank without one counts
            for that with weight 0. The same on all ranks.
        timeout: seconds for all of it; by default ``backend.timeout``.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        A float for each number and 0-d array, a float64 array for others; in the order of
        ``metrics``, then names that only other ranks have, sorted. nan where all weights are 0.

    Raises:
        ArgumentError: a value or another argument is wrong. Nothing was sent.
        MismatchError: the ranks differ in names or shapes; says which names are missing where.
        CommTimeoutError, PeerFailedError: as ``all_reduce``.

    Example::

        mean = fc.average_metrics({"loss": loss, "accuracy": hits / rows}, backend, weight=rows)
        print(f"{mean['loss']:.3f}")
    """
    as_instance(backend, Backend, "the backend", "a Backend", "it comes behind the metrics")
    as_instance(label, str, "average_metrics: a label", "a string")
    as_choice(missing, ("error", "skip"), "average_metrics: missing")
    factor = as_finite(weight, "average_metrics: weight", minimum=0)
    mine = _values(metrics, backend)
    shapes: _Shapes = {name: array.shape for name, array in mine.items()}
    deadline = Deadline(backend.timeout if timeout is None else timeout, backend.root.clock)
    what = f"average_metrics{label and f': {label}'}"
    if missing == "error":
        _compare(shapes, backend, what, timeout)
    else:
        shapes = _union(shapes, backend, what, timeout)
    # Of each name, sorted, its weight and its values.
    parts: list[Any] = [[]]
    for name in sorted(shapes):
        counts = factor > 0 and name in mine  # nan times 0 is not 0
        values = mine[name].reshape(-1) if counts else np.zeros(math.prod(shapes[name]))
        parts += [[factor if counts else 0.0], factor * values]
    sums: Array = np.concatenate(parts)
    seconds = None if timeout is None else deadline.remaining()
    all_reduce(sums, backend, out=sums, timeout=seconds, label=what)
    averages = _averages(sums, shapes)
    return {name: averages[name] for name in [*mine, *sorted(shapes.keys() - mine.keys())]}


def _values(metrics: Mapping[str, Any], backend: Backend) -> dict[str, Array]:
    """Return the values as arrays of float64."""
    as_instance(metrics, Mapping, "average_metrics: the metrics", "a dict of numbers by name")
    found = {}
    for name, value in metrics.items():
        as_name(name, "average_metrics: a name")
        refuse_traced(value)
        device = backend.device
        given = device.to_host(value) if not device.on_host and device.claims(value) else value
        what = f"average_metrics: {name!r}"
        if is_foreign(given) or isinstance(given, np.ma.MaskedArray):
            array = as_numpy(given, what)
        else:
            try:
                array = np.asarray(given)
            except (TypeError, ValueError):
                array = np.empty(0, object)
        if array.dtype.kind not in "biuf" and array.dtype.isbuiltin != 2:  # 2: of ml_dtypes
            raise ArgumentError(
                f"{what} must be a real number, or an array of such, got {kind_of(value)}"
            )
        found[name] = array.astype(np.float64)
    return found


def _compare(shapes: _Shapes, backend: Backend, what: str, timeout: float | None) -> None:
    """Check that all ranks have the same names and shapes."""

    def message(found: Disagreement) -> str:
        said = [(text, ranks) for text, ranks in found.groups if text.startswith("{")]
        return _differences([(json.loads(text), ranks) for text, ranks in said], what)

    compare(backend, what, [json.dumps(shapes, sort_keys=True)], message, timeout=timeout)


def _union(shapes: _Shapes, backend: Backend, what: str, timeout: float | None) -> _Shapes:
    """Return the shapes of all names that any rank has."""
    every = all_gather_object(shapes, backend, timeout=timeout, label=what)
    found: dict[str, Any] = {}
    for each in every:
        found |= each
    if any(shape != found[name] for each in every for name, shape in each.items()):
        rows = [(each, [rank]) for each, rank in zip(every, backend.ranks, strict=True)]
        raise MismatchError(_differences(rows, what, missing=False))
    return found


def _differences(
    rows: Sequence[tuple[_Shapes, Sequence[int]]], what: str, *, missing: bool = True
) -> str:
    """Say which names are missing on which ranks, and which have different shapes."""
    complaints = []
    for name in sorted({name for shapes, _ in rows for name in shapes}):
        lacking = sorted(rank for shapes, ranks in rows for rank in ranks if name not in shapes)
        if lacking and missing:
            complaints.append(f"{name!r} is missing on {name_ranks(lacking)}")
        having = [(shapes[name], ranks) for shapes, ranks in rows if name in shapes]
        pairs = [(str(tuple(shape)), rank) for shape, ranks in having for rank in ranks]
        groups = grouped([shape for shape, _ in pairs], [rank for _, rank in pairs])
        if len(groups) > 1:
            said = [f"{shape} on {name_ranks(ranks)}" for shape, ranks in in_short(groups)]
            complaints.append(f"{name!r} has the shape {', but '.join(said)}")
    more = len(complaints) - _SHOWN
    shown = "; ".join(complaints[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return f"{what}: the ranks have different metrics: {shown}"


def _averages(sums: Array, shapes: _Shapes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    for name in sorted(shapes):
        end = at + 1 + math.prod(shapes[name])
        with np.errstate(divide="ignore", invalid="ignore"):
            values = sums[at + 1 : end] / sums[at]
        found[name] = values.reshape(shapes[name]) if shapes[name] else float(values[0])
        at = end
    return found
