"""What an agent makes of what it knows: who is left out, who comes along, whom it speaks to."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest

from fsdpcore.elastic.decree import Decree
from fsdpcore.elastic.events import Finished, Install, Stop
from fsdpcore.elastic.generation import Generation, HostCard, Seat
from fsdpcore.elastic.here import Here
from fsdpcore.elastic.membership import Member
from fsdpcore.elastic.peers import Peers
from fsdpcore.elastic.reports import Report
from fsdpcore.elastic.succession import View, left_out, newcomers, wished

CARDS = {name: HostCard(name, f"{name}:1", f"{name}:2") for name in "abcd"}


def view(ranks: dict[str, int], *others: Report, **reports: dict[str, Any]) -> View:
    """What host a knows in generation 1: so many seats on each host; they all hear each other."""
    seats = tuple(Seat(host, n) for host, count in ranks.items() for n in range(count))
    generation = Generation(1, tuple(CARDS[host] for host in ranks), seats)
    names = frozenset([*ranks, *(each.card.id for each in others)])
    found = {each.card.id: each for each in others}
    for host, count in ranks.items():
        known = {"generation": 1, "member": True, "ready": tuple(range(count)), "hears": names}
        found[host] = Report(CARDS[host], **{**known, **reports.get(host, {})})
    return View("a", generation, found, names)


def test_of_two_hosts_that_do_not_hear_each_other_the_one_with_fewer_ranks_goes() -> None:
    for ranks, goes in (({"a": 1, "b": 1, "c": 2}, "b"), ({"a": 1, "b": 2, "c": 1}, "c")):
        found = left_out(view(ranks, c={"hears": frozenset("a")}))
        assert {seat.host for seat in found} == {goes}


def test_who_does_not_answer_goes_rather_than_who_no_longer_hears_it() -> None:
    found = view({"c": 1, "b": 1, "a": 1}, b={"hears": frozenset("ab")})
    for mute, goes in (("", "b"), ("c", "c"), ("b", "b")):
        gone = left_out(replace(found, mute=frozenset(mute)))
        assert {seat.host for seat in gone} == {goes}, mute


def test_who_was_not_expected_to_answer_has_not_answered_either() -> None:
    generation = view({"c": 1, "b": 1, "a": 1}).generation
    ours, theirs = (Decree(generation, "job", me, None, Random(0), 1.0) for me in "ab")
    (message,) = [each for voter, each in ours.propose(0.0) if voter == "b"]
    ((_, promise),) = theirs.receive("a", message)
    ours.receive("b", promise)
    asked: list[frozenset[str]] = []
    ours.step(1.0, {"a", "b"}, lambda silent: asked.append(silent))
    assert asked == [{"c"}]


def test_who_waits_is_asked_for_while_there_is_room_and_does_not_leave() -> None:
    hears = frozenset("ab")
    guest = Report(CARDS["c"], generation=1, ready=(0, 1), leaving=((1, "gone"),), hears=hears)
    found = view({"a": 1, "b": 1}, guest)
    assert newcomers(found, ["a", "b"]) == [(CARDS["c"], [0])]
    assert wished(found, 3) == "1 more come"
    assert wished(found, 2) == ""


def test_seats_of_a_host_that_leaves() -> None:
    here = Here()
    here.come(0)
    here.leave_all("told to go")
    here.come(1)
    assert here.leaving == {0: "told to go", 1: "told to go"}
    here.end(0)
    assert here.leaving == {1: "told to go"}


class Agents:
    """Members that hear each other at once, but those that stand still, or are cut off."""

    def __init__(self, names: str, minimum: int = 1) -> None:
        self.now, self.still, self.cut_off = 0.0, set[str](), set[str]()
        self.sent: list[tuple[str, str, str]] = []  # from, to, kind
        self.events: dict[str, list[Any]] = {name: [] for name in names}
        self.members = {
            name: Member(
                CARDS[name], minimum=minimum, maximum=8, lost_after=1.0, patience=5.0, job="job"
            )
            for name in names
        }
        first, *others = names
        self.members[first].found(len(names), 0.0)
        for name in others:
            self.members[name].join([CARDS[first].address], 0.0)
        for name in names:
            self.members[name].seat_ready(0, 0.0)
        self.run(0.1)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.deliver()
            self.now += 0.01
            for name, member in self.members.items():
                if name not in self.still and member.next_tick() <= self.now:
                    member.tick(self.now)

    def deliver(self) -> None:
        for _ in range(20):
            for name, member in self.members.items():
                self.events[name] += member.take_events()
                for address, message in member.take_outbox():
                    to = address[0]
                    self.sent.append((name, to, message["kind"]))
                    if to in self.members and not {name, to} & (self.still | self.cut_off):
                        self.members[to].receive(CARDS[name].address, message, self.now)

    def generations(self, name: str) -> list[int]:
        return [e.generation.number for e in self.events[name] if isinstance(e, Install)]


def test_an_agent_that_stood_still_does_not_blame_the_others() -> None:
    agents = Agents("abc")
    assert [*map(agents.generations, "abc")] == [[1]] * 3
    member = agents.members["a"]
    agents.now += 10
    b, c = agents.members["b"], agents.members["c"]
    for other in (b, c):
        other._peers.catch_up(agents.now)  # they stood still as well
        other.tick(agents.now)
    (message, *_) = [m for address, m in b.take_outbox() if address == CARDS["a"].address]
    member.receive(CARDS["b"].address, message, agents.now)
    assert member._peers.linked(agents.now) == {"a", "b", "c"}


def test_what_its_ranks_say_first_makes_an_agent_that_stood_still_blame_nobody() -> None:
    agents = Agents("abc")
    agents.now += 10
    agents.members["a"].seat_started(1, agents.now)
    assert agents.members["a"]._peers.linked(agents.now) == {"a", "b", "c"}


def test_who_was_lost_is_told_where_it_was() -> None:
    agents = Agents("abc")
    agents.still.add("c")
    agents.run(3)
    assert agents.generations("a") == agents.generations("b") == [1, 2]
    agents.sent.clear()
    agents.run(1)
    assert ("a", "c", "state") in agents.sent


def test_of_those_that_were_lost_the_newest_are_told() -> None:
    agents = Agents("a")
    a = agents.members["a"]
    for number in range(2, 50):
        guest = HostCard(f"{number}", f"{number}:1", f"{number}:2")
        hosts, seats = (CARDS["a"], guest), (Seat("a", 0), Seat(guest.id, 0))
        a._learn(Generation(number, hosts, seats), agents.now)
    a.take_outbox()
    a.tick(agents.now + 0.3)
    told = {address for address, _ in a.take_outbox()}
    assert told == {f"{number}:1" for number in range(17, 50)}


@pytest.mark.parametrize("minimum", [1, 2])
def test_the_job_may_go_on_without_a_minority_however_small(minimum: int) -> None:
    agents = Agents("abc", minimum)
    agents.cut_off.add("c")
    agents.run(7)
    assert agents.generations("a") == [1, 2]
    (stop,) = (event for event in agents.events["c"] if isinstance(event, Stop))
    assert stop.goes_on
    assert stop.reason.startswith("1 of 3 ranks are within reach, and going on needs more than ")


@pytest.mark.parametrize("who", ["a", "c"])
def test_a_job_is_finished_whatever_is_decided_meanwhile(who: str) -> None:
    agents = Agents("abc")
    agents.still.add("c")
    agents.run(3)
    assert agents.generations("a") == [1, 2]
    # All ranks were at the end of the program before that of c was lost; one agent hears of it.
    agents.members[who].seat_finished(0, 1, agents.now)
    agents.still.clear()
    agents.run(0.5)
    assert [agents.events[name][-1] for name in "abc"] == [Finished()] * 3


def _generation(member: Member) -> Generation:
    assert member.generation is not None
    return member.generation


def make(name: str, address: str, job: str = "") -> Member:
    card = HostCard(name, f"{address}:1", f"{address}:2")
    return Member(card, minimum=1, maximum=8, lost_after=1.0, patience=5.0, job=job)


def talk(now: float, **members: Member) -> int:
    """Deliver what members at these addresses say, until they are silent; returns how much."""
    count = 0
    while sent := [(w, *each) for w, member in members.items() for each in member.take_outbox()]:
        count += len(sent)
        assert count < 100
        for where, address, message in sent:
            if address[0] in members:
                members[address[0]].receive(f"{where}:1", message, now)
    return count


def test_who_joins_goes_with_a_founder_that_is_started_again_before_the_job_begins() -> None:
    first, second, guest = make("1", "a", "job 1"), make("2", "a", "job 2"), make("3", "b")
    first.found(2, 0.0)
    guest.join(["a:1"], 0.0)
    talk(0.0, a=first, b=guest)
    assert guest.job == "job 1"
    second.found(2, 0.1)
    guest.seat_ready(0, 0.1)
    second.seat_ready(0, 0.1)
    talk(0.1, a=second, b=guest)
    assert guest.job == second.job == "job 2"
    assert guest.generation == _generation(second)
    first.tick(0.2)
    talk(0.2, a=first, b=guest)  # what was long on its way
    assert guest.job == "job 2"


def test_who_founds_a_job_that_goes_on_joins_it_and_takes_its_guests_along() -> None:
    agents = Agents("abc")
    again, guest = make("a2", "a", "job 2"), make("d", "d")
    agents.members |= {"a": again, "d": guest}
    agents.events["d"] = []
    agents.still = {"b", "c"}
    again.found(3, agents.now)
    guest.join(["a:1"], agents.now)
    agents.run(0.1)
    assert guest.job == "job 2"
    agents.still.clear()
    for member in (again, guest):
        member.seat_ready(0, agents.now)
    agents.run(2)
    assert {member.job for member in agents.members.values()} == {"job"}
    newest = _generation(agents.members["b"])
    assert {card.id for card in newest.hosts} == {"a2", "b", "c", "d"}
    assert all(member.generation == newest for member in agents.members.values())


@pytest.mark.parametrize(
    "harm",
    [
        {"report": {}},
        {"sequence": None},
        {"decided": {"number": 7}},
        {"number": float("inf")},
        {"ballot": [1]},
        {"kind": "elect"},
        {"value": {"number": 2}},
    ],
)
def test_what_is_no_message_is_ignored_as_a_whole(harm: dict[str, Any]) -> None:
    agents = Agents("ab")
    a, b = (agents.members[name] for name in "ab")
    b.seat_ready(1, agents.now)
    (_, message), *_ = b.take_outbox()
    value = _generation(a).encode()
    message |= {"kind": "accept", "number": 2, "ballot": [1, "b"], "value": value}
    before = a._peers.reports()
    a.receive(CARDS["b"].address, {**message, **harm}, agents.now)
    assert a._peers.reports() == before
    a.receive(CARDS["b"].address, message, agents.now)
    assert a._peers.reports() != before


def test_errors_of_its_own_are_not_taken_for_those_of_a_message() -> None:
    agents = Agents("ab")
    agents.members["b"].seat_ready(1, agents.now)
    with mock.patch.object(Peers, "note", side_effect=KeyError), pytest.raises(KeyError):
        agents.deliver()


def test_two_founders_do_not_answer_each_other_for_ever() -> None:
    one, other = make("1", "a", "job 1"), make("2", "b", "job 2")
    for member in (one, other):
        member.found(2, 0.0)
    one._mail.to_address("b:1")
    assert talk(0.0, a=one, b=other) == 1


def test_who_waits_for_a_job_that_goes_on_is_not_drawn_away_by_a_founder() -> None:
    one, other, guest = make("1", "a", "job 1"), make("2", "b", "job 2"), make("3", "c")
    one.seat_ready(0, 0.0)
    one.found(1, 0.0)
    guest._peers.note(one._report, 1, 0.0)
    guest._tie.job, guest._tie.founder = "job 1", "1"
    other.found(2, 0.0)
    other._mail.to_address("c:1")
    talk(0.0, b=other, c=guest)
    assert guest.job == "job 1"
    guest.tick(0.4)
    guest.tick(0.8)
    guest.tick(1.2)
    other._mail.to_address("c:1")
    talk(1.2, b=other, c=guest)
    assert guest.job == "job 2"


@pytest.mark.parametrize("ends", [False, True])
def test_a_job_that_has_begun_or_begins_after_another_stays_apart_from_it(ends: bool) -> None:
    one, other = make("1", "a", "job 1"), make("2", "b", "job 2")
    for member in (one, other):
        if member is one or not ends:
            member.seat_ready(0, 0.0)
        member.found(1, 0.0)
    if ends:
        one.seat_finished(0, 1, 0.0)
    talk(0.0, a=one, b=other)
    for member, address in ((one, "b:1"), (other, "a:1")):
        member._mail.to_address(address)
    assert talk(0.1, a=one, b=other) <= 4
    assert (one.job, other.job) == ("job 1", "job 2")
    assert other._peers.reports() == one._peers.reports() == {}
    assert not other.finished
