"""Measure what a transport costs and which algorithms are fastest on it: a program for its ranks.

What ``fsdpcore tune`` runs on every rank. Times are the best of several rounds in which the
algorithms take turns, so that whatever else the machine does disturbs all of them alike; a round's
time is that of the slowest rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fsdpcore import collectives
from fsdpcore.bench.cases import Case, make_cases
from fsdpcore.bench.harness.member import timed_calls
from fsdpcore.bench.harness.turns import alternate
from fsdpcore.collectives.operations.table import OPERATIONS
from fsdpcore.collectives.selection.choose import candidates, predict
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.comm.backend import Backend
from fsdpcore.core.algorithm import Algorithm
from fsdpcore.core.policy import AlgorithmRange, AlgorithmRanges, Costs, MeasuredAlgorithms, Tuning
from fsdpcore.core.reductions import Reduction

KIB, MIB = 2**10, 2**20

# How much faster another algorithm has to be to be changed to, and to be taken although the
# formulas are for another.
_CHANGE, _UNUSUAL = 1.2, 1.05
_MAX_CALLS = 200
_BURST = 16  # messages
# Some ranks are through with these before others have begun. Of many in a row, a rank would show
# how soon it may go on, and not how long such a call takes.
_ONE_WAY = ("broadcast", "reduce", "gather", "scatter", "scan", "exscan")
_DTYPE = np.dtype(np.float32)


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        messages: sizes of the messages that two ranks exchange, in bytes.
        sizes: of the collectives, as the n of the cost formulas, in bytes.
        seconds: of one round of one algorithm at one size, at least one call.
        rounds: how often every algorithm gets its turn.
    """

    messages: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: float
    rounds: int


FULL = Effort(
    (8, KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB),
    (64, KIB, 8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB),
    seconds=0.02,
    rounds=5,
)
QUICK = Effort((8, 16 * KIB, MIB), (64, 16 * KIB, MIB), seconds=0.002, rounds=3)


@dataclass(frozen=True)
class Timing:
    """How many seconds the algorithms of a collective took, at one size in bytes."""

    collective: str
    nbytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Findings:
    """What was measured.

    Attributes:
        transport: its scheme.
        tuning: what goes into the table.
        timings: all that the ranges in it were made from.
        gains: by collective, the largest factor by which the measured choice is faster than the
            one by the formulas, and the size where it is.
    """

    transport: str
    tuning: Tuning
    timings: tuple[Timing, ...]
    gains: Mapping[str, tuple[float, int]]


def measure(backend: Backend, effort: Effort) -> Findings | None:
    """Measure a job of at least two ranks; a program for every rank.

    Returns:
        The findings on rank 0, None on the others.
    """
    steps = [(name, size) for name in ALGORITHMS for size in effort.sizes]
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn())
    # Drawn between two measurements only: a thread that draws would disturb them.
    with Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=False,
        disable=backend.rank != 0,
        transient=True,
    ) as progress:
        task = progress.add_task("messages", total=len(steps) + 1)
        progress.refresh()
        costs = _measure_costs(backend, effort)
        progress.advance(task)
        timings = []
        for collective, size in steps:
            progress.update(task, description=collective, refresh=True)
            timings.append(_measure_collective(backend, collective, size, effort))
            progress.advance(task)
    if backend.rank != 0:
        return None
    return _findings(backend, costs, timings)


def _findings(backend: Backend, costs: Costs, timings: list[Timing]) -> Findings:
    p = backend.world_size
    known = {name: candidates(name, backend, _DTYPE, _op(name)) for name in ALGORITHMS}
    own = fit_own(known, timings, p)

    def usual(row: Timing) -> str:
        algorithms = known[row.collective]
        return min(
            row.seconds, key=lambda n: predict(algorithms[n], p, row.nbytes, own.get(n, costs))
        )

    best, general, gains = {}, {}, {}
    for collective in ALGORITHMS:
        rows = [timing for timing in timings if timing.collective == collective]
        best[collective] = fastest(rows, usual)
        if any(item.algorithm not in ALGORITHMS[collective] for item in best[collective]):
            general[collective] = fastest([_without_own(row) for row in rows], usual)
        gains[collective] = max(_gain(row, best[collective], usual(row)) for row in rows)
    entry = MeasuredAlgorithms(p, len(set(backend.hosts)), best, general)
    tuning = Tuning(costs, own, (entry,))
    return Findings(backend.capabilities.transport, tuning, tuple(timings), gains)


def _without_own(row: Timing) -> Timing:
    known = ALGORITHMS[row.collective]
    return replace(row, seconds={n: s for n, s in row.seconds.items() if n in known})


