"""From the options of ``fsdpcore run`` to the ranks that each host starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from fsdpcore import __version__
from fsdpcore.core.errors import ConfigError
from fsdpcore.elastic.host import LOST_AFTER, AgentShare
from fsdpcore.launch import secret
from fsdpcore.launch.addresses import is_loopback, join_address, parse_address
from fsdpcore.launch.config import PREFIX, Config
from fsdpcore.launch.endpoints import check_reachable, own_address
from fsdpcore.launch.environment import LAUNCH_VARIABLES
from fsdpcore.launch.processes import LOOPBACK
from fsdpcore.launch.run.agent import Order
from fsdpcore.launch.run.hosts import HostShare
from fsdpcore.launch.run.scripts import OTHER_HOSTS, JobShare


@dataclass(frozen=True)
class ElasticOptions:
    """The options of elastic jobs; None where one is not given."""

    wanted: bool
    join: str | None
    restarts: int | None
    lost_after: float | None
    witness: Path | None


@dataclass(frozen=True)
class RunOptions:
    """The options that say where the ranks are; None where one is not given.

    ``ranks`` is the most that an elastic job has, ``minimum`` the least.
    """

    minimum: int | None
    ranks: int | None
    hosts: str | None
    launcher: str | None
    env: list[str]
    address: str | None
    nodes: int | None
    node_rank: int | None
    per_node: str | None
    elastic: ElasticOptions

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            ConfigError: says which.
        """
        if self.hosts is not None and self.nodes is not None:
            raise ConfigError(
                "--hosts starts the ranks of all hosts, --nnodes those of this one; use one of them"
            )
        elastic = self.elastic
        wanted = elastic.wanted or None
        if wanted and self.hosts is not None:
            raise ConfigError(
                "--hosts starts ranks that end together; for --elastic start this command on each "
                "host, with --nnodes, --node-rank and --address, or with --join"
            )
        if elastic.join is not None and self.nodes is not None:
            raise ConfigError(
                "--nnodes says with how many hosts a job begins, --join that it has begun; use one "
                "of them"
            )
        for name, value, needed, there in (
            ("--launcher", self.launcher, "--hosts", self.hosts),
            ("--env", self.env or None, "--hosts", self.hosts),
            ("--node-rank", self.node_rank, "--nnodes", self.nodes),
            ("--per-node", self.per_node, "--nnodes", self.nodes or wanted),
            ("--address", self.address, "--hosts or --nnodes", self.hosts or self.nodes or wanted),
            ("--join", elastic.join, "--elastic", wanted),
            ("--restarts", elastic.restarts, "--elastic", wanted),
            ("--lost-after", elastic.lost_after, "--elastic", wanted),
            ("--witness", elastic.witness, "--elastic", wanted),
        ):
            if value is not None and there is None:
                raise ConfigError(f"{name} needs {needed}")


def parse_ranks(text: str | None, *, elastic: bool) -> tuple[int | None, int | None]:
    """Read ``-n``: the least and the most ranks, which are the same but in an elastic job.

    Raises:
        ConfigError: it is neither N nor, in an elastic job, MIN:MAX.
    """
    if text is None:
        return None, None
    least, colon, most = text.partition(":")
    numbers = [item.strip() for item in ((least, most) if colon else (least, least))]
    if not all(item.removeprefix("-").isdecimal() for item in numbers):
        raise ConfigError(f"-n {text}: expected a number of ranks, or with --elastic MIN:MAX")
    minimum, maximum = map(int, numbers)
    if colon and not elastic:
        raise ConfigError(f"-n {text}: only a job with --elastic has from {least} to {most} ranks")
    if minimum < 1:
        raise ConfigError(f"the number of ranks (-n) must be at least 1, got {minimum}")
    if minimum > maximum:
        raise ConfigError(f"-n {text}: the least number of ranks is above the most, {maximum}")
    return minimum, maximum


