"""``fsdpcore run`` for several hosts: options, and what is wrong with them, without a process."""

from __future__ import annotations

import itertools
import os
import socket
import time

import pytest
from support.jobs import clean_environ
from typer.testing import CliRunner

from fsdpcore.commands import run as run_command
from fsdpcore.commands.main import app
from fsdpcore.core.clock import Clock
from fsdpcore.core.errors import ConfigError, RendezvousError
from fsdpcore.core.work import Deadline
from fsdpcore.launch.addresses import join_address, parse_address
from fsdpcore.launch.endpoints import check_reachable, resolve
from fsdpcore.launch.run import agent
from fsdpcore.launch.run.agent import Order
from fsdpcore.launch.run.endings import RankEnd, RankEnds, ScriptExit
from fsdpcore.launch.run.hosts import HostShare, host_of
from fsdpcore.launch.run.remote import agent_command
from fsdpcore.launch.run.scripts import JobShare


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)
    path = tmp_path / "script.py"
    path.touch()
    return str(path)


HOSTS = ["--hosts", "a,b:4", "-n", "8"]
ELASTIC = ["--elastic", "-n", "1:4"]
NODES = ["--nnodes", "2", "--node-rank", "1", "--per-node", "2"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([*HOSTS, *NODES], "use one of them"),
        (["-n", "2", "--per-node", "2"], "--per-node needs --nnodes"),
        (["-n", "2", "--node-rank", "0"], "--node-rank needs --nnodes"),
        (["-n", "2", "--launcher", "rsh"], "--launcher needs --hosts"),
        ([*NODES, "--env", "X"], "--env needs --hosts"),
        (["-n", "2", "--address", "a"], "--address needs --hosts or --nnodes"),
        (["--hosts", "a,b"], "how many ranks"),
        ([*HOSTS, "--transport", "sim"], "threads of one process"),
        ([*HOSTS, "--transport", "mpi"], "mpirun --host"),
        ([*HOSTS, "--launcher", "no-such-program x"], "no command 'no-such-program'"),
        ([*HOSTS, "--launcher", "'"], "--launcher '"),
        ([*HOSTS, "--env", "NOT_SET_HERE"], "--env NOT_SET_HERE"),
        ([*HOSTS, "--address", "0.0.0.0:1"], "cannot come to 0.0.0.0"),
        (["-n", "1:4"], "only a job with --elastic"),
        (["--elastic", "-n", "4:1"], "the least number of ranks is above the most, 1"),
        (["--elastic", "-n", "0:4"], "must be at least 1, got 0"),
        (["--elastic", "-n", ":4"], "expected a number of ranks, or with --elastic MIN:MAX"),
        (["-n", "two"], "-n two: expected a number of ranks"),
        (["--elastic"], "how many ranks? Say so with -n MIN:MAX"),
        ([*ELASTIC, "--hosts", "a,b"], "with --nnodes, --node-rank and --address, or with --join"),
        ([*ELASTIC, *NODES, "--join", "a:1"], "use one of them"),
        ([*ELASTIC, "--join", "127.0.0.1:1"], "how many ranks come with this host"),
        ([*ELASTIC, "--join", "127.0.0.1", "--per-node", "1"], "needs the port of the agent"),
        ([*ELASTIC, "--per-node", "1,2"], "expected the number of ranks of this host"),
        ([*ELASTIC, "--restarts", "-1"], "--restarts must not be negative"),
        ([*ELASTIC, "--lost-after", "0.1"], "--lost-after must be 0.5 to 3600 seconds"),
        ([*ELASTIC, "--transport", "mpi"], "'mpi' cannot come and go while a job runs: MPI's"),
        ([*ELASTIC, "--transport", "sim"], "fc.elastic.launch() can add and end"),
        (["-n", "4", "--restarts", "1"], "--restarts needs --elastic"),
        (["-n", "4", "--join", "a:1"], "--join needs --elastic"),
        (["-n", "4", "--lost-after", "1"], "--lost-after needs --elastic"),
        (["-n", "4", "--witness", "file"], "--witness needs --elastic"),
        (NODES, "say so with --address HOST:PORT"),
        ([*NODES, "--address", "head"], "say so with --address HOST:PORT"),
        ([*NODES, "--address", "head:x"], "is not HOST:PORT"),
        ([*NODES, "--address", "192.0.2.1:9"], "job has no secret, and other machines reach 192"),
        ([*NODES, "--transport", "sim"], "threads of one process"),
        (["--nnodes", "2", "--per-node", "2"], "which of the 2 hosts is this"),
        (["--nnodes", "2", "--node-rank", "2", "-n", "4"], "it is not 2"),
        (["--nnodes", "0", "--node-rank", "0", "-n", "4"], "at least 1, got 0"),
        (["--nnodes", "2", "--node-rank", "0"], "how many ranks on each of the 2"),
        (["--nnodes", "2", "--node-rank", "0", "-n", "3"], "how many ranks on each of the 2"),
        ([*NODES, "-n", "5"], "-n 5 contradicts --per-node 2: 4 ranks"),
        ([*NODES[:-1], "1,2,3"], "one for each of 2 hosts"),
        ([*NODES[:-1], "0"], "expected a positive number"),
    ],
)
def test_what_is_wrong_is_one_line(script, options, words):
    result = CliRunner().invoke(app, ["run", *options, script])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert words.lower() in line.lower()