def _gain(row: Timing, ranges: AlgorithmRanges, usual: str) -> tuple[float, int]:
    return row.seconds[usual] / row.seconds[ranges.at(row.nbytes) or usual], row.nbytes


# Ranges and costs from times.


def fastest(rows: Sequence[Timing], usual: Callable[[Timing], str]) -> AlgorithmRanges:
    """Return which algorithm is to be taken for which sizes.

    Times vary from one measurement to the next, so the choice is the one with the smallest sum of
    ``log(its time / the best time)`` over all sizes, to which every change between two sizes adds
    ``log(_CHANGE)``, and every size where it is not the usual one ``log(_UNUSUAL)``.

    Args:
        rows: times of one collective and the same algorithms, each of another size.
        usual: the choice by the formulas.

    Returns:
        Ranges without gaps. Between two sizes that were measured, the algorithms change at the
        geometric mean.
    """
    rows = sorted(rows, key=lambda row: row.nbytes)
    # For each algorithm, the best choice for the sizes so far that ends with it, and its sum.
    paths: dict[str, tuple[float, list[str]]] = {}
    for row in rows:
        least, expected = min(row.seconds.values()), usual(row)
        lost, before = min(paths.values(), key=_lost, default=(-math.log(_CHANGE), []))
        changed = (lost + math.log(_CHANGE), before)
        ways = {name: min(paths.get(name, changed), changed, key=_lost) for name in row.seconds}
        for name, seconds in row.seconds.items():
            here = math.log(seconds / least) + (name != expected) * math.log(_UNUSUAL)
            ways[name] = (ways[name][0] + here, [*ways[name][1], name])
        paths = ways
    _, names = min(paths.values(), key=_lost)
    return _ranges(names, [row.nbytes for row in rows])


def _lost(path: tuple[float, list[str]]) -> float:
    return path[0]


def _ranges(names: Sequence[str], sizes: Sequence[int]) -> AlgorithmRanges:
    found = [AlgorithmRange(names[0])]
    for name, (before, after) in zip(names[1:], itertools.pairwise(sizes), strict=True):
        if name != found[-1].algorithm:
            border = math.isqrt(before * after)
            found[-1] = found[-1]._replace(high=border)
            found.append(AlgorithmRange(name, border + 1))
    return AlgorithmRanges(found)


