"""Starting the ranks of a contestant on the hosts of a lab."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.hosts.lab import Lab
from support.hosts.places import environs

from fsdpcore.bench.harness.start import RankProgram, Start
from fsdpcore.launch.supervision import LaunchedProcess

GLOO = "gloo"


def on_hosts(
    lab: Lab, per_host: int, program: RankProgram, transport: str, port: int, **options: Any
) -> Start:
    """Start ranks of ours that join as the variables say.

    Args:
        lab: whose hosts they are on.
        per_host: number of ranks on each.
        program: of a rank.
        transport: URL, to which what tells the hosts apart is added.
        port: at which they meet, on the first host.
        options: of all ranks.
    """
    hosts = [host for host in lab for _ in range(per_host)]

    def start(directory: Path, path: str) -> list[LaunchedProcess]:
        join = "&" if "?" in transport else "?"
        places = environs(hosts, port=port)
        return [
            _process(
                lab,
                program,
                rank // per_host,
                {**place, "FSDPCORE_TRANSPORT": f"{transport}{join}host_id={hosts[rank].name}"},
                {**options, "path": path},
            )
            for rank, place in enumerate(places)
        ]

    return start


def one_by_one(lab: Lab, per_host: int, program: RankProgram, **options: Any) -> Start:
    """Start ranks of others, which meet through a file, as ``RankProgram.one_by_one`` does."""

    def start(directory: Path, path: str) -> list[LaunchedProcess]:
        size = per_host * len(lab.hosts)
        shared = {"store": str(directory / "store"), "world_size": size, "path": path}
        return [
            _process(
                lab,
                program,
                rank // per_host,
                {"GLOO_SOCKET_IFNAME": "eth0"},
                {"threads": program.threads, **options, **shared, "rank": rank},
            )
            for rank in range(size)
        ]

    return start


def _process(
    lab: Lab,
    program: RankProgram,
    host: int,
    environ: Mapping[str, str],
    options: Mapping[str, Any],
) -> LaunchedProcess:
    given = {name: value for name, value in os.environ.items() if not name.startswith("FSDPCORE_")}
    command = [program.python, *program.command, json.dumps(options)]
    cores, hosts = sorted(os.sched_getaffinity(0)), len(lab.hosts)
    each = len(cores) // hosts
    if each:  # every host has cores of its own
        mine = cores[host * each :][:each]
        command = ["taskset", "-c", ",".join(map(str, mine)), *command]
    return LaunchedProcess(
        lab.hosts[host].command(*command),
        environ={**given, **program.environ, **environ},
    )
