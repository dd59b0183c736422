"""``run``: a program that is called again, in the same process, whenever its ranks have changed."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

from threadpoolctl import threadpool_limits

from fsdpcore.checkpoint.storage.opening import DISK_TIMEOUT, StoragePath
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.place import RankPlace
from fsdpcore.comm.transport import Transport
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import (
    CommTimeoutError,
    CommunicationError,
    ElasticError,
    MismatchError,
    PeerFailedError,
    ProtocolError,
    RendezvousError,
    in_one_line,
)
from fsdpcore.elastic.channel import Message, SocketChannel
from fsdpcore.elastic.generation import Generation
from fsdpcore.elastic.job import HandedOver, Job
from fsdpcore.elastic.seat import FINISHED, GENERATION, LEFT, Seat
from fsdpcore.elastic.versions import Versions
from fsdpcore.launch.config import Config, resolve
from fsdpcore.launch.launch import launch
from fsdpcore.launch.rank import ExceptHook, inside_rank, join, program
from fsdpcore.launch.supervision import admit_interrupts

F = TypeVar("F", bound=Callable[..., Any])

_LOG = logging.getLogger("fsdpcore")

# How often the same ranks try again without a commit between: what breaks them then is no loss.
_TRIES = 3
_CLOSING_SECONDS = 5.0


@overload
def run(fn: F) -> F: ...
@overload
def run(
    *, every: int = 1, checkpoints: StoragePath | None = None
) -> Callable[[F], Callable[..., Any]]: ...
def run(
    fn: Callable[..., Any] | None = None,
    *,
    every: int = 1,
    checkpoints: StoragePath | None = None,
) -> Any:
    """Make a function the program of an elastic job.

    Its first argument is the ``Job``; it is called without. Under ``fsdpcore run --elastic`` it is
    called again, in the same process and with the same arguments, whenever ranks were lost, leave
    or join, and goes on from the newest commit. All that belongs to a backend it makes anew; what
    is outside of it stays: data, compiled functions. ::

        @fc.elastic.run(checkpoints="ckpt")
        def train(job, steps):
            engine = fc.FSDP(units, job.backend, virtual_ranks=8)
            stream = fc.data.Stream((x, y), 64, leaves=8)
            job.restore({"model": engine, "data": stream})
            for step in range(job.commits, steps):
                with engine.step() as s:
                    ...
                job.commit()

        train(1000)

    With ``virtual_ranks`` the results have the same bits whatever ranks there were. A part of the
    state is in the memory of two ranks; for when both are lost, save checkpoints, too.

    Started in any other way (``fsdpcore run``, ``mpirun``, ``torchrun``, alone), the same script is
    a job whose ranks stay the same; a lost rank ends it. So it is where the function is called
    with a backend in place of the job, as ``fc.launch(train, args=(1000,))`` does.

    Args:
        fn: the function, where ``run`` is written above it without arguments.
        every: how many commits there are at least from one version of the state to the next. What a
            loss costs is to compute the commits since, again; what a version costs, see
            ``Job.commit``.
        checkpoints: where ``Job.restore`` looks if a part of the state is lost in all memories; the
            program itself saves there, best with
            ``fc.checkpoint.save(path, job.state, job.backend, step=job.commits)``.

    Returns:
        The function, which blocks until the program has ended on all ranks, and returns its result.
        A rank that leaves in order, or that was never more than a spare, ends by ``SystemExit``,
        with code 0.

    Raises:
        ArgumentError: ``every`` is not a positive integer.
        ElasticError: the job does not go on.
        Exception: what the program raises, but for the loss of other ranks.
    """
    number = as_int(every, "every", minimum=1)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            options = {"every": number, "checkpoints": checkpoints}
            if args and isinstance(args[0], Backend):
                return _fixed(fn, args[0], args[1:], kwargs, options)
            process = _process()
            if process is None:  # by its public name, since it may go to other processes
                return launch(functools.partial(called, **kwargs), args=args)[0]
            return _Program(functools.partial(_call, fn, args, kwargs), options).run(process)

        vars(called)["elastic_program"] = True  # which ``launch`` asks for
        return called

    return decorate if fn is None else decorate(fn)


class Meeting(Protocol):
    """How a rank meets those of its generation."""

    def __call__(self, place: RankPlace) -> Transport:
        """Become a rank of it; blocks. Raises RendezvousError where ``place.given_up`` says so."""


@dataclass
class Process:
    """What of a rank outlives its generations.

    Attributes:
        seat: its side towards the agent.
        meet: how it becomes a rank.
        signals: it is a process of its own, that gets signals.
    """

    seat: Seat
    meet: Meeting
    signals: bool = False


_here = threading.local()
"""``process`` of this thread, if it is a rank that an agent in this process has made."""


def sit(process: Process) -> None:
    """Have this thread be a rank."""
    _here.process = process


def _process() -> Process | None:
    """What an agent has made of this thread, or of this process; None if it has not."""
    if inside_rank():  # what a program calls is a job of its own
        return None
    return getattr(_here, "process", None) or _inherited()


@functools.cache
def _inherited() -> Process | None:
    """That of this process, whose agent is another one."""
    channel = SocketChannel.inherited(os.environ)
    if channel is None:
        return None
    config = resolve({}, os.environ, Path.cwd(), default_transport="zmq")
    # Whatever ranks share a host from one generation to the next, the bits are the same.
    threadpool_limits(config.blas_threads or 1, user_api="blas")
    process = Process(Seat(channel), functools.partial(_met, config), True)
    ExceptHook(None, os.environ).install()
    admit_interrupts()
    process.seat.sit()
    return process


def _met(config: Config, place: RankPlace) -> Transport:
    backend = join(place, config)
    backend.recorder.configure(config.trace, config.trace_operations)
    ExceptHook(place.rank, os.environ).install()
    return backend


def _fixed(
    fn: Callable[..., Any],
    backend: Backend,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    """Be a rank of a job whose ranks stay the same."""
    if backend.rank == 0 and backend.world_size > 1:
        _LOG.info("the ranks of this job stay the same: if one is lost, it ends")
    return fn(Job(backend, **options), *args, **kwargs)


def _call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], job: Job) -> Any:
    return fn(job, *args, **kwargs)


class _Program:
    """One call of a function that ``run`` has decorated.

    Args:
        fn: is given the job.
        options: of the job.
    """

    def __init__(self, fn: Callable[[Job], Any], options: Mapping[str, Any]) -> None:
        self._fn, self._options = fn, options
        self._result: Any = None
        self._commits = 0
        self._has_result = False
        self._exit: SystemExit | None = None  # by which the function has ended well
        self._tries = 0
        self._seats: object = None
        self._broken: Transport | None = None  # that of the generation before

    def run(self, process: Process) -> Any:
        """Call the function as often as it takes."""
        process.seat.begin()
        try:
            with _leaving_on_sigterm(process):
                return self._generations(process)
        finally:
            self._close_broken()

    def _generations(self, process: Process) -> Any:
        while True:
            verdict = process.seat.verdict()
            kind = verdict["kind"]
            if kind == FINISHED and self._has_result:
                return self._result
            if kind in (FINISHED, LEFT):  # without a result, what follows the program cannot run
                raise SystemExit(0)
            if kind != GENERATION:
                raise ElasticError(str(verdict["reason"]))
            if self._generation(process, verdict):
                if self._exit is not None:
                    raise self._exit
                return self._result
            gc.collect()  # what it has left, while the agents decide

    def _generation(self, process: Process, verdict: Message) -> bool:
        """Be a rank of one generation; return whether the program has ended."""
        seat, generation = process.seat, Generation.decode(verdict["generation"])
        place = _place(verdict["place"], seat.overtaken)
        _LOG.info(
            "generation %d: this is rank %d of %d", generation.number, place.rank, place.world_size
        )
        self._close_broken(place.rank)
        backend: Transport | None = None
        try:
            backend = process.meet(place)
            seat.hold(backend)
            seat.tell("joined", number=generation.number)
            self._called(seat, backend, generation)
        except HandedOver:
            assert backend is not None
            backend.close()
            return False
        except BaseException as error:
            seat.release()
            lost = _is_loss(error, backend)
            if backend is not None:
                self._end(backend, error, lost=lost)
            overtaken = bool(seat.overtaken())
            if not lost or not (overtaken or self._may_try(generation)):
                seat.tell("failed", reason=in_one_line(error))
                raise
            if not overtaken:
                _tell_broken(seat, generation.number, place.rank, error)
            _LOG.info("rank %d of generation %d: %s", place.rank, generation.number, error)
            return False
        seat.release()
        seat.tell(FINISHED, number=generation.number)
        backend.close()
        return True

    def _called(self, seat: Seat, backend: Transport, generation: Generation) -> None:
        """Call the function, and see that all others have come to its end, too."""
        number, hosts = generation.number, generation.host_numbers()
        versions = Versions(seat.vault, backend, number, hosts)
        job = Job(
            backend,
            generation=number,
            reason=generation.reason,
            seat=seat,
            versions=versions,
            **self._options,
        )
        try:
            with program(self._fn, backend):
                try:
                    self._result = self._fn(job)
                except SystemExit as error:
                    if error.code:
                        raise
                    self._exit = error
            self._has_result = True
            backend.barrier(DISK_TIMEOUT)
        finally:
            versions.salvage()
            if job.commits > self._commits:
                self._commits, self._tries = job.commits, 0

    def _may_try(self, generation: Generation) -> bool:
        """Whether to try again: others have gone, or some steps were made since the last time."""
        if self._seats != generation.seats:
            self._seats, self._tries = generation.seats, 0
        self._tries += 1
        return self._tries <= _TRIES

    def _end(self, backend: Transport, error: BaseException, *, lost: bool) -> None:
        """Tell the others, and close where this rank does not go on."""
        if lost:
            if isinstance(error, CommunicationError):
                backend.fail(error, tell=True)
            # Not closed yet: others might take this rank for lost, until they know what is next.
            self._broken = backend
            return
        if not isinstance(error, SystemExit) or error.code:
            backend.abort(in_one_line(error))
        backend.close()

    def _close_broken(self, rank: int = 0) -> None:
        """Close the backend of the generation before, in the background if that will do.

        Rank 0 needs the port where the ranks meet.

        Args:
            rank: that this one is to be.
        """
        broken, self._broken = self._broken, None
        if broken is None:
            return
        name = "fsdpcore-elastic-closing"
        closing = threading.Thread(target=broken.close, name=name, daemon=True)
        closing.start()
        if rank == 0:
            closing.join(_CLOSING_SECONDS)


def _place(told: Message, given_up: Callable[[], str]) -> RankPlace:
    return RankPlace(
        rank=int(told["rank"]),
        world_size=int(told["world_size"]),
        local_rank=int(told["local_rank"]),
        local_world_size=int(told["local_world_size"]),
        launcher="fsdpcore run --elastic",
        rendezvous=told["meeting"],
        listener_fd=told.get("listener_fd"),
        token=str(told["token"]),
        job=str(told["job"]),
        given_up=given_up,
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that have led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or link.__context__


def _is_loss(error: BaseException, backend: Transport | None) -> bool:
    """Whether an error comes of others that are gone, so that the rest can go on.

    What a program makes of such an error is one, too; ranks that disagree are none.
    """
    if not isinstance(error, Exception):
        return False
    causes = [each for each in _chain(error) if isinstance(each, CommunicationError)]
    if any(isinstance(each, (MismatchError, ProtocolError)) for each in causes):
        return False
    broken = backend is None or backend.failure is not None
    return (broken and bool(causes)) or any(isinstance(each, CommTimeoutError) for each in causes)


def _tell_broken(seat: Seat, number: int, rank: int, error: BaseException) -> None:
    suspects = sorted({each for link in _chain(error) for each in _suspects(link, rank)})
    seat.tell("broken", number=number, suspects=suspects, reason=in_one_line(error))


def _suspects(error: BaseException, rank: int) -> set[int]:
    """The ranks that an error says are lost, as this rank sees it."""
    if isinstance(error, RendezvousError):
        return {*error.ranks} - {rank}
    if not isinstance(error, PeerFailedError) or error.said or error.rank is None:
        return set()
    if error.pair is not None:
        return {*error.pair} - {rank} if rank in error.pair else set()
    return {error.rank} - {rank}


@contextmanager
def _leaving_on_sigterm(process: Process) -> Iterator[None]:
    """Within it, SIGTERM asks the rank of this process to leave."""
    if not process.signals or threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        process.seat.leave("its process got SIGTERM")

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
