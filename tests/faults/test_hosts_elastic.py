"""An elastic job on hosts of our own: one loses its power, one is cut off and comes back."""

from __future__ import annotations

import contextlib

import pytest
from support.elastic_agents import finish, host
from support.hosts.lab import Lab

pytestmark = pytest.mark.usefixtures("needs_hosts")

PORT = 5600


def test_a_host_without_power_and_one_that_is_cut_off_are_left_behind():
    with Lab(4) as lab, contextlib.ExitStack() as stack:
        address = f"{lab.hosts[0].address}:{PORT}"
        everyone = ",".join(f"{each.address}:{PORT}" for each in lab.hosts)

        def start(at, *options):
            options = ("-n", "1:4", "--per-node", 1, "--lost-after", 1.5, *options)
            within = lab.hosts[at].command()
            return stack.enter_context(host(*options, within=within))

        founding = ("--nnodes", 4, "--address", address)
        hosts = [start(at, *founding, "--node-rank", at) for at in range(4)]
        pids = [pid for each in hosts for pid in each.ranks(1, 1).values()]

        def are_in(number, *those):
            """Those hosts are in a generation, with the processes that they have had."""
            for at in those:
                ranks = hosts[at].ranks(number, 1)
                assert [*ranks.values()] == [pids[at]]
                assert {*ranks.hosts} == {f"{lab.hosts[at].address}:{PORT}" for at in those}

        lab.vanish(0)
        are_in(2, 1, 2, 3)
        lab.silence(3)
        are_in(3, 1, 2)
        lab.mend()
        lost = hosts[3].job.finish()  # it is told, once it can hear
        assert lost.code == 1
        assert "the job goes on without this host as generation 3" in lost.err.splitlines()[-1]

        hosts[3] = start(3, "--join", everyone)
        (pids[3],) = hosts[3].ranks(4, 1).values()
        are_in(4, 1, 2, 3)
        finish(pids[3])
        for each in hosts[1:]:
            assert each.job.finish().code == 0
