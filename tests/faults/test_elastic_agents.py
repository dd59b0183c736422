"""``fsdpcore run --elastic``: ranks and hosts come and go, and the agents keep the job together.

All hosts are this one; the ranks have no arrays (``support/elastic_seat.py``).
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from support.elastic_agents import blame_the_last, finish, host, kill

pytestmark = pytest.mark.side_by_side(4)


def last_line(done):
    return done.err.splitlines()[-1]


def test_ranks_that_are_lost_leave_the_others_as_they_are():
    with host("-n", "1:3") as here:
        first = here.ranks(1, 3)
        assert (sorted(first), first.world_size) == ([0, 1, 2], 3)
        (meeting,) = first.meetings
        kill(first[0])
        second = here.ranks(2, 2)
        assert {**second} == {0: first[1], 1: first[2]}
        assert (second.world_size, second.meetings) == (2, {meeting})
        os.kill(second[1], signal.SIGSTOP)
        blame_the_last(second[0])
        third = here.ranks(3, 1)
        assert {**third} == {0: first[1]}
        here.job.wait_until_gone(second[1])
        finish(third[0])
        done = here.job.finish()
    assert done.code == 0
    _, one, killed, two, three, blamed = done.err.splitlines()
    assert one == "fsdpcore: generation 1: 3 ranks on 1 host (the job begins)"
    assert killed == f"fsdpcore: rank 0 (process {first[0]}) failed (killed by SIGKILL)"
    assert two == "fsdpcore: generation 2: 2 ranks on 1 host (rank 0 on 127.0.0.1 has ended)"
    assert three.startswith("fsdpcore: generation 3: 1 rank on 1 host (rank 1 on 127.0.0.1 is ")
    assert blamed == (
        f"fsdpcore: rank 1 (process {second[1]}) is killed: the other ranks have left it behind"
    )


def test_what_died_is_started_again_as_often_as_it_may_then_the_job_ends():
    with host("-n", 2, "--restarts", 1, "--rendezvous-timeout", 3) as here:
        first = here.ranks(1, 2)
        kill(first[0])
        second = here.ranks(2, 2)
        assert second[0] == first[1]
        assert second[1] not in first.values()
        kill(second[1])
        done = here.job.finish()
    assert done.code == 128 + signal.SIGKILL
    assert f"stop {first[1]}" in done.out
    assert last_line(done).startswith(
        f"fsdpcore: rank 1 (process {second[1]}) failed (killed by SIGKILL); 1 "
    )
    assert "the job needs 2" in last_line(done)


def test_the_only_rank_is_started_again_before_the_job_gives_up():
    with host("-n", 1, "--restarts", 1) as here:
        first = here.ranks(1, 1)
        kill(first[0])
        second = here.ranks(2, 1)
        assert second[0] != first[0]
        kill(second[0])
        done = here.job.finish()
    assert done.code == 128 + signal.SIGKILL
    assert "; no ranks are left" in last_line(done)


def test_hosts_come_and_go_the_founder_first(free_port, tmp_path_factory):
    port = free_port()
    lost = ("--lost-after", 1.5, "--witness", tmp_path_factory.mktemp("shared") / "witness")
    nodes = [
        "-n",
        "1:4",
        "--nnodes",
        2,
        "--per-node",
        "1,2",
        "--address",
        f"127.0.0.1:{port}",
        *lost,
    ]
    join = ["-n", "1:4", "--per-node", 1, *lost, "--join"]
    with (
        host(*nodes, "--node-rank", 0) as founder,
        host(*nodes, "--node-rank", 1) as second,
    ):
        (one,) = founder.ranks(1, 1).values()
        two = second.ranks(1, 2)
        assert (sorted(two), two.world_size) == ([1, 2], 3)

        with host(*join, f"127.0.0.1:{port}") as third:
            three = third.ranks(2, 1)
            assert (sorted(three), three.world_size) == ([3], 4)
            assert {**founder.ranks(2, 1)} == {0: one}
            assert {**second.ranks(2, 2)} == {**two}
            third.signal(signal.SIGTERM)
            left = third.job.finish()
        assert (left.code, left.out.splitlines()[-1].split()[0]) == (0, "left")
        assert "this host has left in order; the job goes on without it" in last_line(left)
        assert founder.ranks(3, 1).world_size == 3
        second.ranks(3, 2)

        founder.vanish()
        after = second.ranks(4, 2)
        assert {**after} == {0: two[1], 1: two[2]}
        assert after.meetings != two.meetings  # rank 0 is on another host

        with host(*join, after.hosts[0]) as fourth:
            assert sorted(fourth.ranks(5, 1)) == [2]
            kill(two[1])
            assert sorted(fourth.ranks(6, 1)) == [1]
            assert {**second.ranks(6, 1)} == {0: two[2]}
            fourth.vanish()  # exactly half of the ranks: the witness decides
        assert {**second.ranks(7, 1)} == {0: two[2]}
        finish(two[2])
        assert second.job.finish().code == 0


def test_a_host_with_another_secret_joins_nowhere_and_ctrl_c_ends_the_other():
    with (
        host("-n", "1:2", "--per-node", 1) as founder,
        contextlib.ExitStack() as stack,
    ):
        (address,) = founder.ranks(1, 1).hosts
        options = ["-n", "1:2", "--per-node", 1, "--rendezvous-timeout", 1, "--join", address]
        with host(*options, token="the secret of another one") as stranger:
            done = stranger.job.finish()
        second = stack.enter_context(host("-n", "1:2", "--per-node", 1, "--join", address))
        assert second.ranks(2, 1).world_size == 2
        founder.signal(signal.SIGINT)
        ended = founder.job.finish()
        (alone,) = second.ranks(3, 1).values()  # the founder has voted for that
        finish(alone)
        assert second.job.finish().code == 0
    assert ended.code == 130
    assert last_line(ended) == "fsdpcore: interrupted (SIGINT); the ranks of this host were stopped"
    assert (done.code, "in " in done.out) == (1, False)
    assert last_line(done) == (
        f"fsdpcore: no agent of the job has answered within 1 s at {address}; who listens there "
        "does not know the secret of this host (FSDPCORE_TOKEN, FSDPCORE_TOKEN_FILE), or is no "
        "agent of this version of fsdpcore"
    )


def test_ranks_of_a_host_that_goes_hand_over_before_they_end():
    with host("-n", 2) as here:
        here.ranks(1, 2)
        here.signal(signal.SIGTERM)
        done = here.job.finish()
    assert (done.code, done.out.count("left ")) == (143, 2)
    assert last_line(done).startswith("fsdpcore: terminated (SIGTERM); no ranks are left")


def test_a_script_without_an_elastic_function_is_told_so(script):
    with host("-n", 2, "--restarts", 1, script=script("print('nothing')")) as here:
        done = here.job.finish()
    assert done.code == 1
    assert "started again" not in done.err
    assert last_line(done).endswith(
        "ended without calling a function with @fc.elastic.run; no rank is left on this host"
    )


def test_what_a_program_raises_on_all_ranks_is_the_last_word(script):
    path = script("import fsdpcore as fc\n@fc.elastic.run\ndef f(job): 1 / 0\nf()\n")
    with host("-n", "1:2", script=path) as here:
        done = here.job.finish()
    assert done.code == 1
    assert "ZeroDivisionError" in last_line(done)
    assert "no ranks are left" in last_line(done)
