"""What ``fsdpcore run --elastic`` does on a host: it puts its agent together, and runs it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fsdpcore.comm.agents import AgentLinks
from fsdpcore.core.errors import RendezvousError
from fsdpcore.elastic.agent import Agent
from fsdpcore.elastic.generation import HostCard
from fsdpcore.elastic.membership import Member
from fsdpcore.elastic.paxos import Witness
from fsdpcore.elastic.seats import Seats
from fsdpcore.elastic.witness import FileWitness
from fsdpcore.launch import secret
from fsdpcore.launch.addresses import parse_address
from fsdpcore.launch.blas import threads_per_rank
from fsdpcore.launch.config import PREFIX, Config
from fsdpcore.launch.endpoints import listen
from fsdpcore.launch.output import OutputPipes, RankOutput
from fsdpcore.launch.processes import meeting_point
from fsdpcore.launch.run.endings import ScriptExit
from fsdpcore.launch.run.starting import Starter, shared_environment

_HOW_TO_SHARE = ", if all have one secret: put it into FSDPCORE_TOKEN before this command, too"

LOST_AFTER = 10.0
Label = Callable[[int], str]


@dataclass(frozen=True)
class AgentShare:
    """What a host does in an elastic job.

    Attributes:
        minimum, maximum: ranks of the whole job.
        count: ranks that this host starts.
        address: where its agent listens; port 0 takes a free one, as does a port that is not free
            on a host that joins.
        founders: hosts with which the job begins, if this one founds it.
        join: agents of a job to join, ``HOST:PORT`` each; empty for the founder.
        token: the job's secret.
        drawn: nobody else knows it.
        restarts: how many ranks that died here are started again.
        lost_after: seconds of silence after which another host is lost.
        witness: file on a disk that all hosts share, which decides where half of the ranks are
            lost; empty for none.
    """

    minimum: int
    maximum: int
    count: int
    address: tuple[str, int]
    founders: int = 1
    join: tuple[str, ...] = ()
    token: str = field(default="", repr=False)
    drawn: bool = False
    restarts: int = 0
    lost_after: float = LOST_AFTER
    witness: str = ""


def run_host(
    command: Sequence[str],
    config: Config,
    environ: Mapping[str, str],
    share: AgentShare,
    make_output: Callable[[Label, Label], RankOutput | None],
    say: Callable[[str], None],
) -> ScriptExit:
    """Run ``command`` on the ranks of this host until the job, or its part of it, has ended.

    Call it on the main thread. SIGTERM has the host leave in order; a second one, SIGINT and SIGHUP
    end its ranks at once.

    Args:
        command: program and arguments.
        config: resolved; the ranks get its transport through their environment. The job waits for
            its ``rendezvous_timeout`` while there are too few ranks.
        environ: what else the ranks find in their environment.
        share: what this host does.
        make_output: makes what takes the lines of processes, from two functions that name one by
            its number: as it is at the moment, and for good. None lets them print.
        say: prints a line.

    Raises:
        UnsupportedError: ranks of the transport cannot come and go.
        ConfigError: the job needs a secret, or the file of the witness cannot be used.
        RendezvousError: the address cannot be listened at.
    """
    witness = FileWitness(share.witness) if share.witness else None
    with contextlib.closing(_links(share, config)) as links, contextlib.ExitStack() as stack:
        if not share.join:
            say(
                f"other hosts join this job with --elastic --join {links.address} and the same -n "
                f"{share.minimum}:{share.maximum}{_HOW_TO_SHARE if share.drawn else ''}"
            )
        else:
            say(f"asks the job at {', '.join(share.join)} to be taken along at its next commit")
        listener = stack.enter_context(listen(parse_address(links.address)[0]))
        names = dict[int, str]()
        output = make_output(
            lambda number: names.get(number, "-"),
            lambda number: f"{links.address.replace(':', '_')}_{number}",
        )
        pipes = None if output is None else stack.enter_context(OutputPipes())
        shared = shared_environment(config, environ, share.token, secret.new_job())
        # Their number changes bits, so it must not follow that of the ranks.
        shared[f"{PREFIX}BLAS_THREADS"] = str(threads_per_rank(config, share.count))
        start = Starter(command, shared, output, pipes, rank_0_reads=False)
        seats = Seats(start, listener.fileno(), names)
        meeting = meeting_point(listener)
        agent = Agent(
            functools.partial(_member, share, config, witness, links.address, meeting),
            links,
            seats,
            token=share.token,
            listener_fd=listener.fileno(),
            restarts=share.restarts,
            say=say,
        )
        ending = agent.run(share.count)
    if output is not None:
        output.finish(ending.rank)
    return ending


def _links(share: AgentShare, config: Config) -> AgentLinks:
    link, (host, port) = config.transport_class.link_agents, share.address
    try:
        return link((host, port), share.token, config)
    except RendezvousError:
        if not share.join or not port:
            raise
        return link((host, 0), share.token, config)  # another agent of this host has the port


def _member(
    share: AgentShare,
    config: Config,
    witness: Witness | None,
    address: str,
    meeting: str,
    others: Sequence[str],
    job: str,
) -> tuple[str, Member]:
    """A member with a new id; it joins at ``others`` and those of ``share``, or founds the job."""
    join = list(dict.fromkeys([*others, *share.join]))
    card = HostCard(secret.new_job(), address, meeting)
    member = Member(
        card,
        minimum=share.minimum,
        maximum=share.maximum,
        lost_after=share.lost_after,
        patience=config.rendezvous_timeout,
        job=job or ("" if join else secret.new_job()),
        witness=witness,
        seed=int(card.id, 16),
    )
    now = time.monotonic()
    if join:
        member.join(join, now)
    else:
        member.found(share.founders, now)
    return card.id, member
