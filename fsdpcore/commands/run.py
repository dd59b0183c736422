"""``fsdpcore run``: start a script on every rank, of this host or of several."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn, overload

import typer

from fsdpcore.bench.harness.usage import one_line
from fsdpcore.commands.shares import (
    ElasticOptions,
    RunOptions,
    elastic_share,
    hosts_orders,
    node_share,
    parse_ranks,
    variables_for_hosts,
    warn_of_one_host,
    whole_job,
)
from fsdpcore.core.errors import ConfigError
from fsdpcore.elastic.host import Label, run_host
from fsdpcore.launch.config import PREFIX, resolve
from fsdpcore.launch.output import LoggedOutput, PrefixedOutput, RankOutput
from fsdpcore.launch.run.endings import ScriptExit
from fsdpcore.launch.run.hosts import HostShare, host_of, parse_hosts
from fsdpcore.launch.run.remote import run_hosts
from fsdpcore.launch.run.scripts import run_script, script_command

_HOSTS = "Several hosts, from one of them"
_NODES = "Several hosts, started on each"
_ELASTIC = "Ranks that come and go"
_OUTPUT = "Output"


def run(
    script: Annotated[str, typer.Argument(help="Python script, or a module with -m.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Passed on to the script; our own options come before it."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--ranks",
            metavar="N",
            help="Number of ranks, on all hosts together; with --elastic also MIN:MAX, which "
            "begins with MAX, or with --per-node.",
        ),
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
        int | None, typer.Option(help="BLAS threads of each rank; 0: share the cores of the host.")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic", help="Use only algorithms that reduce in canonical order."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Folder for the ranks' last operations; see 'fsdpcore trace'."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as 'python -m' does.")] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B:4,...",
            help="Hosts on which to start ranks, over ssh. B:4 gets 4 ranks; hosts without a "
            "number share the rest evenly.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Use this in place of ssh to start a command on a host, such as 'ssh -p 2222' or "
            "'kubectl exec -i {host} --'.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="Pass a variable to the ranks; may be given several times. FSDPCORE_* settings "
            "are passed on without it.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Where the ranks of several hosts meet: an address of the first host. With "
            "--nnodes it needs a port, and is the same on all hosts.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nnodes", help="Number of hosts; the same on all hosts.", rich_help_panel=_NODES
        ),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="Number of this host, from 0.", rich_help_panel=_NODES)
    ] = None,
    per_node: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Ranks of each host; one number for each, as in 2,4, where they differ. The same "
            "on all hosts. With --join: of this host.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Go on when ranks are lost, and when others come: for scripts with "
            "@fc.elastic.run.",
            rich_help_panel=_ELASTIC,
        ),
    ] = False,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT[,...]",
            help="Join an elastic job that runs, at any of its hosts.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            help="Start again what dies on this host, up to so many times.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    lost_after: Annotated[
        float | None,
        typer.Option(
            help="Seconds of silence after which another host is lost; 10 by default. The same on "
            "all hosts; one that joins takes over what the job has.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    witness: Annotated[
        Path | None,
        typer.Option(
            help="File on a disk that all hosts share, by which one half of the ranks may go on "
            "without the other. The same on all hosts.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    prefix: Annotated[
        bool | None,
        typer.Option(
            "--prefix/--no-prefix",
            help="Print the ranks' output line by line, with the rank before each line.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder where what rank K prints goes to rank_K.log, with --elastic what process "
            "K of a host prints to HOST_PORT_K.log; only why the job failed is shown.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
) -> None:
    """Run a script on every rank.

    Settings that are not given are taken from FSDPCORE_* variables, then from fsdpcore.toml. The
    first rank that fails ends the others, and its exit code is that of this command; with --elastic
    the others go on.
    """
    settings = {
        "timeout": timeout,
        "rendezvous_timeout": rendezvous_timeout,
        "blas_threads": blas_threads,
        "deterministic": deterministic,
        "trace": str(Path(trace).absolute()) if trace else None,
    }
    with one_line():
        least, most = parse_ranks(ranks, elastic=elastic)
        options = RunOptions(
            least,
            most,
            hosts,
            launcher,
            env or [],
            address,
            nodes,
            node_rank,
            per_node,
            ElasticOptions(elastic, join, restarts, lost_after, witness),
        )
        options.check()
        command = script_command(script, arguments or [], module=module)
        given = {"transport": transport, "world_size": options.ranks, **settings}
        config = resolve(given, os.environ, Path.cwd(), default_transport="zmq")
        environ = dict(os.environ)
        for name, value in settings.items():
            if value is not None:
                environ[PREFIX + name.upper()] = str(value)
        if hosts is None and nodes is None and not config.world_size:
            _refuse_behind(script, arguments or [])
        if elastic:
            ending = run_host(
                command,
                config,
                environ,
                elastic_share(config, options),
                functools.partial(_elastic_output, log_dir, prefix),
                _say,
            )
        elif hosts is not None:
            parts = parse_hosts(hosts, config.world_size or None)
            variables = variables_for_hosts(config, environ, options)
            orders = hosts_orders(
                parts, config, options, variables, script, arguments or [], module
            )
            ending = run_hosts(parts, orders, launcher, _output(log_dir, prefix, parts))
        else:
            share = whole_job(config) if nodes is None else node_share(config, options)
            listening = None if nodes is not None else warn_of_one_host(config)
            output = _output(log_dir, prefix)
            ending = run_script(command, config, environ, share, output, listening)
    finish(ending)


def _refuse_behind(script: str, arguments: Sequence[str]) -> None:
    """Say so where the number of ranks stands behind the script, among what that gets."""
    for at, word in enumerate(arguments):
        if re.fullmatch(r"-n\d*|--ranks(=\d+)?", word):
            option = word if word[-1].isdecimal() else " ".join(arguments[at : at + 2])
            raise ConfigError(
                f"how many ranks? '{option}' comes after {script}, which gets it; put it before: "
                f"fsdpcore run {option} {script}"
            )


def finish(ending: ScriptExit) -> NoReturn:
    """Say how a job ended, and end with its exit code."""
    if ending.message:
        _say(ending.message)
    raise typer.Exit(ending.code)


def _say(line: str) -> None:
    typer.echo(f"fsdpcore: {line}", err=True)


@overload
def _output(
    log_dir: Path | None, prefix: bool | None, hosts: Sequence[HostShare]
) -> RankOutput: ...


@overload
def _output(log_dir: Path | None, prefix: bool | None) -> RankOutput | None: ...


def _output(
    log_dir: Path | None, prefix: bool | None, hosts: Sequence[HostShare] = ()
) -> RankOutput | None:
    """Where the ranks' lines go; None if they print to this command's own output.

    On one host they do unless a user wants something else, so that a terminal is one for them,
    too.
    """
    if log_dir is not None:
        return LoggedOutput(log_dir)
    if hosts:
        label = None if prefix is False else lambda rank: f"{host_of(rank, hosts).address}:{rank}"
        return PrefixedOutput(label)
    return PrefixedOutput() if prefix else None


def _elastic_output(
    log_dir: Path | None, prefix: bool | None, label: Label, file: Label
) -> RankOutput | None:
    """Where the lines of processes go whose ranks change; see ``run_host``."""
    if log_dir is not None:
        return LoggedOutput(log_dir, file)
    return PrefixedOutput(label) if prefix else None
