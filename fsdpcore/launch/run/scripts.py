"""Ranks that run a script: those of one host are started, watched over and ended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Protocol

from fsdpcore.core.errors import ConfigError, RendezvousError
from fsdpcore.launch import failure_report, secret, supervision
from fsdpcore.launch.addresses import is_loopback, parse_address
from fsdpcore.launch.config import Config
from fsdpcore.launch.endpoints import listen
from fsdpcore.launch.failure_report import FailureReports
from fsdpcore.launch.output import OutputPipes, RankOutput
from fsdpcore.launch.processes import LOOPBACK, meeting_point
from fsdpcore.launch.run.endings import RankEnds, ScriptExit, describe, ends_of
from fsdpcore.launch.run.mpirun import run_launcher
from fsdpcore.launch.run.starting import Starter, shared_environment
from fsdpcore.launch.supervision import Lifeline, RankProcess, Signals, StopRequested


@dataclass(frozen=True)
class JobShare:
    """The ranks of a job that one host runs.

    Attributes:
        world_size: ranks of the whole job.
        count: ranks of this host.
        first_rank: the first of them; the others follow it.
        address: where the ranks meet, ``HOST:PORT``. The host of rank 0 listens there, at a free
            port if that is 0.
        token, job: the secret and the id of the job.
        ranks_per_host: of all hosts, as in "2,4", where each has a launcher of its own; the ranks
            see to it that all launchers were told the same.
    """

    world_size: int
    count: int
    first_rank: int = 0
    address: str = f"{LOOPBACK}:0"
    token: str = field(default_factory=secret.new_token, repr=False)
    job: str = field(default_factory=secret.new_job)
    ranks_per_host: str = ""


# What a user may have meant who has all ranks of a job meet at another host's address.
OTHER_HOSTS = (
    "for ranks on several hosts say --nnodes and --node-rank on each of them, or --hosts on one"
)


class Overseer(Lifeline, Protocol):
    """Who started this launcher, and wants to know."""

    def failing(self, rank: int) -> None:
        """Take the rank that failed first on this host; its others are being stopped."""


def script_command(script: str, arguments: Sequence[str], *, module: bool = False) -> list[str]:
    """The command line of a rank.

    Raises:
        ConfigError: there is no such script.
    """
    if module:
        return [sys.executable, "-m", script, *arguments]
    path = Path(script)
    if path.is_dir():
        raise ConfigError(f"{script} is a directory; name the script in it, or use -m PACKAGE")
    if not path.is_file():
        raise ConfigError(f"there is no script {script}")
    return [sys.executable, script, *arguments]


def run_script(
    command: Sequence[str],
    config: Config,
    environ: Mapping[str, str],
    share: JobShare,
    output: RankOutput | None = None,
    listening: Callable[[str], None] | None = None,
) -> ScriptExit:
    """Run ``command`` on every rank of this host, to the end. Call it on the main thread.

    Args:
        command: program and arguments.
        config: resolved; the ranks get its transport through their environment.
        environ: what else the ranks find in their environment.
        share: which ranks.
        output: takes what they print; None lets them print it themselves.
        listening: called with the address where the ranks meet, once that is known to be usable.

    Raises:
        RendezvousError: the address cannot be listened at.
    """
    if config.transport_class.needs_launcher:
        return run_launcher(
            command, share.world_size, shared_environment(config, environ, share.token, share.job)
        )
    ends = run_share(command, config, environ, share, output, listening)
    threads = config.transport_class.ranks_are_threads
    ending = describe(
        ends,
        1 if threads else share.world_size,
        lambda rank: "the script" if threads else f"rank {rank}",
    )
    if output is not None:
        output.finish(ending.rank)
    return ending


def run_share(
    command: Sequence[str],
    config: Config,
    environ: Mapping[str, str],
    share: JobShare,
    output: RankOutput | None = None,
    listening: Callable[[str], None] | None = None,
    overseer: Overseer | None = None,
) -> RankEnds:
    """Run ``command`` on every rank of this host; return how they ended.

    The first rank that fails ends the others, within two seconds; so do ``overseer``, and SIGINT,
    SIGTERM and SIGHUP, which are passed on to the ranks. A second signal ends them at once.
    """
    ranks: list[RankProcess] = []
    first: RankProcess | None = None
    number, well = 0, False
    with FailureReports() as reports, contextlib.ExitStack() as stack, Signals() as signals:
        shared = shared_environment(config, environ, share.token, share.job)
        shared[failure_report.VARIABLE] = reports.value
        pipes = None if output is None else stack.enter_context(OutputPipes())
        start = Starter(command, shared, output, pipes, rank_0_reads=overseer is None)
        try:
            signals.raised = True
            if config.transport_class.ranks_are_threads:
                variables = {"FSDPCORE_THREADS": str(share.count)}
                ranks.append(start(0, variables, [reports.fd]))
            else:
                # Open until the end: a script may launch several times in turn.
                listener = stack.enter_context(_listener(share, config.rendezvous_timeout))
                address = share.address if listener is None else meeting_point(listener)
                if listening is not None:
                    listening(address)
                for variables, descriptors in _places(share, address, listener):
                    rank = share.first_rank + len(ranks)
                    ranks.append(start(rank, variables, [reports.fd, *descriptors]))
            first = supervision.wait(ranks, overseer)
            if first is not None:
                if overseer is not None:
                    overseer.failing(first.rank)
                supervision.stop(ranks)
            well = first is None
        except StopRequested as asked:
            number = asked.number
            with contextlib.suppress(StopRequested):
                signals.raised = True
                supervision.stop(ranks, first=number or None)
        finally:
            signals.raised = False
            supervision.release(ranks, kill=not well)
        return ends_of(ranks, first, number, reports.read())


@contextlib.contextmanager
def _listener(share: JobShare, seconds: float) -> Iterator[socket | None]:
    """The socket that rank 0 inherits; one of several hosts may take so long to have a name."""
    if share.first_rank:
        yield None
        return
    host, port = parse_address(share.address)
    whole = share.count == share.world_size
    try:
        listener = listen(host, port) if whole else listen(host, port, seconds)
    except RendezvousError as error:
        if is_loopback(host):
            raise
        raise RendezvousError(
            f"{error}; {OTHER_HOSTS if whole else 'the address must be one of the first host'}"
        ) from error
    with listener:
        yield listener


def _places(
    share: JobShare, address: str, listener: socket | None
) -> Iterator[tuple[dict[str, str], list[int]]]:
    """What each rank finds in its environment, and the descriptors that it inherits."""
    for local_rank in range(share.count):
        rank = share.first_rank + local_rank
        variables = {
            "FSDPCORE_RENDEZVOUS": address,
            "FSDPCORE_WORLD_SIZE": str(share.world_size),
            "FSDPCORE_LOCAL_WORLD_SIZE": str(share.count),
            "FSDPCORE_RANK": str(rank),
            "FSDPCORE_LOCAL_RANK": str(local_rank),
            "FSDPCORE_RANKS_PER_HOST": share.ranks_per_host,
        }
        if rank or listener is None:
            yield variables, []
        else:
            descriptor = listener.fileno()
            yield {**variables, "FSDPCORE_RENDEZVOUS_FD": str(descriptor)}, [descriptor]
