"""Hosts with contestants on them, and what these take for a case."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import gpt_model
from support.hosts import plain
from support.hosts.lab import Lab
from support.hosts.places import PORT

from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.start import RankProgram, Start
from fsdpcore.bench.harness.team import Team
from fsdpcore.bench.harness.turns import Entrant, start_all
from fsdpcore.core.policy import Costs
from hosts_bench import start
from hosts_bench.cases import Case, Link, Scenario

_BENCH = Path(__file__).parents[1]
_FOLDERS = (_BENCH, _BENCH.parent / "tests", Path(gpt_model.__file__).parent)
# Before a case is timed; its check has done it once.
_WARMUP = 1
# Before all ranks have got an order and wait for its time.
_LEAD_SECONDS = 0.02
# A plain stream of about a tenth of a second.
_STREAM_SECONDS = 0.1


def program(module: str) -> RankProgram:
    """The program of a rank that finds the bench and the model."""
    return RankProgram.module(module, *_FOLDERS, threads=1)


COLLECTIVES = program("hosts_bench.member")


@dataclass
class Found:
    """What turns of a case have found.

    Attributes:
        wrong: how much of the results.
        seconds: until the last rank was done, by contestant and turn.
        links: what plain TCP found of the slowest link in the same turns.
    """

    wrong: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)

    @property
    def ours(self) -> float:
        """The median of our turns."""
        return median(self.seconds[OURS])


def typical(links: Sequence[Link]) -> Link:
    """The median of what was found."""
    return Link(*(median(values) for values in zip(*links, strict=True)))


class Site:
    """Hosts with contestants on them.

    Attributes:
        scenario: which hosts.
        lab: the hosts.
        entrants: who is on them, ours first.
    """

    def __init__(self, scenario: Scenario, lab: Lab, entrants: Sequence[Entrant]) -> None:
        self.scenario, self.lab, self.entrants = scenario, lab, entrants
        if scenario.slowest:  # ranks have measured links that are all alike
            lab.set_rate(scenario.hosts - 1, scenario.slowest)

    @property
    def ours(self) -> Team:
        """The team of our ranks."""
        return dict(self.entrants)[OURS]

    def turn(self, case: Case, found: Found, *, links: bool = True) -> None:
        """Have every contestant do a case once, after a check of its results.

        Args:
            case: what to do.
            found: gets what was found.
            links: measure the slowest link, too.
        """
        for name, team in self.entrants:
            team.ask(name, "prepare", case=case.order())
            found.wrong += int(sum(sum(ranks) for ranks in team.ask(name, "check")))
            for _ in range(_WARMUP):
                _once(team, name)
            if name == OURS and links:
                found.links.append(self.link())
            found.seconds.setdefault(name, []).append(_once(team, name))
            team.ask(name, "release")

    def link(self) -> Link:
        """What plain TCP finds of the slowest link."""
        scenario, hosts = self.scenario, self.lab.hosts
        size = self._stream
        one, other = hosts[0], hosts[-1]
        around = [(host, hosts[host.number - 1]) for host in hosts]
        return Link(
            plain.goodput(one, other, size),
            plain.goodput_of_all(
                around if not scenario.slowest else [(one, other), (other, one)], size
            ),
            plain.round_trip(one, other, 3 if scenario.delay else 20),
        )

    def rate_with_headers(self) -> float:
        """Bytes per second at which it carries one stream, those of headers too."""
        before, goodput = self.sent(), self.link().goodput
        # One stream, and one from each host. What warms the link up is a quarter of each.
        return goodput * self.sent_since(before) / (2 * 1.25 * self._stream)

    @property
    def _stream(self) -> int:
        """Bytes of a plain stream over the slowest link."""
        return int((self.scenario.slowest or self.scenario.rate) / 8 * _STREAM_SECONDS)

    def sent(self) -> list[float]:
        """Bytes that each host has sent."""
        return [self.lab.sent(host.number) for host in self.lab]

    def sent_since(self, before: Sequence[float]) -> float:
        """Bytes that the host that has sent the most since then has sent."""
        return max(now - then for now, then in zip(self.sent(), before, strict=True))

    def costs(self) -> Costs:
        """What our ranks choose algorithms by, in the job that is prepared."""
        return Costs(*self.ours.ask(OURS, "costs")[0])


@contextlib.contextmanager
def opened(
    scenario: Scenario, ranks: RankProgram, urls: Mapping[str, str], others: Sequence[str] = ()
) -> Iterator[Site]:
    """Make hosts, and start contestants on them.

    Args:
        scenario: which hosts.
        ranks: the program of a rank.
        urls: transports of ours, by contestant.
        others: further contestants.
    """
    lab = Lab(scenario.hosts, rate=scenario.rate, delay=scenario.delay)
    with lab, contextlib.ExitStack() as stack:
        starts: dict[str, Start] = {}
        for port, (name, url) in enumerate(urls.items(), PORT):
            starts[name] = start.on_hosts(lab, scenario.per_host, ranks, url, port, contestant=name)
        for name in others:
            starts[name] = start.one_by_one(lab, scenario.per_host, ranks, contestant=name)
        yield Site(scenario, lab, start_all(stack, scenario.ranks, starts))


def _once(team: Team, name: str) -> float:
    """Have all ranks do it at one time; seconds until the last is done."""
    answers = team.ask(name, "once", at=time.monotonic() + _LEAD_SECONDS)
    return max(seconds for (seconds,) in answers)
