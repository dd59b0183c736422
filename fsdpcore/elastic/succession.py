"""What the next generation is: who is connected, who is left out, and who comes along.

All of it follows from a ``View``: what one agent knows. Other agents may know something else; they
need not agree, since only one of them has its generation decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

from fsdpcore.elastic.generation import Generation, HostCard, Seat
from fsdpcore.elastic.paxos import Witness, has_quorum
from fsdpcore.elastic.reports import Report

_PATIENT = 2  # generations without a meeting before suspects need not suspect others
_Node = TypeVar("_Node", bound=Hashable)


@dataclass(frozen=True)
class View:
    """What an agent knows of the others.

    Attributes:
        me: its id.
        generation: the newest that it knows, in which it has seats; one of number 0, without seats,
            before the first.
        reports: the newest of every agent, its own included.
        linked: the ids of the agents that it hears, and that hear it; its own included.
        mute: of those that don't answer though they should; lost if their ranks are suspected, or
            another host does not hear them.
        unmet: generations in a row in which the ranks here have not met.
    """

    me: str
    generation: Generation
    reports: Mapping[str, Report]
    linked: frozenset[str]
    mute: frozenset[str] = frozenset()
    unmet: int = 0

    def report(self, host: str) -> Report | None:
        """What an agent says of this generation; None if that is something else, or not known."""
        found = self.reports.get(host)
        return found if found and found.generation == self.generation.number else None


def unlinked(view: View) -> set[tuple[str, str]]:
    """Pairs of hosts that don't hear each other: one way is not enough."""
    hosts = [card.id for card in view.generation.hosts]
    return {(a, b) for a, b in combinations(hosts, 2) if not _hear(view, a, b)}


def _hear(view: View, a: str, b: str) -> bool:
    if view.me in (a, b):
        return (b if a == view.me else a) in view.linked
    for one, other in ((a, b), (b, a)):
        report = view.report(one)
        if one in view.linked and report and other not in report.hears:
            return False
    return True


def ended(view: View) -> set[Seat]:
    """Seats of the generation that are no more, as their own hosts say."""
    gone = {
        card.id: view.reports[card.id].ended
        for card in view.generation.hosts
        if card.id in view.reports and view.reports[card.id].ended
    }
    return {seat for seat in view.generation.seats if seat.number in gone.get(seat.host, ())}


def broken(view: View) -> set[tuple[Seat, Seat | None]]:
    """Seats whose backends broke, each with a seat that it suspects, or with none."""
    seats, found = view.generation.seats, set[tuple[Seat, Seat | None]]()
    for card in view.generation.hosts:
        report = view.report(card.id)
        if report is None or not report.broken:
            continue
        for number, suspects in report.broken:
            reporter = Seat(card.id, number)
            named = [seats[rank] for rank in suspects if 0 <= rank < len(seats)]
            found |= {(reporter, suspect) for suspect in named if suspect != reporter}
            found.add((reporter, None))
    return found


def is_disturbed(view: View) -> bool:
    """Whether the generation has lost something, and cannot go on."""
    return bool(ended(view) or broken(view) or unlinked(view))


def is_paused(view: View) -> bool:
    """Whether all seats of the generation have handed over."""
    return all(
        (report := view.report(seat.host)) is not None and seat.number in report.paused
        for seat in view.generation.seats
    )


def has_majority(view: View) -> bool:
    """Whether hosts of more than half of the ranks are within reach."""
    weights = {card.id: view.generation.weight(card.id) for card in view.generation.hosts}
    return has_quorum(weights, view.linked)


def left_out(view: View) -> dict[Seat, str]:
    """Which seats cannot be in the next generation, and why."""
    out = dict.fromkeys(ended(view), "has ended")
    suspected = broken(view)
    hosts = _lost_hosts(view, {*view.generation.seats} - {*out}, suspected)
    for seat in view.generation.seats:
        if seat.host in hosts:
            out.setdefault(seat, "is out of reach")
    if not out:  # else those explain why backends broke; what is left breaks again, and says so
        for seat in _accused(view, suspected):
            out[seat] = "is out of its peers' reach"
    return {seat: out[seat] for seat in view.generation.seats if seat in out}


def _accused(view: View, suspected: set[tuple[Seat, Seat | None]]) -> set[Seat]:
    """Which seats go since others suspect them, or since they suspect others.

    Who has reported itself is there: it counts only if it suspects the reporter as well, or if the
    ranks could not meet several times. Others suspect it since it has given up before them.
    """
    pairs = {(a, b) for a, b in suspected if b is not None}
    reporters = {a for a, _ in suspected}
    order = view.generation.seats.index
    gone = cover({(a, b) for a, b in pairs if b not in reporters}, order)
    rest = {
        (a, b)
        for a, b in pairs
        if not {a, b} & gone and ((b, a) in pairs or view.unmet >= _PATIENT)
    }
    return gone | cover(rest, order)


def _lost_hosts(view: View, alive: set[Seat], suspected: set[tuple[Seat, Seat | None]]) -> set[str]:
    """Hosts of living seats that cannot be reached from here, or not by the others."""
    needed = [card.id for card in view.generation.hosts if any(s.host == card.id for s in alive)]
    apart = {pair for pair in unlinked(view) if {*pair} <= {*needed, view.me}}
    accused = {suspect.host for _, suspect in suspected if suspect}
    # One that others don't hear either is gone, though it was heard here a moment ago.
    mute = view.mute & (accused | {host for pair in apart for host in pair})
    near = _reachable(view.me, {*needed} - mute, apart)
    lost = {*needed} - near
    pairs = {pair for pair in apart if {*pair} <= near & {*needed}}
    return lost | cover(pairs, lambda host: (-view.generation.weight(host), needed.index(host)))


