"""The ranks of a job on several hosts: an agent on each, over ssh or another command, starts them.

What the agents do is in ``agent``. They end, with all their ranks, when the processes here end that
connect them with this one, in whatever way.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from fsdpcore.core.errors import ConfigError
from fsdpcore.launch import supervision
from fsdpcore.launch.output import OutputPipes, RankOutput
from fsdpcore.launch.run import agent
from fsdpcore.launch.run.agent import Order
from fsdpcore.launch.run.endings import RankEnds, ScriptExit, describe, exit_code, interrupted
from fsdpcore.launch.run.hosts import HostShare, host_of
from fsdpcore.launch.supervision import LaunchedProcess, Signals, StopRequested

# No question for a password can be answered, as the ranks' output has the terminal. A host that is
# gone without a word is noticed by ssh within a minute, if no rank notices it before.
SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15"
# What a host gets to end its ranks, which takes two seconds at most, and to say so.
_GRACE_SECONDS = 5.0
# A frame is a rank's line, or how all ranks of a host ended.
_MAX_FRAME = 1 << 22


def agent_command(launcher: str | None, host: str) -> list[str]:
    """The command line that starts the agent of a host.

    Args:
        launcher: as a user writes it: a command that runs another one on a host, whose name takes
            the place of ``{host}``, or follows it; None for ssh.
        host: its name.

    Raises:
        ConfigError: there is no such command.
    """
    try:
        words = shlex.split(SSH if launcher is None else launcher)
    except ValueError as error:
        raise ConfigError(f"--launcher {launcher}: {error}") from error
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise ConfigError(
            f"there is no command {words[0] if words else ''!r} in the PATH to start ranks on "
            "other hosts; name one with --launcher, or start 'fsdpcore run --nnodes ...' on each"
        )
    named = [word.replace("{host}", host) for word in words]
    command = [sys.executable, "-m", agent.MODULE]
    if os.path.basename(program) == "ssh":
        command = [shlex.join(command)]  # for a shell over there
    return [program, *named[1:], *([] if named != words else [host]), *command]


class _Host(LaunchedProcess):
    """The process that connects us with a host's agent.

    Attributes:
        index: of the host.
        share: the host, and how many ranks it has.
        ends: how its ranks ended; None as long as it has not said so.
        problem: why it could not start any.
        begun: it is about to start them.
    """

    def __init__(
        self, index: int, share: HostShare, command: Sequence[str], job: _HostsJob
    ) -> None:
        self.index = index
        self.share = share
        self.ends: RankEnds | None = None
        self.problem = ""
        self._job = job
        self.begun = self._failing = False
        theirs, self._input = os.pipe()
        said = functools.partial(job.output.write_host, share.address)
        try:
            with (
                job.pipes.ending_in(self._hear, longest=_MAX_FRAME) as (stdout,),
                job.pipes.ending_in(said) as (stderr,),
            ):
                super().__init__(command, stdin=theirs, stdout=stdout, stderr=stderr)
        except OSError as error:
            os.close(self._input)
            raise ConfigError(f"{command[0]} cannot be started: {error}") from error
        finally:
            os.close(theirs)

    def send(self, order: Order) -> None:
        """Have the agent start its ranks."""
        data = memoryview(order.encode())
        with contextlib.suppress(OSError):  # it has ended, which will be seen
            while data:
                data = data[os.write(self._input, data) :]

    def signal(self, number: int) -> None:
        """Pass on a signal, or 0: that the ranks shall end by themselves. SIGKILL ends it here."""
        if number == signal.SIGKILL:
            super().signal(number)
        elif not self.begun:  # it may still wait for a connection
            self.stopped = True
            super().signal(signal.SIGKILL)
        else:
            with contextlib.suppress(OSError):
                os.write(self._input, b"%d\n" % number)

    @property
    def failed(self) -> bool:
        return self._failing or super().failed

    @property
    def lost(self) -> bool:
        """Whether the connection ended before the agent's work did; ask when all have ended."""
        return not self.stopped and (self.ends is None or self.poll() not in agent.EXIT_CODES)

    def close(self) -> None:
        os.close(self._input)
        super().close()

    def _hear(self, line: bytes) -> None:
        """Take a line of its output; called by the thread that reads that."""
        # A shell may have printed something before the first frame, without the end of a line.
        said, mark, frame = line.partition(agent.MARK)
        if said or not mark:
            self._job.output.write_host(self.share.address, said)
        if not mark:
            return
        try:
            self._take(frame[:1], frame[1:])
        except (ValueError, TypeError) as error:
            self.problem = f"what came from there is not what its ranks' launcher writes ({error})"
            self._failing = True

    def _take(self, kind: bytes, text: bytes) -> None:
        """Take a frame; raises ValueError or TypeError if it is none."""
        if kind in (agent.OUT, agent.ERROR):
            rank, _, said = text.partition(b" ")
            self._job.output.write(int(rank), kind == agent.ERROR, said)
        elif kind == agent.MEETING:
            self.begun = True
            if self.index == 0:
                self._job.meet(text.decode())
        elif kind == agent.FAILING:
            self._failing = True
            self._job.failing.append(int(text))
        elif kind == agent.ENDS:
            self.ends = agent.decode_ends(text)
        elif kind == agent.PROBLEM:
            self.problem = text.decode()
        else:
            raise ValueError(f"a frame of kind {kind!r}")


