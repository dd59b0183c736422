"""What befalls a job of agents, drawn from a seed, and how it ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from support.elastic_oracle import Wrong
from support.elastic_world import FAULTS_LAST, LOST_AFTER, SETTLES, Host, Over, World

from fsdpcore.elastic.decree import Decree
from fsdpcore.elastic.mail import Letter

# Seconds in which a link that is cut one way is noticed on both sides, and decided upon.
FINDS_OUT = 4 * LOST_AFTER
_FAULTS = (
    "kill a seat",
    "kill a seat",
    "kill two seats",
    "freeze a seat",
    "kill an agent",
    "kill an agent",
    "kill the first agent",
    "freeze an agent",
    "part in two",
    "part one way",
    "cut a link",
    "cut a link one way",
    "add a host",
    "add a host",
    "add and kill",
    "add a seat",
    "a seat leaves",
    "a host leaves",
    "start again",
    "start the founder again",
    "finish",
)


@dataclass
class Played:
    """How it went.

    Attributes:
        seed: of it all.
        wrong: what must not be; empty if all is well.
        digest, turns: of all that happened.
        faults: in their order.
        ends: how many agents ended in which way.
        visits: state, call, and the state after.
        generations: how many were installed.
    """

    seed: int
    wrong: str = ""
    digest: int = 0
    turns: int = 0
    faults: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    visits: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    generations: int = 0


def play(seed: int) -> Played:
    """Play one job with its faults, until it has settled."""
    world = World(seed)
    played = Played(seed, faults=world.faults, visits=world.visits)
    answer = Decree._answer

    def voted(self: Any, kind: str, ballot: Any, message: Any) -> Any:
        found = answer(self, kind, ballot, message)
        if kind == "accept" and found["granted"]:
            world.oracle.voted(self._me, self.number, ballot, message["value"])
        return found

    decode = Letter.decode

    def decoded(message: Any) -> Letter:
        try:
            return decode(message)
        except Exception as error:
            raise Wrong(f"a message is not understood: {error!r}") from error

    with (
        mock.patch.object(Decree, "_answer", voted),
        mock.patch.object(Letter, "decode", decoded),
    ):
        try:
            _run(world)
        except Over:
            world.log("another job")
        except Wrong as wrong:
            played.wrong = str(wrong)
    played.digest, played.turns = world.digest, world.turns
    played.ends = Counter(host.end.partition(":")[0] or "goes on" for host in world.hosts)
    played.generations = len(world.oracle.contents)
    return played


def _run(world: World) -> None:
    chance = world.chance
    world.add_host(world.per_host[0], founder=True)
    for seats in world.per_host[1:]:
        world.soon(lambda n=seats: world.add_host(n), 0.4)
    if chance.random() < 0.1:
        world.soon(lambda: _found_anew(world), 0.8)
    for _ in range(chance.choice([0, 1, 1, 2, 2, 3, 4, 6])):
        fault = chance.choice(_FAULTS)
        world.at(1.0 + chance.random() * FAULTS_LAST, lambda f=fault: _befall(world, f))
    for _ in world.run_until(1.0 + FAULTS_LAST):
        pass
    end = world.now + (FINDS_OUT if _heal(world) else SETTLES)
    if world.blocked:
        for _ in world.run_until(world.now + 2 * LOST_AFTER):
            pass
    while world.now < end and not _settled(world):
        for _ in world.run_until(world.now + 0.25):
            pass
    if why := _unsettled(world):
        raise Wrong(why)
    number = world.oracle.met[-1] if world.oracle.met else 0
    if number and world.goes_on(number) and not world.oracle.finished:
        all_reach_all = not world.blocked
        world.finish(number)
        for _ in world.run_until(world.now + 4 * LOST_AFTER):
            pass
        if world.oracle.met[-1] != number:
            raise Wrong(f"generation {number} has finished, and {world.oracle.met[-1]} goes on")
        members = {where for where, _ in world.oracle.contents[number]["seats"]}
        if any(h.alive and (h.id in members or all_reach_all) for h in world.hosts):
            raise Wrong(f"generation {number} has finished, and an agent has not heard")


def _heal(world: World) -> bool:
    """End all faults; now and then a link stays cut one way.

    Returns whether that is all that is wrong, and there are enough to decide without one of them.
    """
    number = world.oracle.met[-1] if world.oracle.met else 0
    last = max((float(fault.split()[0]) for fault in world.faults), default=0.0)
    goes_on = bool(number) and _settled(world) and not world.blocked
    goes_on = goes_on and world.now > last + 2 * LOST_AFTER
    world.calm = True
    world.blocked.clear()
    hosts = _alive(world)
    if len(hosts) > 1 and world.chance.random() < 0.25:
        a, b = world.chance.sample(hosts, 2)
        world.faults.append(f"{a.id} does not reach {b.id} any more")
        world.cut({(a.address, b.address)}, 1e9)
        asleep = [each for h in hosts for each in (h, *h.seats.values()) if each.frozen > world.now]
        if goes_on and not asleep:
            weights = Counter(where for where, _ in world.oracle.contents[number]["seats"])
            total = sum(weights.values())
            weight = weights[a.id], weights[b.id]
            return 2 * (total - min(weight)) > total and total - max(weight) >= world.minimum
    world.log("calm")
    return False


def _alive(world: World) -> list[Host]:
    return [host for host in world.hosts if host.alive]


def _settled(world: World) -> bool:
    return not _unsettled(world)


def _unsettled(world: World) -> str:
    """Why the job has not come to rest: all ranks that are there go on, or all have stopped."""
    hosts = _alive(world)
    if not hosts:
        return ""
    if world.oracle.finished:
        return "agents of a finished job are there"
    if any(world.now < host.frozen for host in hosts):
        return "an agent stands still"
    number = max(world.oracle.contents, default=0)
    if not number:
        return "nothing has begun"
    if not world.works(number):
        return f"generation {number} does not go on"
    content = world.oracle.contents[number]
    taken = {(host, seat) for host, seat in content["seats"]}
    for host in hosts:
        if world.blocked:  # who cannot reach all others is not taken along
            break
        for seat in host.seats.values():
            there = seat.alive and seat.ready and (host.id, seat.number) not in taken
            if there and seat.number in host.member._here.leaving:
                return f"seat {seat.number} of {host.id} waits, and is to leave"
            if there and len(taken) < world.maximum:
                return f"seat {seat.number} of {host.id} waits, and there is room"
        if host.member._known.number != number:
            return f"{host.id} has not heard of generation {number}"
        leaving = {(host.id, number) for number in host.member._here.leaving} & taken
        if leaving and len(taken) - len(leaving) >= world.minimum:
            return f"{host.id} has not left"
    return ""


def _befall(world: World, fault: str) -> None:
    chance, hosts = world.chance, _alive(world)
    if not hosts:
        return
    world.faults.append(f"{world.now:.2f} {fault}")
    world.log(fault)
    host = chance.choice(hosts)
    seats = [seat for each in hosts for seat in each.seats.values() if seat.alive and seat.ready]
    lasts = LOST_AFTER * chance.choice([0.3, 1.0, 1.5, 3.0, 6.0])
    if fault in ("kill a seat", "kill two seats"):
        for seat in chance.sample(seats, min(len(seats), 1 + (fault == "kill two seats"))):
            world.end_seat(seat)
    elif fault == "freeze a seat" and seats:
        world.freeze_seat(chance.choice(seats), lasts)
    elif fault == "kill an agent":
        world.kill(host, "killed")
    elif fault == "kill the first agent":
        world.kill(hosts[0], "killed")
    elif fault == "freeze an agent":
        world.freeze(host, lasts)
    elif fault in ("part in two", "part one way"):
        side = {each.address for each in hosts if chance.random() < 0.5}
        rest = {each.address for each in hosts} - side
        pairs = {(a, b) for a in side for b in rest}
        world.cut(pairs | ({(b, a) for a, b in pairs} if fault == "part in two" else set()), lasts)
    elif fault in ("cut a link", "cut a link one way") and len(hosts) > 1:
        a, b = (each.address for each in chance.sample(hosts, 2))
        world.cut({(a, b)} | ({(b, a)} if fault == "cut a link" else set()), lasts)
    elif fault in ("add a host", "add and kill"):
        new = world.add_host(chance.choice([1, 1, 2]))
        if fault == "add and kill":
            victim = chance.choice([new, host])

            def dies() -> None:
                if victim.alive and not world.calm:
                    world.kill(victim, "killed")

            world.soon(dies, 2.0)
    elif fault == "add a seat":
        world.add_seat(host)
    elif fault == "a seat leaves" and seats:
        seat = chance.choice(seats)
        world.call(seat.host, "seat_leaves", seat.number, "asked")
    elif fault == "a host leaves":
        world.call(host, "leave", "asked")
    elif fault == "start again":
        world.kill(host, "killed")
        address = host.address
        world.soon(lambda: _alive(world) and world.add_host(1, address=address), 1.0)
    elif fault == "start the founder again" and world.oracle.met:
        if world.hosts[0].alive:
            world.kill(world.hosts[0], "killed")
        world.at(chance.random() * 3 * LOST_AFTER, lambda: _found_again(world))
    elif fault == "finish" and chance.random() < 0.3:
        number = world.oracle.met[-1] if world.oracle.met else 0
        if number and world.works(number):
            world.finish(number)


def _found_anew(world: World) -> None:
    """The command that founds the job is given once more, before that has begun."""
    founder = world.hosts[0]
    if not world.oracle.contents:
        world.faults.append(f"{world.now:.2f} start the founder anew")
        world.kill(founder, "killed")
        world.soon(lambda: world.add_host(world.per_host[0], True, founder.address), 0.5)


def _found_again(world: World) -> None:
    """The command that founded the job is given once more, while that goes on."""
    hosts = [host for host in _alive(world) if host.member.generation]
    hosts = [] if world.oracle.finished else hosts
    if hosts and not world.calm and all(h.address != world.hosts[0].address for h in _alive(world)):
        world.add_host(1, True, world.hosts[0].address)
