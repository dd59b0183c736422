"""What a member tells its user: what it waits for, and by whose terms it goes."""

from __future__ import annotations

from unittest import mock

import pytest

from fsdpcore.elastic.events import Note, Stop
from fsdpcore.elastic.generation import HostCard
from fsdpcore.elastic.membership import Member
from fsdpcore.elastic.paxos import Witness


def make(
    name: str, least: int, most: int, lost_after: float, witness: Witness | None = None
) -> Member:
    return Member(
        HostCard(name * 16, f"{name}:1", f"{name}:2"),
        minimum=least,
        maximum=most,
        lost_after=lost_after,
        patience=30.0,
        job="" if name == "b" else "job",
        witness=witness,
    )


def notes(member: Member) -> list[str]:
    return [event.text for event in member.take_events() if isinstance(event, Note)]


def test_a_member_says_what_it_waits_for_and_keeps_to_the_terms_of_the_job() -> None:
    first, second = make("a", 2, 3, 4.0), make("b", 1, 9, 60.0)
    first.seat_started(0, 0.0)
    first.found(1, 0.0)
    second.join(["a:1"], 0.0)
    second.seat_ready(0, 0.0)
    for member in (first, second):
        member.tick(2.9)
    assert notes(first) == notes(second) == []
    first.tick(3.1)
    assert notes(first) == []  # its own rank is on its way
    first.seat_ready(0, 3.2)
    second.tick(3.1)
    (why,) = notes(first)
    assert why == "this host waits, up to 30 s: 1 of at least 2 ranks and 1 of 1 hosts have come"
    assert notes(second) == ["this host waits, up to 30 s: no agent of the job has answered at a:1"]

    def talk(now: float, *, silent: bool = False) -> None:
        for _ in range(20):
            for source, member, other in (("a:1", first, second), ("b:1", second, first)):
                for _, message in member.take_outbox():
                    if not silent:
                        other.receive(source, message, now)

    talk(3.3)
    assert notes(second) == [
        "the job has -n 2:3 and --lost-after 4; so has this host",
        "the job knows of this host, which waits until it is taken along",
    ]
    for member in (first, second):
        assert member.generation is not None
        assert len(member.generation.seats) == 2
    # By its own terms it would go on alone.
    first.seat_ended(0, 4.0)
    for now in (4.1, 4.5, 5.0, 7.2):
        for member in (first, second):
            member.tick(now)
        talk(now)
    assert second.generation is not None
    assert second.generation.number == 1
    (why,) = notes(second)
    assert why.startswith("this host waits, up to 30 s: 1 rank is left, and the job needs 2: ")


@pytest.mark.parametrize(
    ("ours", "theirs", "what"),
    [
        ("", "x", "the job has a witness, and this host has none"),
        ("x", "", "the job has no witness, and this host has one"),
        ("x", "y", "the job has another witness file than this host"),
    ],
)
def test_who_has_another_witness_than_the_job_stops_and_says_so(
    ours: str, theirs: str, what: str
) -> None:
    def witness(name: str) -> Witness | None:
        return mock.Mock(Witness, id=name) if name else None

    first, second = make("a", 1, 2, 4.0, witness(theirs)), make("b", 1, 2, 4.0, witness(ours))
    first.found(2, 0.0)
    second.join(["a:1"], 0.0)
    for _ in range(3):
        for source, member, other in (("b:1", second, first), ("a:1", first, second)):
            for _, message in member.take_outbox():
                other.receive(source, message, 0.1)
    *_, stop = second.take_events()
    assert stop == Stop(f"{what}: --witness must name the same file on all hosts")
