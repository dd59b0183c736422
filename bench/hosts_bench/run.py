"""A whole run: make hosts, start the contestants on them, let them take turns, print, save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from support.hosts.lab import why_no_hosts

from fsdpcore import __version__
from fsdpcore.bench.harness import options, record, table
from fsdpcore.core.errors import ArgumentError, ConfigError
from hosts_bench import collectives, training
from hosts_bench.cases import SCENARIOS, TRAININGS
from hosts_bench.request import ENCRYPTED, SIMULATED, HostsRun, error
from hosts_bench.start import GLOO

PEERS = (ENCRYPTED, SIMULATED, GLOO)
PARTS = (*(each.name for each in SCENARIOS), *(each.name for each in TRAININGS))


def check(request: HostsRun) -> None:
    """Check everything that can be wrong before a rank is started.

    Raises:
        ArgumentError: an option's value is wrong.
        ConfigError: this machine can make no hosts.
        MissingDependencyError: a package is needed that is not installed.
    """
    options.check_known("--parts", request.parts, PARTS)
    options.check_known("--against", request.against, PEERS)
    options.check_torch([peer for peer in request.against if peer == GLOO])
    options.check_writable(request.json)
    if ENCRYPTED in request.against and "security=none" not in request.transport:
        raise ArgumentError(
            "--against encrypted: ours says all of it encrypted already; give it --transport "
            "'zmq://?security=none'"
        )
    if why := why_no_hosts():
        raise ConfigError(why)


def measure(request: HostsRun, echo: options.Echo) -> int:
    """Measure all parts; how much was wrong, over all contestants."""
    run = record.RunRecord("hosts")
    first = f"fsdpcore {__version__}, transport {request.transport}"
    for each in table.heading(run.machine, first, f"median of {request.rounds} rounds"):
        echo(each)
    results: list[dict[str, Any]] = []
    versions: dict[str, Any] = {}
    for scenario in SCENARIOS:
        if scenario.name in request.parts:
            results += collectives.measured(request, scenario, versions, echo)
    for trained in TRAININGS:
        if trained.name in request.parts:
            results += training.measured(request, trained, versions, echo)
    if request.simulated and results:
        echo(_verdict(results))
    run.save(request.json, versions=versions, settings=_settings(request), results=results)
    return sum(each["wrong"] for each in results)


def _verdict(results: Sequence[Mapping[str, Any]]) -> str:
    """How far off the simulated times are."""
    errors = sorted(abs(error(each["samples_ms"])) for each in results)
    return (
        f"#\n# simulated: off by {100 * median(errors):.1f} % (median of {len(errors)} cases), "
        f"at most {100 * errors[-1]:.1f} %"
    )


def _settings(request: HostsRun) -> dict[str, Any]:
    return {name: value for name, value in vars(request).items() if name != "json"}
