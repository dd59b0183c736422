"""``fsdpcore run``: start a script on every rank, of this host or of several."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fsdpcore.bench.harness.usage import one_line
from fsdpcore.core.errors import ConfigError
from fsdpcore.launch import secret
from fsdpcore.launch.config import PREFIX, Config, resolve
from fsdpcore.launch.endings import ScriptExit
from fsdpcore.launch.hosts import check_reachable, is_loopback, join_address, parse_address
from fsdpcore.launch.output import LoggedOutput, PrefixedOutput, RankOutput
from fsdpcore.launch.scripts import JobShare, run_script, script_command

_HOSTS = "Several hosts, from one of them"
_NODES = "Several hosts, started on each"
_OUTPUT = "Output"


def run(
    script: Annotated[str, typer.Argument(help="Python script, or a module with -m.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Everything after the script belongs to it.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="Number of ranks, of all hosts together.")
    ] = None,
    transport: Annotated[
        str | None, typer.Option("--transport", help="Scheme or URL, such as sim or zmq.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that an operation may take.")
    ] = None,
    rendezvous_timeout: Annotated[
        float | None, typer.Option(help="Seconds until all ranks must have joined.")
    ] = None,
    blas_threads: Annotated[
        int | None, typer.Option(help="BLAS threads of each rank; 0 shares the cores evenly.")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic", help="Only algorithms that reduce in canonical order."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Folder for the ranks' last operations; see 'fsdpcore trace'."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as 'python -m' does.")] = False,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Where the ranks of several hosts meet: an address of the first host.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nnodes", help="Number of hosts.", rich_help_panel=_NODES),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="Number of this host, from 0.", rich_help_panel=_NODES)
    ] = None,
    per_node: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Ranks of each host; as many numbers as hosts, where they differ.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    prefix: Annotated[
        bool | None,
        typer.Option(
            "--prefix/--no-prefix",
            help="Print line by line, with the rank before each line.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for what the ranks print, rank_K.log; nothing is shown but why the job "
            "failed.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
) -> None:
    """Run a script on every rank.

    What is not given comes from FSDPCORE_* variables, then from fsdpcore.toml. The first rank
    that fails ends the others, and its exit code is this command's.
    """
    settings = {
        "timeout": timeout,
        "rendezvous_timeout": rendezvous_timeout,
        "blas_threads": blas_threads,
        "deterministic": deterministic,
        "trace": str(Path(trace).absolute()) if trace else None,
    }
    with one_line():
        if ranks is not None and ranks < 1:
            raise ConfigError(f"the number of ranks (-n) must be at least 1, got {ranks}")
        command = script_command(script, arguments or [], module=module)
        given = {"transport": transport, "world_size": ranks, **settings}
        config = resolve(given, os.environ, Path.cwd(), default_transport="zmq")
        environ = dict(os.environ)
        for name, value in settings.items():
            if value is not None:
                environ[PREFIX + name.upper()] = str(value)
        if nodes is None and (node_rank, per_node, address) != (None, None, None):
            raise ConfigError("--node-rank, --per-node and --address need --nnodes")
        if nodes is None:
            share = whole_job(config)
        else:
            share = _share_of_node(config, nodes, node_rank, per_node, address, ranks)
        output = _output(log_dir, bool(prefix))
        ending = run_script(
            command, config, environ, share, output, _warn_of_one_host(config, nodes)
        )
    finish(ending)


def finish(ending: ScriptExit) -> NoReturn:
    """Say how a job ended, and end with its exit code."""
    if ending.message:
        typer.echo(f"fsdpcore: {ending.message}", err=True)
    raise typer.Exit(ending.code)


def _output(log_dir: Path | None, prefix: bool) -> RankOutput | None:
    """Where the ranks' lines go; None if they print to this command's own output."""
    if log_dir is not None:
        return LoggedOutput(log_dir)
    return PrefixedOutput() if prefix else None


def whole_job(config: Config) -> JobShare:
    """All ranks, on this host."""
    if not config.world_size:
        raise ConfigError("how many ranks? Say so with -n, as in 'fsdpcore run -n 4 train.py'")
    if not config.host:
        return JobShare(config.world_size, config.world_size)
    address = join_address(config.host, config.port)
    return JobShare(config.world_size, config.world_size, address=address)


def _warn_of_one_host(config: Config, nodes: int | None) -> Callable[[str], None] | None:
    """What to say once all ranks of one host meet where those of several could.

    Started so on each of these hosts, the command makes as many jobs.
    """
    if nodes is not None or is_loopback(config.host):
        return None
    words = (
        f"fsdpcore: all {config.world_size} ranks of this job are on this host, though "
        f"{config.transport} is an address for several hosts; to use them, say --nnodes and "
        "--node-rank on each, or --hosts on one"
    )
    return lambda address: typer.echo(words, err=True)


def _share_of_node(
    config: Config,
    nodes: int,
    node_rank: int | None,
    per_node: str | None,
    address: str | None,
    ranks: int | None,
) -> JobShare:
    """The ranks of this host, where the command runs on each of several."""
    _check_between_hosts(config)
    if nodes < 1:
        raise ConfigError(f"the number of hosts (--nnodes) must be at least 1, got {nodes}")
    if node_rank is None or not 0 <= node_rank < nodes:
        raise ConfigError(
            f"which of the {nodes} hosts is this? Say so with --node-rank 0 to {nodes - 1}"
            + (f", not {node_rank}" if node_rank is not None else "")
        )
    counts = _counts(nodes, per_node, config.world_size, ranks)
    if address is None and config.port:
        address = join_address(config.host, config.port)
    host, port = parse_address(address) if address else ("", 0)
    if not port:
        raise ConfigError(
            "where do the ranks meet? Say so with --address HOST:PORT, an address of host 0 and "
            "a port that is free there; the same on all hosts"
        )
    check_reachable(host)
    return JobShare(
        sum(counts),
        counts[node_rank],
        sum(counts[:node_rank]),
        join_address(host, port),
        secret.token(os.environ),
        secret.job_id(os.environ),
    )


def _counts(nodes: int, per_node: str | None, world_size: int, ranks: int | None) -> list[int]:
    """How many ranks each host runs."""
    if per_node is None:
        if not world_size or world_size % nodes:
            raise ConfigError(
                f"how many ranks on each of the {nodes} hosts? Say so with --per-node, as in "
                "--per-node 4, or --per-node 2,4 where they differ"
            )
        return [world_size // nodes] * nodes
    items = [item.strip() for item in per_node.split(",")]
    if not all(item.isdecimal() and int(item) for item in items) or len(items) not in (1, nodes):
        raise ConfigError(
            f"--per-node {per_node}: expected a positive number, or one for each of {nodes} hosts"
        )
    counts = [int(item) for item in items] * (nodes if len(items) == 1 else 1)
    if ranks is not None and ranks != sum(counts):
        raise ConfigError(f"-n {ranks} contradicts --per-node {per_node}: {sum(counts)} ranks")
    return counts


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
