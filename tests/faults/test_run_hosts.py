"""``fsdpcore run --hosts`` and ``--nnodes``: one job on several hosts, which ends as a whole."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from support import fake_ssh
from support.hosts.lab import Lab
from support.jobs import SOON, finished, fsdpcore, started

pytestmark = pytest.mark.side_by_side(4)


@pytest.fixture(scope="session")
def ssh(tmp_path_factory):
    """An environment with an ssh to hosts of any name, all of them this one."""
    return fake_ssh.install(tmp_path_factory.mktemp("ssh"))


def run(*arguments, hosts="a,me@b:2", ranks=3):
    """The command line; the hosts meet on the loopback, which they would not by themselves."""
    where = ["--hosts", hosts, "-n", ranks, "--address", "127.0.0.1"]
    return fsdpcore("run", *where, *arguments)


TOTAL = """
import os, sys
import numpy as np
import fsdpcore as fc

OURS = ["FSDPCORE_LOCAL_RANK", "FSDPCORE_LOCAL_WORLD_SIZE", "FSDPCORE_TIMEOUT"]
NAMES = ["FAKE_HOST", *OURS, "MINE"]

def main(backend):
    total = fc.all_reduce(np.ones(3), backend)
    assert sys.stdin.read() == ""
    print(sys.argv[1:], [os.environ.get(name) for name in NAMES], os.getcwd(), total.sum())
    if backend.rank == 0:
        secret, seen = os.environ["FSDPCORE_TOKEN"], b""
        for entry in os.listdir("/proc"):
            try:
                seen += open(f"/proc/{entry}/cmdline", "rb").read()
            except OSError:
                pass
        assert len(secret) >= 32 and b"fsdpcore" in seen
        print("secret seen:", secret.encode() in seen, file=sys.stderr)

if __name__ == "__main__":
    fc.launch(main)
"""


def test_the_ranks_of_all_hosts_are_one_job(script, ssh):
    path = script(TOTAL)
    environ = {**ssh, "MINE": "a b'$c", "FSDPCORE_WORLD_SIZE": "7", "FSDPCORE_TOKEN": "old"}
    command = run("--timeout", 70, "--env", "MINE", path.name, "-n", "x y")
    done = finished(command, environ, cwd=path.parent)
    assert done.code == 0, done.err
    places = {0: ("a", "0", "1"), 1: ("b", "0", "2"), 2: ("b", "1", "2")}
    assert sorted(done.out.splitlines()) == [
        f"[{place[0]}:{rank}] ['-n', 'x y'] "
        f"{[fake_host(place[0]), *place[1:], '70.0', environ['MINE']]} {path.parent} 9.0"
        for rank, place in places.items()
    ]
    assert sorted(done.err.splitlines()) == [
        "[a:0] secret seen: False",
        "[a] welcome to a",
        "[b] welcome to me@b",
    ]


def fake_host(name):
    return "me@b" if name == "b" else name


PLAIN = """
import os, signal, sys, time
rank = os.environ["FSDPCORE_RANK"]
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.write(1, b"ready %d\\n" % os.getpid())
if rank == "1" and sys.argv[1:]:
    time.sleep(0.3)
    os.write(1, b"failing %f\\n" % time.time())
    os.write(2, b"rank 1 failed:\\n  it is unwell\\n")
    sys.exit(int(sys.argv[1]))