def whole_job(config: Config) -> JobShare:
    """All ranks, on this host."""
    if not config.world_size:
        raise ConfigError("how many ranks? Say so with -n, as in 'fsdpcore run -n 4 train.py'")
    if not config.host:
        return JobShare(config.world_size, config.world_size)
    address = join_address(config.host, config.port)
    return JobShare(config.world_size, config.world_size, address=address)


def warn_of_one_host(config: Config) -> Callable[[str], None] | None:
    """What to do once all ranks of one host meet where those of several could: to say so.

    Started so on each of these hosts, the command makes as many jobs.
    """
    if is_loopback(config.host):
        return None
    words = (
        f"fsdpcore: all {config.world_size} ranks of this job are on this host, though "
        f"{config.transport} is an address that other hosts reach; {OTHER_HOSTS}"
    )
    return lambda address: typer.echo(words, err=True)


def node_share(config: Config, options: RunOptions) -> JobShare:
    """The ranks of this host, where the command runs on each of several."""
    _check_between_hosts(config)
    nodes, number = options.nodes or 0, options.node_rank
    if nodes < 1:
        raise ConfigError(f"the number of hosts (--nnodes) must be at least 1, got {nodes}")
    if number is None or not 0 <= number < nodes:
        raise ConfigError(
            f"which of the {nodes} hosts is this? Say so with --node-rank, 0 to {nodes - 1}"
            + (f"; it is not {number}" if number is not None else "")
        )
    counts = _counts(nodes, config.world_size, options)
    host, port = _address(config, options)
    if not port:
        raise ConfigError(
            "where do the ranks meet? Say so with --address HOST:PORT, an address of host 0 and "
            "a port that is free there; the same on all hosts"
        )
    token = secret.token(os.environ)
    config.transport_class.check_meeting((host, port), token, config)
    return JobShare(
        sum(counts),
        counts[number],
        sum(counts[:number]),
        join_address(host, port),
        token,
        secret.job_id(os.environ),
        ",".join(map(str, counts)),
    )


def elastic_share(config: Config, options: RunOptions) -> AgentShare:
    """What this host does in an elastic job: it founds it, comes to its founding, or joins it."""
    most = config.world_size
    if not most:
        raise ConfigError(
            "how many ranks? Say so with -n MIN:MAX, as in 'fsdpcore run --elastic -n 2:4 train.py'"
        )
    elastic = options.elastic
    restarts = elastic.restarts or 0
    lost_after = LOST_AFTER if elastic.lost_after is None else elastic.lost_after
    if restarts < 0:
        raise ConfigError(f"--restarts must not be negative, got {restarts}")
    if not 0.5 <= lost_after <= 3600:
        raise ConfigError(f"--lost-after must be 0.5 to 3600 seconds, got {lost_after:g}")
    given = secret.token(os.environ)
    join: tuple[str, ...] = ()
    founders, token = 1, given
    if options.nodes is not None:
        share = node_share(config, options)
        count, founders = share.count, options.nodes
        address = parse_address(share.address)
        if options.node_rank:
            join = (share.address,)
            address = _joining_address(join)
    else:
        count = _count_here(config, options)
        if elastic.join is not None:
            join = tuple(item.strip() for item in elastic.join.split(","))
            address = _address(config, options) if options.address else _joining_address(join)
        else:
            host, port = _address(config, options)
            address, token = (host or LOOPBACK, port), given or secret.new_token()
    return AgentShare(
        options.minimum or most,
        most,
        count,
        address,
        founders,
        join,
        token,
        token != given,
        restarts,
        lost_after,
        "" if elastic.witness is None else str(elastic.witness),
    )


def _joining_address(join: Sequence[str]) -> tuple[str, int]:
    """Where the agent of a host listens that joins a job.

    At the port of those that it joins, if that is free: so one list names the hosts of a job,
    however they come and go. But not where the only one that it joins does.
    """
    addresses = [parse_address(item) for item in join]
    for host, port in addresses:
        if not port:
            raise ConfigError(f"--join: {host} needs the port of the agent, as in HOST:PORT")
    own = own_address(*addresses[0]), addresses[0][1]
    return (own[0], 0) if {*addresses} == {own} else own