def fit(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return x >= 0 that minimises the squares of the relative errors of ``terms @ x``.

    Args:
        terms: of shape (measurements, 1 to 3).
        seconds: of shape (measurements,), positive.
    """
    scaled = terms / seconds[:, None]
    best, least = np.zeros(terms.shape[1]), math.inf
    columns = range(terms.shape[1])
    # The minimum with x >= 0 is the unconstrained one of some subset of the columns.
    for count in columns:
        for chosen in itertools.combinations(columns, count + 1):
            x = np.zeros(terms.shape[1])
            x[list(chosen)] = np.linalg.lstsq(scaled[:, chosen], np.ones(len(seconds)))[0]
            error = float(np.sum((scaled @ x - 1) ** 2))
            if (x >= 0).all() and error < least:
                best, least = x, error
    return best


def fit_own(
    known: Mapping[str, Mapping[str, Algorithm]], timings: Sequence[Timing], world_size: int
) -> dict[str, Costs]:
    """Return the costs of a transport's own algorithms that explain their times best."""
    rows: dict[str, list[tuple[list[float], float]]] = {}
    for timing in timings:
        for name, seconds in timing.seconds.items():
            if name not in ALGORITHMS[timing.collective]:
                cost = known[timing.collective][name].cost(world_size)
                terms = [cost.alpha, cost.beta * timing.nbytes, cost.gamma * timing.nbytes]
                rows.setdefault(name, []).append((terms, seconds))
    found = {}
    for name, measured in rows.items():
        terms_of_all, seconds_of_all = zip(*measured, strict=True)
        found[name] = Costs(*map(float, fit(np.array(terms_of_all), np.array(seconds_of_all))))
    return found


# Times.


def _measure_costs(backend: Backend, effort: Effort) -> Costs:
    sizes = np.array(effort.messages, np.float64)
    seconds = np.array([_ping_pong(backend, size, effort) for size in effort.messages])
    alpha, beta, latency = 0.0, 0.0, 0.0
    # On one host a message takes hardly longer than its two ends are busy with it.
    several = len(set(backend.hosts)) > 1
    busy = _burst(backend, effort) if several else math.inf
    if backend.rank == 0:
        terms = np.stack([np.ones_like(sizes), sizes], axis=1)
        trip, beta = map(float, fit(terms, seconds))
        alpha = min(trip, busy or trip)
        latency = trip - alpha
    return Costs(alpha, beta, _reduction(backend, effort), latency)


def _ping_pong(backend: Backend, nbytes: int, effort: Effort) -> float:
    """Seconds that a message takes between the first rank and the last; counts on rank 0 only."""
    there_and_back = _messages(backend, nbytes, 1)
    return _rounds(backend, {"": there_and_back}, effort)[""] / 2


def _burst(backend: Backend, effort: Effort) -> float:
    """Seconds that each further message takes, of many that leave one after the other."""
    few, many = (_messages(backend, effort.messages[0], count) for count in (1, 1 + _BURST))
    seconds = _rounds(backend, {"few": few, "many": many}, effort)
    return max(0.0, seconds["many"] - seconds["few"]) / _BURST


def _messages(backend: Backend, nbytes: int, count: int) -> Callable[[], None]:
    """Return what sends so many messages from the first rank to the last, and one back."""
    peer = {0: backend.world_size - 1, backend.world_size - 1: 0}.get(backend.rank)
    data = backend.empty(nbytes, np.uint8)
    data.fill(1)

    def there_and_back() -> None:
        if peer is None:
            return
        for turn, messages in enumerate((count, 1)):
            for _ in range(messages):
                if (backend.rank == 0) == (turn == 0):
                    backend.send(data, peer)
                else:
                    backend.recv(data, peer)

    return there_and_back


def _reduction(backend: Backend, effort: Effort) -> float:
    """Seconds for a byte that is added to another, while all ranks do so."""
    left, right, out = (np.ones(MIB // _DTYPE.itemsize, _DTYPE) for _ in range(3))
    reduction = Reduction.of("sum", _DTYPE)
    add = {"": lambda: reduction.reduce([left, right], out)}
    return _rounds(backend, add, effort)[""] / out.nbytes


def _measure_collective(backend: Backend, collective: str, nbytes: int, effort: Effort) -> Timing:
    p = backend.world_size
    count = max(1, round(nbytes / _DTYPE.itemsize / p)) * p
    names = candidates(collective, backend, _DTYPE, _op(collective))
    size = count * _DTYPE.itemsize
    (case,) = make_cases(collective, [size], p, dtype=_DTYPE.name, op="sum", root=0, in_place=False)
    calls = {name: _call(backend, case, name) for name in names}
    if collective not in _ONE_WAY:
        return Timing(collective, size, _rounds(backend, calls, effort))
    together = {name: _then(call, backend.barrier) for name, call in calls.items()}
    seconds = _rounds(backend, {**together, "": backend.barrier}, effort)
    barrier = seconds.pop("")
    return Timing(collective, size, {n: max(s - barrier, s / 8) for n, s in seconds.items()})


def _then(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _op(collective: str) -> str:
    return "sum" if OPERATIONS[collective].reduces else ""


def _call(backend: Backend, case: Case, algorithm: str) -> Callable[[], object]:
    """A call of a collective, on plain arrays: of those that all ranks see there is no choice."""
    source, out = (
        np.ones(size, _DTYPE) if size else None
        for size in (case.source_count(backend.rank), case.output_count(backend.rank))
    )
    function = getattr(collectives, case.operation)
    return lambda: function(source, backend, out=out, algorithm=algorithm)


def _rounds(
    backend: Backend, calls: Mapping[str, Callable[[], object]], effort: Effort
) -> dict[str, float]:
    """Seconds of each call, the same on every rank; the calls take turns."""
    for call in calls.values():
        call()  # the first call prepares things
    trial = _slowest(backend, [_time(backend, call, 1) for call in calls.values()])
    repeats = {
        name: max(1, min(_MAX_CALLS, int(effort.seconds / max(seconds, 1e-9))))
        for name, seconds in zip(calls, trial, strict=True)
    }
    times = alternate(
        calls, effort.rounds, lambda name, _: _time(backend, calls[name], repeats[name])
    )
    least = _slowest(backend, list(times.values())).min(axis=1)
    return dict(zip(calls, map(float, least), strict=True))


def _time(backend: Backend, call: Callable[[], object], repeats: int) -> float:
    return timed_calls(backend.barrier, call, lambda: None, 0, repeats) / repeats


def _slowest(backend: Backend, seconds: object) -> NDArray[np.float64]:
    slowest: NDArray[np.float64] = collectives.all_reduce(
        np.array(seconds, np.float64), backend, op="max"
    )
    return slowest