time.sleep(100)
"""


def test_a_rank_that_fails_ends_the_ranks_of_all_hosts(script, ssh):
    done = finished(run("--no-prefix", script(PLAIN), 5), ssh)
    assert done.code == 5
    assert done.err.splitlines()[-3:] == [
        "rank 1 failed:",
        "  it is unwell",
        "fsdpcore: rank 1 on b failed (exit code 5); the other ranks were stopped",
    ]
    assert done.ended - done.moment("failing") < SOON


def agents(job):
    """The agents of a job by host, and what it calls ssh."""
    found = {}
    for pid in job.pids():
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        host = [item[10:].decode() for item in environ if item.startswith(b"FAKE_HOST=")]
        if line[1:3] == [b"-m", b"fsdpcore.launch.run.agent"]:
            found[host[0]] = pid
        elif fake_ssh.__file__.encode() in line:
            found[f"ssh {line[-3].decode()}"] = pid
    return found


@pytest.mark.parametrize(
    ("victim", "number", "code", "words"),
    [
        ("launcher", signal.SIGKILL, -9, None),
        ("launcher", signal.SIGHUP, 129, "terminated (SIGHUP); all ranks were stopped"),
        ("ssh me@b", signal.SIGKILL, 137, "host me@b: the command that starts its ranks ended"),
    ],
)
def test_whatever_ends_leaves_no_rank_on_any_host(script, ssh, victim, number, code, words):
    with started(run("--no-prefix", script(PLAIN)), ssh) as job:
        job.wait_for("ready", 3)
        found = {"launcher": job.process.pid, **agents(job)}
        assert len(found) == 5
        sent = time.time()
        os.kill(found[victim], number)
        done = job.finish()
    assert done.code == code
    assert words is None or words in done.err.splitlines()[-1]
    assert done.ended - sent < SOON


def test_a_host_that_is_down_is_named(script, ssh):
    done = finished(run(script(PLAIN), hosts="a,down"), ssh)
    *rest, last = done.err.splitlines()
    assert done.code == 255
    assert "[down] ssh: connect to host down port 22: No route to host" in rest
    assert last.startswith("fsdpcore: host down: the command that starts its ranks ended")
    assert f"it needs {sys.executable}" in last


# Each host by itself.

INDEXED = """
import os
import fsdpcore as fc
assert "FSDPCORE_TOKEN_FILE" not in os.environ and os.environ["FSDPCORE_TOKEN"] == "of the pod"
assert os.environ["FSDPCORE_RANKS_PER_HOST"] == "1,2"
backend = fc.init()
print(fc.all_gather([backend.rank], backend).tolist(), os.environ["FSDPCORE_LOCAL_RANK"])
"""


def test_one_command_on_each_host_with_the_secret_in_a_file(script, free_port, tmp_path_factory):
    """As in the pods of a Job of Kubernetes, which has an index in each."""
    secret = tmp_path_factory.mktemp("secret") / "token"
    secret.write_text("of the pod\n")
    secret.chmod(0o400)
    line = (
        f"exec {' '.join(fsdpcore())} run --nnodes 2 --node-rank $JOB_COMPLETION_INDEX --prefix "
        f"--address 127.0.0.1:{free_port()} --per-node 1,2 {script(INDEXED)}"
    )
    environ = {"FSDPCORE_TOKEN_FILE": str(secret)}
    pods = [{**environ, "JOB_COMPLETION_INDEX": str(index)} for index in range(2)]
    with started(["sh", "-c", line], pods[0]) as first, started(["sh", "-c", line], pods[1]) as two:
        done = [first.finish(), two.finish()]
    assert [(each.code, each.err) for each in done] == [(0, ""), (0, "")]
    assert done[0].out == "[0] [0, 1, 2] 0\n"
    assert sorted(done[1].out.splitlines()) == ["[1] [0, 1, 2] 0", "[2] [0, 1, 2] 1"]


# Hosts with a network of their own.

HOSTS_JOB = """
import os, time
import fsdpcore as fc

def main(backend):
    print("ready", fc.all_gather([backend.rank], backend).tolist(), flush=True)
    time.sleep(100 if backend.rank == 2 else 0)
    backend.barrier()

if __name__ == "__main__":
    fc.launch(main)
"""


def test_a_host_that_dies_ends_the_job_with_its_name(script, needs_hosts):
    """The hosts are known by their addresses, so that none is named for the ranks to meet."""
    with Lab(2) as lab:
        names = [host.address for host in lab.hosts]
        cases = [f'{host.address}) exec {shlex.join(host.command())} "$@";;' for host in lab.hosts]
        enter = script("host=$1; shift\ncase $host in\n" + "\n".join(cases) + "\nesac\n", "enter")
        where = ["--hosts", ",".join(names), "-n", 4, "--launcher", f"sh {enter} {{host}}"]
        where += ["--rendezvous-timeout", 15]
        with started(fsdpcore("run", *where, "--no-prefix", script(HOSTS_JOB))) as job:
            job.wait_for("ready [0, 1, 2, 3]", 4)
            killed = time.time()
            lab.kill(1)
            done = job.finish()
        assert done.code == 137
        assert f"host {names[1]}: the command that starts its ranks" in done.err.splitlines()[-1]
        for rank in (0, 1):
            (line,) = [one for one in done.err.splitlines() if one.startswith(f"rank {rank}:")]
            assert "stopped, because rank" in line
        assert done.ended - killed < SOON
        assert not lab.pids()


def test_two_launchers_at_one_address_are_not_two_jobs_without_a_word(script, needs_hosts):
    with Lab(2) as lab:
        url = f"zmq://{lab.hosts[0].address}:5558"
        command = fsdpcore("run", "-n", 2, "--transport", url, script("pass"))
        there, elsewhere = [finished(host.command(*command)) for host in lab.hosts]
    assert (there.code, elsewhere.code) == (0, 2)
    for done, words in (
        (there, "ranks of this job are on this host"),
        (elsewhere, "cannot listen"),
    ):
        (line,) = done.err.splitlines()
        assert words in line
        assert url[6:] in line
        assert "--nnodes" in line
