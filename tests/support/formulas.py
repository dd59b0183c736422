"""The cost formulas of the algorithms' docstrings, told a second time.

p is the number of ranks and n the bytes of the array at the collective's own size: per rank for
all_reduce, reduce and broadcast, and for the others in total. Each formula gives the traffic of
every rank, with rank 0 as the root and all ranks on one host.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.counting import Traffic

Formula = Callable[[int], list[Traffic]]


def depth(p: int) -> int:
    """The smallest k with 2**k >= p."""
    k = 0
    while 2**k < p:
        k += 1
    return k


def _left(p: int) -> int:
    """The largest power of two below p."""
    w = 1
    while 2 * w < p:
        w *= 2
    return w


def _ceil(a: int, b: int) -> int:
    return (a + b - 1) // b


def _m(i: int, p: int) -> int:
    """Messages that rank i sends in doubling."""
    if p == 1:
        return 0
    w = _left(p)
    r = p - w
    if i < w:
        return _m(i, w) + (i < r)
    return _m(i - w, r) + _ceil(w - (i - w), r)


def _d(i: int, p: int) -> int:
    """Messages that rank i receives in doubling."""
    if p == 1:
        return 0
    w = _left(p)
    return 1 + (_d(i, w) if i < w else _d(i - w, p - w))


def _g(i: int, p: int) -> int:
    """Chunks that rank i sends in an all_gather by doubling."""
    if p == 1:
        return 0
    w = _left(p)
    r = p - w
    if i < w:
        return _g(i, w) + (w if i < r else 0)
    return _g(i - w, r) + r * _ceil(w - (i - w), r)


def _kept(place: NDArray[Any], p: int) -> NDArray[Any]:
    """Chunks that p ranks receive in halving, of which ``place[c]`` keeps chunk c in the end."""
    if p == 1:
        return np.zeros(1, np.int64)
    w = _left(p)
    below = [_kept(place % w, w), _kept(place % w % (p - w), p - w)]
    return np.concatenate(below) + np.bincount(place, minlength=p)


def _subtree(v: int, p: int) -> int:
    if v == 0:
        return p
    bit = 1
    while v % (2 * bit) == 0:
        bit *= 2
    return min(bit, p - v)


def _same(*values: Any) -> Formula:
    """Every rank the same: sends as much as it receives."""

    def ranks(p: int) -> list[Traffic]:
        messages, factor, *reduced = (value(p) for value in values)
        return [Traffic(messages, factor, messages, factor, *reduced)] * p

    return ranks


def _star(
    to_centre: Callable[[int], Fraction | None],
    from_centre: Callable[[int], Fraction | None],
    reduces: bool = False,
) -> Formula:
    """One message from each other rank, one back, or either; of so many times n."""

    def ranks(p: int) -> list[Traffic]:
        up, down = to_centre(p), from_centre(p)
        ups, downs = int(up is not None), int(down is not None)
        there, back = up or Fraction(0), down or Fraction(0)
        work = Fraction(p - 1 if reduces else 0)
        others = p - 1
        centre = Traffic(others * downs, others * back, others * ups, others * there, work)
        return [centre] + [Traffic(ups, there, downs, back)] * others

    return ranks


def _tree(whole: bool, upwards: bool, reduces: bool = False) -> Formula:
    """Messages along the binomial tree, of n bytes or of the chunks of a subtree."""

    def ranks(p: int) -> list[Traffic]:
        traffic = []
        for v in range(p):
            s = _subtree(v, p)
            children, parents = depth(s), int(v > 0)
            below = Fraction(children) if whole else Fraction(s - 1, p)
            above = parents * (Fraction(1) if whole else Fraction(s, p))
            ends = (parents, above, children, below)
            if not upwards:
                ends = (children, below, parents, above)
            traffic.append(Traffic(*ends, Fraction(children if reduces else 0)))
        return traffic

    return ranks


def _plus(*parts: Formula) -> Formula:
    def ranks(p: int) -> list[Traffic]:
        return [Traffic.total(rank) for rank in zip(*(part(p) for part in parts), strict=True)]

    return ranks


def _doubling(p: int) -> list[Traffic]:
    counts = [(_m(i, p), _d(i, p)) for i in range(p)]
    return [Traffic(m, Fraction(m), d, Fraction(d), Fraction(d)) for m, d in counts]


def _doubling_scan(p: int) -> list[Traffic]:
    counts = [(_m(i, p), _d(i, p), bin(i).count("1")) for i in range(p)]
    return [Traffic(m, Fraction(m), d, Fraction(d), Fraction(d - 1 + b)) for m, d, b in counts]


def _doubling_exscan(p: int) -> list[Traffic]:
    return [
        each._replace(reduced=each.reduced - (i > 0)) for i, each in enumerate(_doubling_scan(p))
    ]


def _doubling_gather(p: int) -> list[Traffic]:
    share = Fraction(p - 1, p)
    return [Traffic(_m(i, p), Fraction(_g(i, p), p), _d(i, p), share) for i in range(p)]


def _halving(p: int) -> list[Traffic]:
    kept = [Fraction(chunks, p) for chunks in _kept(np.arange(p), p).tolist()]
    share = Fraction(p - 1, p)
    return [Traffic(_m(i, p), share, _d(i, p), kept[i], kept[i]) for i in range(p)]


def _halving_back(p: int) -> list[Traffic]:
    return [Traffic(t.received, t.into, t.sent, t.out) for t in _halving(p)]


def _ones(p: int) -> int:
    """Ones in the binary digits of 0, 1, ..., p - 1."""
    return sum(f"{number:b}".count("1") for number in range(p))


def _around(p: int) -> list[Traffic]:
    """An all_gather by Bruck's steps in place: a message more where a range passes the end."""
    traffic = []
    for v in range(p):
        distances = [2**k for k in range(depth(p))]
        sizes = [min(d, p - d) for d in distances]
        sent = [1 + (v + size > p) for size in sizes]
        starts = [(v + d) % p for d in distances]
        received = [1 + (a + size > p) for a, size in zip(starts, sizes, strict=True)]
        share = Fraction(p - 1, p)
        traffic.append(Traffic(sum(sent), share, sum(received), share))
    return traffic