class _HostsJob:
    """A job while it runs.

    Attributes:
        output: takes what ranks and agents print.
        pipes: it comes through.
        hosts: started so far.
        failing: the ranks that failed first, each on its host, in the order of time.
    """

    def __init__(self, orders: Sequence[Order], output: RankOutput, pipes: OutputPipes) -> None:
        self.output = output
        self.pipes = pipes
        self.hosts: list[_Host] = []
        self.failing: list[int] = []
        self._orders = orders

    def begin(self) -> None:
        """Have the host of rank 0 listen; the others follow when it says where."""
        self.hosts[0].send(self._orders[0])

    def meet(self, address: str) -> None:
        """Have the others start their ranks."""
        for host, order in zip(self.hosts[1:], self._orders[1:], strict=True):
            share = replace(order.share, address=address)
            host.send(replace(order, share=share, others=[]))

    def ending(self, number: int) -> ScriptExit:
        """How it ended; ``number``: by that signal, or 0."""
        said = [host.ends for host in self.hosts if host.ends is not None]
        number = number or next((ends.signal for ends in said if ends.signal), 0)
        if number:
            return interrupted(number)
        for host in self.hosts:
            if host.problem:
                return ScriptExit(2, f"host {host.share.name}: {host.problem}")
        first = [*self.failing, *(ends.first for ends in said if ends.first is not None)]
        ends = RankEnds([rank for ends in said for rank in ends.ranks], first[0] if first else None)
        culprit = ends.culprit
        if culprit is None or culprit.consequence or culprit.stopped:
            for host in self.hosts:
                if host.lost:
                    return _lost(host)
        return describe(ends, sum(host.share.ranks for host in self.hosts), self._name)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {host_of(rank, [host.share for host in self.hosts]).address}"


def _lost(host: _Host) -> ScriptExit:
    code = host.poll() or 1
    how = supervision.describe_exit(code)
    hint = "" if host.begun else f"; it needs {sys.executable}, with fsdpcore, over there"
    return ScriptExit(
        exit_code(code),
        f"host {host.share.name}: the command that starts its ranks ended ({how}; what it said is "
        f"above{hint}); all ranks were stopped",
    )


def run_hosts(
    shares: Sequence[HostShare], orders: Sequence[Order], launcher: str | None, output: RankOutput
) -> ScriptExit:
    """Run a script on the ranks of all hosts, to the end. Call it on the main thread.

    The first rank that fails ends the others, within two seconds and what the network takes; so do
    SIGINT, SIGTERM and SIGHUP. A second one ends them at once.

    Args:
        shares: the hosts, rank 0 on the first.
        orders: what each is to run.
        launcher: see ``agent_command``.
        output: takes what is printed.
    """
    commands = [agent_command(launcher, share.name) for share in shares]
    number, well = 0, False
    with OutputPipes() as pipes, Signals() as signals:
        job = _HostsJob(orders, output, pipes)
        try:
            signals.raised = True
            for index, (share, command) in enumerate(zip(shares, commands, strict=True)):
                job.hosts.append(_Host(index, share, command, job))
            job.begin()
            well = supervision.wait(job.hosts) is None
            if not well:
                supervision.stop(job.hosts, first=0, grace=_GRACE_SECONDS)
        except StopRequested as asked:
            number = asked.number
            with contextlib.suppress(StopRequested):
                signals.raised = True
                supervision.stop(job.hosts, first=number, grace=_GRACE_SECONDS)
        finally:
            signals.raised = False
            supervision.release(job.hosts, kill=not well)
    ending = job.ending(number)
    output.finish(ending.rank)
    return ending