@pytest.fixture
def asked(monkeypatch):
    """What the command would have ranks started with, instead of starting any."""
    seen = []

    def start(*arguments):
        seen.append(arguments)
        return ScriptExit(0)

    monkeypatch.setattr(run_command, "run_script", start)
    monkeypatch.setattr(run_command, "run_hosts", start)
    return seen


@pytest.mark.parametrize("given", [["--per-node", "1,2,3"], ["--per-node", "2"], ["-n", "9"]])
def test_each_rank_is_on_one_of_the_hosts_that_are_started_one_by_one(script, asked, given):
    for node in range(3):
        where = ["--nnodes", "3", "--node-rank", str(node), "--address", "127.0.0.1:1"]
        assert CliRunner().invoke(app, ["run", *where, *given, script]).exit_code == 0
    shares = [share for _, _, _, share, *_ in asked]
    assert len({share.world_size for share in shares}) == 1
    ranks = [rank for s in shares for rank in range(s.first_rank, s.first_rank + s.count)]
    assert ranks == list(range(shares[0].world_size))


def test_variables_for_other_hosts_are_those_of_here_or_what_is_given(script, asked, monkeypatch):
    for name, value in {"MINE": "a=b", "EMPTY": "not empty here", "FSDPCORE_TIMEOUT": "3"}.items():
        monkeypatch.setenv(name, value)
    env = [word for item in ("MINE", "EMPTY=", "NEW=c=d") for word in ("--env", item)]
    result = CliRunner().invoke(app, ["run", *HOSTS, "--address", "a", *env, script])
    assert result.exit_code == 0, result.output
    ((_, orders, *_),) = asked
    expected = {"MINE": "a=b", "EMPTY": "", "NEW": "c=d", "FSDPCORE_TIMEOUT": "3"}
    expected["FSDPCORE_TRANSPORT"] = "zmq"
    assert [order.environ for order in orders] == [expected] * 2


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("env -i", ["-i", "n1", "PYTHON", "-m", agent.MODULE]),
        ("env a-{host} -- ", ["a-n1", "--", "PYTHON", "-m", agent.MODULE]),
    ],
)
def test_a_launcher_gets_the_host_and_the_words_of_a_command(monkeypatch, launcher, expected):
    monkeypatch.setattr("sys.executable", "PYTHON")
    program, *rest = agent_command(launcher, "n1")
    assert os.path.basename(program) == "env"
    assert rest == expected


def test_ssh_gets_one_line_for_a_shell_and_asks_nothing(monkeypatch):
    monkeypatch.setattr("sys.executable", "/a b/python")
    monkeypatch.setattr("shutil.which", lambda program: f"/bin/{program}")
    for launcher in (None, "ssh -p 2222", "ssh -p 2222 {host}"):
        program, *options, host, line = agent_command(launcher, "me@n1")
        assert (program, host, line) == ("/bin/ssh", "me@n1", f"'/a b/python' -m {agent.MODULE}")
        assert options == ["-p", "2222"] if launcher else "BatchMode=yes" in options


def test_hosts_are_filled_one_after_the_other():
    shares = [HostShare("a", 2), HostShare("b", 1)]
    assert [host_of(rank, shares).name for rank in range(3)] == ["a", "a", "b"]
    with pytest.raises(ValueError, match="rank 3"):
        host_of(3, shares)


@pytest.mark.parametrize("address", ["a:1", "[::1]:29500", "10.0.0.1:0"])
def test_addresses(address):
    assert join_address(*parse_address(address)) == address


