"""The model of hosts, found on them in turn with what it is held against.

Whatever makes the machine slower for a while makes both slower.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from support.hosts.lab import burst

from fsdpcore.bench.harness import options
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.core.policy import Costs
from hosts_bench.cases import Case, Link, Scenario
from hosts_bench.prediction import Model
from hosts_bench.site import COLLECTIVES, Found, Site, opened, typical

_NO_LIMIT = 100e9  # bits per second, which no link of a lab carries


@dataclass
class Calibration:
    """What the model of a site is found by.

    Attributes:
        free: as many ranks, each on a host of its own, whose links have no limit: there the
            processor's part is found. How fast links are, ranks find out as they meet, so they are
            other ranks.
        site: the hosts.
        large: cases on them by which the rate of their links is found.
    """

    free: Site
    site: Site
    large: Sequence[Case]
    _parts: dict[str, Found] = field(default_factory=dict)
    _rates: dict[Case, Found] = field(default_factory=dict)

    def turn(self) -> None:
        """Have all that the model is found by done once."""
        for part, case in self.free.scenario.alone.items():
            self.free.turn(case, self._parts.setdefault(part, Found()), links=False)
        for case in self.large:
            self.site.turn(case, self._rates.setdefault(case, Found()))

    def model(self, echo: options.Echo) -> Model:
        """The model by which all of that takes as long as it did, in the median of the turns."""
        links = [link for found in self._rates.values() for link in found.links]
        costs, cores = _agreed_costs(self.site), len(os.sched_getaffinity(0))
        model = replace(_hosts(self.site.scenario, typical(links)), costs=costs, cores=cores)
        free, alone = self.free.scenario, self.free.scenario.alone
        parts = {part: (alone[part], found.ours) for part, found in self._parts.items()}
        apart = replace(model, hosts=free.hosts, per_host=free.per_host)
        found = apart.with_processor(parts, _agreed_costs(self.free))
        model = replace(model, byte=found.byte, message=found.message, wake=found.wake)
        model = model.with_links({case: found.ours for case, found in self._rates.items()})
        echo(
            f"# model: {8e-6 * model.rate:.1f} Mbit/s, to several others {model.spread:.2f} of it, "
            f"latency {1e6 * model.latency:.0f} us, "
            f"{1e6 * model.message:.0f} us for a message, {1e6 * model.wake:.0f} us to wake a "
            f"rank, {1e-6 / model.byte:.0f} MB/s of a core"
        )
        return model


@contextlib.contextmanager
def free_of(scenario: Scenario, url: str) -> Iterator[Site]:
    """As many ranks as a scenario has, on hosts of their own whose links have no limit."""
    apart = replace(scenario, hosts=scenario.ranks, per_host=1, rate=_NO_LIMIT, slowest=0.0)
    with opened(apart, COLLECTIVES, {OURS: url}) as site:
        yield site


def _agreed_costs(site: Site) -> Costs:
    """What our ranks choose algorithms by."""
    site.ours.ask(OURS, "prepare", case=site.scenario.alone["wake"].order())
    costs = site.costs()
    site.ours.ask(OURS, "release")
    return costs


def _hosts(scenario: Scenario, link: Link) -> Model:
    """The hosts, with links like the one that was measured."""
    rate, slowest, slowest_rate = link.together, 0.0, 0.0
    if scenario.slowest:
        slowest_rate = scenario.slowest
        rate, slowest = rate * scenario.rate / scenario.slowest, rate
    return Model(
        scenario.hosts,
        scenario.per_host,
        rate,
        link.round_trip / 2,
        slowest,
        burst=burst(scenario.rate),
        slowest_burst=burst(slowest_rate),
    )
