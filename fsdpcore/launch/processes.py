"""Ranks as processes of this host, each a new interpreter."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from socket import socket
from typing import Any

from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import ArgumentError, RankFailedError, in_one_line
from fsdpcore.launch import secret, supervision
from fsdpcore.launch.addresses import join_address
from fsdpcore.launch.config import Config
from fsdpcore.launch.endpoints import listen
from fsdpcore.launch.output import OutputPipes
from fsdpcore.launch.printing import labelled, replaced_streams
from fsdpcore.launch.rank_process import RankOutcome, RankTask, command, main_module

LOOPBACK = "127.0.0.1"

# Where a rank is to print: the ends of pipes for both of its streams, or none.
_Printing = Callable[[int], AbstractContextManager[Sequence[int]]]


class RemoteTraceback(Exception):  # noqa: N818 (it carries a traceback's text, as a cause)
    """The traceback of a failed rank, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class _LaunchedRank(supervision.RankProcess):
    """A rank's process, with the pipe to tell it what to do and the one to hear what came of it.

    Attributes:
        outcome: its report; None as long as there is none.
    """

    def __init__(self, rank: int, pass_fds: Sequence[int], prints_to: Sequence[int]) -> None:
        self.outcome: RankOutcome | None = None
        self._expected = True
        theirs, ours = os.pipe()
        self._job = open(ours, "wb")  # noqa: SIM115 (closed by close)
        with open(theirs, "rb") as job_end:
            ours, theirs = os.pipe()
            self._report = open(ours, "rb")  # noqa: SIM115
            with open(theirs, "wb") as report_end:
                ends = (job_end.fileno(), report_end.fileno())
                out, err = prints_to or (None, None)
                try:
                    super().__init__(
                        rank, command(*ends), pass_fds=(*pass_fds, *ends), stdout=out, stderr=err
                    )
                except BaseException:
                    self._close_pipes()
                    raise

    def assign(self, place: RankPlace, job: bytes) -> None:
        """Tell it what to do."""
        with contextlib.suppress(BrokenPipeError), self._job:  # it has died: its end will be seen
            pickle.dump(place, self._job)
            self._job.write(job)

    def poll(self) -> int | None:
        code = super().poll()
        # Read at once: a large result fills the pipe, and its sender cannot end before it was
        # read. What an ended process has reported is in the pipe by now.
        if self._expected and _readable(self._report.fileno()):
            self._expected = False
            # It may have died before, or while, it reported.
            with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
                self.outcome = pickle.load(self._report)  # noqa: S301 (from our own child)
        return code

    def watched(self) -> list[int]:
        return [*super().watched(), *([self._report.fileno()] if self._expected else [])]

    @property
    def failed(self) -> bool:
        code = self.poll()
        return code is not None and (code != 0 or self.outcome is None)

    def close(self) -> None:
        super().close()
        self._close_pipes()

    def _close_pipes(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._job.close()
        self._report.close()


def _readable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))


def run_processes(
    fn: Callable[..., Any], args: Sequence[Any], world_size: int, config: Config
) -> list[Any]:
    """Run ``fn`` in ``world_size`` processes; see ``launch``."""
    job = pickle.dumps(_task(fn, args, config), pickle.HIGHEST_PROTOCOL)
    ranks: list[_LaunchedRank] = []
    well = False
    with _printing() as printing:
        try:
            with listen(config.host or LOOPBACK, config.port) as listener:
                _start(ranks, listener, world_size, job, printing)
            first = supervision.wait(ranks)
            if first is not None:
                supervision.stop(ranks)
                raise _failure(ranks, first)
            well = True
        except KeyboardInterrupt:
            supervision.stop(ranks, first=signal.SIGINT)
            raise
        finally:
            supervision.release(ranks, kill=not well)
    return [_result(rank) for rank in ranks]


@contextlib.contextmanager
def _printing() -> Iterator[_Printing]:
    """Say where ranks print; at the end, all that they have printed is there.

    Where a notebook, say, has its own ``sys.stdout``, their lines go there. Else they print
    where this process does.
    """
    streams = replaced_streams()
    if not streams:
        yield lambda rank: contextlib.nullcontext(())
        return
    with OutputPipes() as pipes:
        yield lambda rank: pipes.ending_in(*(labelled(rank, stream) for stream in streams))


def _start(
    ranks: list[_LaunchedRank], listener: socket, world_size: int, job: bytes, printing: _Printing
) -> None:
    address, descriptor = meeting_point(listener), listener.fileno()
    token, job_id = secret.new_token(), secret.new_job()
    for rank in range(world_size):
        with printing(rank) as ends:
            ranks.append(_LaunchedRank(rank, (descriptor,) if rank == 0 else (), ends))
    for process in ranks:
        rank = process.rank
        fd = descriptor if rank == 0 else None
        place = RankPlace(
            rank, world_size, rank, world_size, "launch", address, fd, token, job=job_id
        )
        process.assign(place, job)


def meeting_point(listener: socket) -> str:
    """The address of a listening socket as ``HOST:PORT``."""
    return join_address(*listener.getsockname()[:2])


def _task(fn: Callable[..., Any], args: Sequence[Any], config: Config) -> RankTask:
    main, program = main_module(), (fn, tuple(args), config)
    if not main:
        return _session_task(program)
    try:
        pickled = pickle.dumps(program, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ArgumentError(
            "ranks that are processes import the function and unpickle its arguments and options; "
            f"pass a function at the top of a module and picklable arguments ({in_one_line(error)})"
        ) from error
    return RankTask(main, list(sys.argv), pickled)


def _session_task(program: Any) -> RankTask:
    from fsdpcore.launch import session

    try:
        pickled = session.dumps(program)
    except Exception as error:
        raise ArgumentError(
            "ranks that are processes get copies of the function, of all that it uses of this "
            "session, and of its arguments, and something of that cannot be pickled "
            f"({in_one_line(error)}); make it within the function, or import it from a module"
        ) from error
    return RankTask({}, list(sys.argv), pickled, session.sources(), session.classes())


def _result(rank: _LaunchedRank) -> Any:
    assert rank.outcome is not None
    try:
        return pickle.loads(rank.outcome.result)  # noqa: S301 (from our own child)
    except Exception as error:
        raise RankFailedError(
            f"the result of rank {rank.rank} cannot be unpickled ({in_one_line(error)})", rank.rank
        ) from error


def _failure(ranks: list[_LaunchedRank], first: _LaunchedRank) -> RankFailedError:
    """The error to raise: about the rank that failed by itself, not one that it took along."""
    outcomes = {rank.rank: rank.outcome for rank in ranks if rank.outcome is not None}
    reported = {rank: outcome.consequence for rank, outcome in outcomes.items() if outcome.error}
    culprit = supervision.culprit(ranks, first, reported)
    number, outcome = culprit.rank, culprit.outcome
    if outcome is None:
        how = supervision.describe_exit(culprit.poll() or 0)
        return RankFailedError(f"rank {number} ended without a result: {how}", number)
    message = f"rank {number} failed: {outcome.error}"
    failure = RankFailedError(message, number, misuse=outcome.misuse)
    failure.__cause__ = RemoteTraceback(outcome.traceback)
    return failure
