"""Fair sharing as the textbook has it, in fractions: all rates anew at every event."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Sent(NamedTuple):
    """A flow: when it starts, what it crosses, how much it is."""

    start: Fraction
    links: tuple[str, ...]
    nbytes: int


def naive_route(src: int, dst: int, sizes: list[int]) -> tuple[str, ...]:
    """The links of a tree with so many members to each level (0: all), by name."""
    up: list[str] = []
    down: list[str] = []
    a, b = src, dst
    for level, size in enumerate(sizes):
        if a == b:
            break
        up.append(f"{level}.{a}.up")
        down.insert(0, f"{level}.{b}.down")
        a, b = (a // size, b // size) if size else (0, 0)
    return tuple(up + down)


def naive_rates(
    routes: dict[int, tuple[str, ...]], capacities: dict[str, Fraction]
) -> dict[int, Fraction]:
    """Raise all rates at one speed; stop those that cross a link that is full."""
    rates = dict.fromkeys(routes, Fraction(0))
    rising = set(routes)
    while rising:
        slack = {
            link: capacities[link] - sum(rates[f] for f, route in routes.items() if link in route)
            for f in rising
            for link in routes[f]
        }
        room = {link: free / sum(link in routes[f] for f in rising) for link, free in slack.items()}
        step = min(room.values())
        for f in rising:
            rates[f] += step
        full = {link for link, value in room.items() if value == step}
        rising = {f for f in rising if not full & set(routes[f])}
    return rates


def naive_ends(sent: list[Sent], capacities: dict[str, Fraction]) -> list[Fraction]:
    """When each flow ends. Links without a capacity are without a limit."""
    ends: list[Fraction | None] = [None] * len(sent)
    left: dict[int, Fraction] = {}
    routes = {
        n: tuple(link for link in flow.links if link in capacities) for n, flow in enumerate(sent)
    }
    ahead = sorted(range(len(sent)), key=lambda n: sent[n].start)
    now = Fraction(0)
    while ahead or left:
        rates = naive_rates({n: routes[n] for n in left}, capacities)
        times = [now + left[n] / rates[n] for n in left]
        times += [sent[ahead[0]].start] if ahead else []
        then = min(times)
        for n in left:
            left[n] -= rates[n] * (then - now)
        now = then
        for n in [n for n, rest in left.items() if rest == 0]:
            ends[n] = now
            del left[n]
        while ahead and sent[ahead[0]].start == now:
            n = ahead.pop(0)
            if sent[n].nbytes and routes[n]:
                left[n] = Fraction(sent[n].nbytes)
            else:
                ends[n] = now
    return [end for end in ends if end is not None]