def test_an_address_without_a_port_leaves_it_open():
    assert parse_address("head") == ("head", 0)
    assert parse_address("[::1]") == ("::1", 0)
    for wrong in ("", ":1", "a:", "a:65536", "a:-1", "::1", "fe80::1:80"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            parse_address(wrong)


class Names:
    """Stands in for a name server that knows nothing at first; time passes while one waits."""

    def __init__(self, monkeypatch, answers):
        self.answers, self.now, self.asked = iter(answers), 0.0, []
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(Clock, "now", staticmethod(lambda: self.now))

    def look_up(self, host, port, type):
        self.asked.append(self.now)
        error = next(self.answers)
        if error:
            raise error if isinstance(error, UnicodeError) else socket.gaierror(error, "unknown")
        return [(socket.AF_INET, type, 0, "", ("203.0.113.7", port))]

    def sleep(self, seconds):
        self.now += seconds


def test_a_host_may_get_its_name_late(monkeypatch, caplog):
    unknown = [socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_NODATA] * 4
    names = Names(monkeypatch, [*unknown, 0])
    assert resolve(("pod-0.train", 29500), Deadline(60)) == ["203.0.113.7"]
    assert 5 < names.now < 20, "often at first, then once a second"
    assert ["waiting for a host named 'pod-0.train'" in one.message for one in caplog.records] == [
        True
    ]


def test_a_host_that_gets_no_name(monkeypatch):
    names = Names(monkeypatch, itertools.repeat(socket.EAI_NONAME))
    with pytest.raises(RendezvousError, match=r"'hed' .* cannot be found within 60 s: .*unknown"):
        resolve(("hed", 29500), Deadline(60))
    assert names.now == 60
    assert len(names.asked) < 80


@pytest.mark.parametrize("error", [socket.EAI_FAMILY, UnicodeError("label too long")])
def test_what_can_be_no_host_is_refused_at_once(monkeypatch, error):
    names = Names(monkeypatch, [error])
    with pytest.raises(RendezvousError, match=r"'a' where .* cannot be found: "):
        resolve(("a", 29500), Deadline(60))
    assert names.now == 0


def test_addresses_that_stand_for_all_of_a_hosts_own():
    for host in ("0.0.0.0", "::", "::%eth0", "0:0::0"):
        with pytest.raises(ConfigError, match="name an address of the host"):
            check_reachable(host)
    for host in ("head", "10.0.0.1", "", "::1"):
        check_reachable(host)


ORDER = Order("1", "/", {"A": "ü\udcff"}, "s.py", ["-x", "a b"], False, JobShare(4, 2, 2), ["b"])


def test_an_order_arrives_as_it_was_given():
    line = ORDER.encode()
    assert line.count(b"\n") == 1
    assert Order.decode(line, "1") == ORDER
    assert ORDER.share.token not in repr(ORDER), "so that no traceback shows it"


def test_another_version_is_refused_whatever_else_it_says():
    with pytest.raises(ConfigError, match="fsdpcore is 2 here, and 1 where"):
        Order.decode(b'{"version": "1", "something": "new"}\n', "2")


def test_ends_arrive_as_they_were():
    ends = RankEnds([RankEnd(2, -9, False), RankEnd(3, 1, True, "why", True)], 2, 15)
    assert agent.decode_ends(agent.encode_ends(ends)) == ends


@pytest.mark.parametrize(
    ("directory", "words"),
    [("/no/such", "/no/such where the job"), ("", "there is no script s.py")],
)
def test_what_a_host_lacks_is_told(tmp_path, monkeypatch, directory, words):
    monkeypatch.chdir(tmp_path)
    order = Order("1", directory or str(tmp_path), {}, "s.py", [], False, JobShare(2, 1), [])
    with pytest.raises(ConfigError, match=words):
        agent._carry_out(order, None, None)


def test_the_own_address_is_one_that_others_reach(monkeypatch):
    known = {"me": "127.0.1.1", "other": "203.0.113.9", "mine": "203.0.113.1"}

    def getaddrinfo(host, port, type):
        if host not in known:
            raise socket.gaierror
        return [(socket.AF_INET, type, 0, "", (known[host], port))]

    class Probe(socket.socket):
        """A socket of a host that has 203.0.113.1 as well as a loopback."""

        def bind(self, target):
            self.own = target[0]

        def connect(self, target):
            self.own = "203.0.113.1"

        def getsockname(self):
            return self.own, 7

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "socket", Probe)
    assert agent._own_address("mine", ["other"]) == "203.0.113.1"
    assert agent._own_address("me", ["unknown", "other"]) == "203.0.113.1", "as on Debian"
    assert agent._own_address("alias", ["other"]) == "203.0.113.1", "of ssh's configuration"
    with pytest.raises(ConfigError, match="--address HOST"):
        agent._own_address("me", ["unknown"])
