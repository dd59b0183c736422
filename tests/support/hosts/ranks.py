"""Jobs whose ranks are on the hosts of a lab, started as a user does who sets the variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from support.hosts import namespaces
from support.hosts.lab import Host
from support.hosts.places import environs
from support.jobs import clean_environ
from support.zmq_ranks import PATIENCE, Body, RankProcess, joined

import fsdpcore as fc


@contextlib.contextmanager
def on_hosts(
    body: Body, hosts: Iterable[Host], per_host: int = 1, token: str = "", **options: Any
) -> Iterator[list[RankProcess]]:
    """Run ``body(backend, line)``, from the top of a module, on so many ranks of every host.

    The first ranks are on the first host. At the end none of them is left.

    Args:
        body: of every rank.
        hosts: of a lab; that, for all of them.
        per_host: number of ranks.
        token: the job's secret; by default one that nobody else has.
        options: settings, and options of the transport; by default with deadlines longer than
            any test's patience.
    """
    placed = [host for host in hosts for _ in range(per_host)]
    given = {"timeout": 2 * PATIENCE, "rendezvous_timeout": 2 * PATIENCE, **options}
    joins = [
        partial(_join, host, environ, given)
        for host, environ in zip(placed, environs(placed, token), strict=True)
    ]
    with joined(body, joins) as ranks:
        yield ranks


def _join(host: Host, environ: Mapping[str, str], options: Mapping[str, Any]) -> fc.Backend:
    namespaces.enter(host.namespace)
    kept = clean_environ(**environ)
    os.environ.clear()
    os.environ.update(kept)
    return fc.init("zmq", host_id=host.name, **options)