def _reachable(start: str, hosts: set[str], apart: set[tuple[str, str]]) -> set[str]:
    """Those that are connected with one, directly or over others."""
    near, new = {start}, {start}
    while new:
        new = {
            host
            for host in hosts - near
            if any((a, host) not in apart and (host, a) not in apart for a in new)
        }
        near |= new
    return near


def cover(pairs: Iterable[tuple[_Node, _Node]], order: Callable[[_Node], Any]) -> set[_Node]:
    """A small set of nodes of which every pair has one.

    Greedily the one of most pairs; among those the last in an order.
    """
    left = {*pairs}
    chosen: set[_Node] = set()
    while left:
        degrees = Counter(node for pair in left for node in pair)
        most = max(degrees.values())
        worst = max((node for node in degrees if degrees[node] == most), key=order)
        chosen.add(worst)
        left = {pair for pair in left if worst not in pair}
    return chosen


def newcomers(view: View, kept: Iterable[str]) -> list[tuple[HostCard, list[int]]]:
    """Seats that wait to be taken along, of hosts that all the hosts which are kept can talk to.

    Their agents know the generation, and so which of their seats are in it and which were left out.
    """
    kept = {*kept}
    own = {card.id for card in view.generation.hosts}
    found = []
    for host in view.reports:
        report = view.report(host)
        if report is None or host not in view.linked:
            continue
        welcome = host in kept if host in own else _is_heard(view, host, report, kept)
        used = {seat.number for seat in view.generation.seats if seat.host == host}
        fresh = {*report.ready} - used - {*report.ended} - report.leavers
        if welcome and fresh:
            found.append((report.card, sorted(fresh)))
    return found


def _is_heard(view: View, guest: str, report: Report, kept: set[str]) -> bool:
    mine = view.reports[view.me]
    return report.witness == mine.witness and all(
        host in report.hears and (member := view.reports.get(host)) and guest in member.hears
        for host in kept - {view.me}
    )


def wished(view: View, maximum: int) -> str:
    """Why the generation should change in order; empty if it should not."""
    generation = view.generation
    going = [
        (seat, reason)
        for seat in generation.seats
        if (report := view.reports.get(seat.host))
        for number, reason in report.leaving
        if number == seat.number
    ]
    if going:
        return _listed(f"{_name(generation, seat)} leaves: {reason}" for seat, reason in going[:3])
    if len(generation.seats) >= maximum:
        return ""
    coming = newcomers(view, [card.id for card in generation.hosts])
    count = sum(len(seats) for card, seats in coming if not view.reports[card.id].starting)
    return f"{min(count, maximum - len(generation.seats))} more come" if count else ""


def successor(view: View, maximum: int) -> Generation:
    """The next generation as this agent sees it; it may be too small.

    It is an orderly one if nothing is lost and all have handed over; then those are not in it that
    have done so to leave. After a loss they still are: nobody has what they have.
    """
    old = view.generation
    disturbed = is_disturbed(view) and old.number > 0
    orderly = not disturbed and old.number > 0 and is_paused(view)
    out = left_out(view)
    reasons = [f"{_name(old, seat)} {why}" for seat, why in out.items()]
    if orderly:
        for seat in old.seats:
            if seat.number in view.reports[seat.host].going:
                out[seat] = "leaves"
                reasons.append(f"{_name(old, seat)} leaves")
    stay = [seat for seat in old.seats if seat not in out]
    lost = {card.id for card in old.hosts if card.id != view.me and card.id not in view.linked}
    cut = {seat.host for seat, why in out.items() if why == "is out of reach"} | lost
    kept = {seat.host for seat in stay} | {card.id for card in old.hosts if card.id not in cut}
    room = maximum - len(stay)
    cards = {card.id: card for card in old.hosts}
    seats: dict[str, list[Seat]] = {host: [] for host in cards}
    for seat in stay:
        seats[seat.host].append(seat)
    coming = newcomers(view, kept)
    coming.sort(key=lambda item: [*cards].index(item[0].id) if item[0].id in cards else len(cards))
    count = 0
    for card, numbers in coming:
        cards.setdefault(card.id, card)
        taken = numbers[: max(0, room - count)]
        seats.setdefault(card.id, []).extend(Seat(card.id, number) for number in taken)
        count += len(taken)
    if count:
        reasons.append(f"{count} more come" if old.number else "the job begins")
    return Generation(
        old.number + 1,
        tuple(cards[host] for host, own in seats.items() if own),
        tuple(seat for own in seats.values() for seat in own),
        orderly,
        _listed(reasons) or "all ranks meet again",
    )


def _listed(reasons: Iterable[str]) -> str:
    return "; ".join(reasons)


def _name(generation: Generation, seat: Seat) -> str:
    card = next(card for card in generation.hosts if card.id == seat.host)
    return f"rank {generation.rank(seat)} on {card.address.rpartition(':')[0] or card.address}"


def undecided(view: View, patience: float, witness: Witness | None) -> str:
    """Why the agents have come to no decision, in words."""
    generation = view.generation
    if has_majority(view):
        return f"the agents could not decide within {patience:g} s how the job goes on"
    here = sum(seat.host in view.linked for seat in generation.seats)
    silent = [card.address for card in generation.hosts if card.id not in view.linked]
    half = 2 * here == len(generation.seats)
    hint = " (a witness would decide between two halves)" if half and not witness else ""
    trouble = f"; {witness.trouble}" if half and witness and witness.trouble else ""
    return (
        f"{here} of {len(generation.seats)} ranks are within reach, and going on needs more than "
        f"half{hint}: nothing comes from {', '.join(silent)}{trouble}"
    )