def _nothing(p: int) -> None:
    return None


def _n(p: int) -> Fraction:
    return Fraction(1)


def _chunk(p: int) -> Fraction:
    return Fraction(1, p)


def _others(p: int) -> int:
    return p - 1


def _share(p: int) -> Fraction:
    return Fraction(p - 1, p)


def _one_host(p: int) -> list[Traffic]:
    """A broadcast straight to all: the root scatters, then all but the root gather."""
    piece = Fraction(1, p)
    root = Traffic(2 * (p - 1), 2 * (p - 1) * piece, 0, Fraction(0))
    other = Traffic(p - 2, (p - 2) * piece, p, Fraction(1))
    return [root] + [other] * (p - 1)


def _in_rounds(p: int) -> list[Traffic]:
    """A broadcast whose root serves all others eight times, who pass on what they get."""
    root = Traffic(8 * (p - 1), Fraction(1), 0, Fraction(0))
    other = Traffic(8 * (p - 2), Fraction(p - 2, p - 1), 8 * (p - 1), Fraction(1))
    return [root] + [other] * (p - 1)


SCATTERED = _same(_others, _share, _share)
GATHERED = _same(_others, _share)
BRUCK = _same(depth, _share)

EXPECTED: dict[tuple[str, str], Formula] = {
    ("all_reduce", "direct"): _plus(SCATTERED, GATHERED),
    ("all_reduce", "ring"): _plus(SCATTERED, GATHERED),
    ("all_reduce", "hierarchical"): _plus(SCATTERED, GATHERED),
    ("all_reduce", "star"): _star(_n, _n, reduces=True),
    ("all_reduce", "doubling"): _doubling,
    ("all_reduce", "rabenseifner"): _plus(_halving, _halving_back),
    ("scan", "doubling"): _doubling_scan,
    ("exscan", "doubling"): _doubling_exscan,
    ("reduce_scatter", "direct"): SCATTERED,
    ("reduce_scatter", "ring"): SCATTERED,
    ("reduce_scatter", "hierarchical"): SCATTERED,
    ("reduce_scatter", "star"): _star(_n, _chunk, reduces=True),
    ("reduce_scatter", "doubling"): _doubling,
    ("reduce_scatter", "halving"): _halving,
    ("all_gather", "direct"): GATHERED,
    ("all_gather", "ring"): GATHERED,
    ("all_gather", "hierarchical"): GATHERED,
    ("all_gather", "bruck"): BRUCK,
    ("all_gather", "star"): _star(_chunk, _n),
    ("all_gather", "doubling"): _doubling_gather,
    ("broadcast", "tree"): _tree(whole=True, upwards=False),
    ("broadcast", "scatter_gather"): _plus(_tree(whole=False, upwards=False), _around),
    ("broadcast", "direct"): _in_rounds,
    ("broadcast", "hierarchical"): _one_host,
    ("broadcast", "star"): _star(_nothing, _n),
    ("reduce", "tree"): _tree(whole=True, upwards=True, reduces=True),
    ("reduce", "star"): _star(_n, _nothing, reduces=True),
    ("gather", "tree"): _tree(whole=False, upwards=True),
    ("gather", "star"): _star(_chunk, _nothing),
    ("scatter", "tree"): _tree(whole=False, upwards=False),
    ("scatter", "star"): _star(_nothing, _chunk),
    ("all_to_all", "direct"): GATHERED,
    ("all_to_all", "bruck"): _same(depth, lambda p: Fraction(_ones(p), p)),
}
