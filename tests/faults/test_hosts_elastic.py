"""An elastic job on hosts of our own, one of which is cut off, and comes back."""

from __future__ import annotations

import contextlib
import re
import signal

import pytest
from support.elastic_agents import finish, host
from support.hosts.lab import Lab

pytestmark = pytest.mark.usefixtures("needs_hosts")

PORT = 5600


def last_line(done):
    return done.err.splitlines()[-1]


def test_a_host_that_is_cut_off_is_left_behind_and_joins_again_if_it_may():
    with Lab(3) as lab, contextlib.ExitStack() as stack:
        address = f"{lab.hosts[0].address}:{PORT}"
        everyone = ",".join(f"{each.address}:{PORT}" for each in lab.hosts)

        def start(at, *options):
            options = ("-n", "1:3", "--per-node", 1, "--lost-after", 1.5, *options)
            within = lab.hosts[at].command()
            return stack.enter_context(host(*options, within=within))

        founding = ("--nnodes", 3, "--address", address)
        founding = (*founding, "--restarts", 1)
        hosts = [start(at, *founding, "--node-rank", at) for at in range(3)]
        pids = [pid for each in hosts for pid in each.ranks(1, 1).values()]

        def are_in(number, *those):
            """Those hosts are in a generation, with the processes that they have had."""
            for at in those:
                ranks = hosts[at].ranks(number, 1)
                assert [*ranks.values()] == [pids[at]]
                assert {*ranks.hosts} == {f"{lab.hosts[at].address}:{PORT}" for at in those}

        lab.silence(0)
        are_in(2, 1, 2)
        lab.mend()
        (again,) = hosts[0].ranks(3, 1).values()  # it is told, once it can hear
        assert again != pids[0]
        pids[0] = again
        are_in(3, 0, 1, 2)

        lab.silence(0)
        are_in(4, 1, 2)
        lab.mend()
        lost = hosts[0].job.finish()
        # Whether all of its links are broken as it hears of that, or its rank is left behind alone.
        assert lost.code in (1, 128 + signal.SIGKILL)
        assert re.search("goes on without (this host|it) as generation 4", last_line(lost))

        hosts[0] = start(0, "--join", everyone)
        (pids[0],) = hosts[0].ranks(5, 1).values()
        are_in(5, 0, 1, 2)
        finish(pids[0])
        for each in hosts:
            assert each.job.finish().code == 0