def _count_here(config: Config, options: RunOptions) -> int:
    """How many ranks this host starts of an elastic job that it joins, or begins alone."""
    text = options.per_node
    if text is None:
        if options.elastic.join is not None:
            raise ConfigError("how many ranks come with this host? Say so with --per-node")
        return config.world_size
    if not text.strip().isdecimal() or not int(text):
        raise ConfigError(f"--per-node {text}: expected the number of ranks of this host")
    return int(text)


def _counts(nodes: int, world_size: int, options: RunOptions) -> list[int]:
    """How many ranks each host runs."""
    text = options.per_node
    if text is None:
        if not world_size or world_size % nodes:
            raise ConfigError(
                f"how many ranks on each of the {nodes} hosts? Say so with --per-node, as in "
                "--per-node 4, or --per-node 2,4 where they differ"
            )
        return [world_size // nodes] * nodes
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() and int(item) for item in items) or len(items) not in (1, nodes):
        raise ConfigError(
            f"--per-node {text}: expected a positive number, or one for each of {nodes} hosts"
        )
    counts = [int(item) for item in items] * (nodes if len(items) == 1 else 1)
    if not options.elastic.wanted and options.ranks not in (None, sum(counts)):
        raise ConfigError(f"-n {options.ranks} contradicts --per-node {text}: {sum(counts)} ranks")
    return counts


def _address(config: Config, options: RunOptions) -> tuple[str, int]:
    """Where the ranks of several hosts meet: an option, or the transport's URL; or nothing."""
    if options.address is not None:
        host, port = parse_address(options.address)
    else:
        host, port = config.host, config.port
    check_reachable(host)
    return host, port


def hosts_orders(
    hosts: Sequence[HostShare],
    config: Config,
    options: RunOptions,
    variables: dict[str, str],
    script: str,
    arguments: list[str],
    module: bool,
) -> list[Order]:
    """What each of several hosts is to run; the first finds out where all meet."""
    _check_between_hosts(config)
    host, port = _address(config, options)
    others = [] if host else [share.address for share in hosts[1:]]
    host = host or (hosts[0].address if others else LOOPBACK)
    token, job = secret.new_token(), secret.new_job()
    orders, first = [], 0
    total = sum(share.ranks for share in hosts)
    for each in hosts:
        share = JobShare(total, each.ranks, first, join_address(host, port), token, job)
        first += each.ranks
        orders.append(
            Order(__version__, os.getcwd(), variables, script, arguments, module, share, others)
        )
    return orders


def variables_for_hosts(
    config: Config, environ: Mapping[str, str], options: RunOptions
) -> dict[str, str]:
    """The variables that the ranks of other hosts get from this one."""
    chosen = {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in LAUNCH_VARIABLES
    }
    for item in options.env:
        name, given, value = item.partition("=")
        if not name or (not given and name not in environ):
            raise ConfigError(
                f"--env {item}: there is no such variable here; give it as NAME=VALUE"
            )
        chosen[name] = value if given else environ[name]
    return {**chosen, "FSDPCORE_TRANSPORT": config.transport}


def _check_between_hosts(config: Config) -> None:
    """Refuse transports whose ranks this command cannot start on several hosts."""
    transport = config.transport_class
    if transport.ranks_are_threads:
        raise ConfigError(
            f"ranks of transport {config.transport!r} are threads of one process, so they cannot "
            "be on several hosts; use another transport, such as zmq"
        )
    if transport.needs_launcher:
        raise ConfigError(
            f"ranks of transport {config.transport!r} are started by MPI's own launcher, on "
            "several hosts too: 'mpirun --host a:4,b:4 -n 8 python train.py'"
        )
