"""``launch``: an elastic job whose ranks are threads of this process, to try programs with."""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from fsdpcore.comm.place import RankPlace
from fsdpcore.comm.transport import Transport
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError, ConfigError, ElasticError, StateError
from fsdpcore.elastic.channel import Message
from fsdpcore.elastic.events import Change, Event, Finished, Install, Stop
from fsdpcore.elastic.generation import Generation, HostCard
from fsdpcore.elastic.hearing import pass_on
from fsdpcore.elastic.membership import Member
from fsdpcore.elastic.program import Process, sit
from fsdpcore.elastic.seat import Seat
from fsdpcore.elastic.threads import Gatherings, QueueChannel
from fsdpcore.launch.config import resolve

_LOST_AFTER, _PATIENCE = 10.0, 60.0  # seconds; there are no other hosts
_KILLED = "it was killed"


class _Rank:
    """A thread that is a rank, or waits to become one.

    Attributes:
        rank: in this generation; None if it has none.
        result, error: of the program.
        ended: its thread has come to its end.
        leaves: it is to leave.
        well: it has ended its program, with all others.
    """

    def __init__(self, job: ElasticThreads, number: int) -> None:
        self.channel = QueueChannel(job.told, number)
        self.rank: int | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = self.leaves = self.well = self.killed = False
        self._job, self._number = job, number
        self._seat = Seat(self.channel)
        self._backend: Transport | None = None
        self.thread = threading.Thread(target=self._run, name=f"seat-{number}", daemon=True)

    def _run(self) -> None:
        sit(Process(self._seat, self._meet))
        self._seat.sit()
        try:
            self.result = self._job.program()
        except BaseException as error:  # raised again by ``wait``
            self.error = error
        self.channel.close()
        self._job.told.put((self._number, {"kind": "ended"}))

    def _meet(self, place: RankPlace) -> Transport:
        backend = self._backend = self._job.gatherings.meet(place)
        return backend

    def kill(self) -> None:
        """End it wherever it is; what it had in memory is lost."""
        self.killed = True
        self.channel.close()
        if self._backend is not None:
            self._backend.abort(_KILLED)


class ElasticThreads:
    """An elastic job of threads; ``launch`` makes it.

    Attributes:
        generation: the newest one, with its ``number``, its ``reason``, and its ``seats`` in the
            order of the ranks. None if not even the first has begun.
    """

    def __init__(
        self, program: Callable[[], Any], first: int, member: Member, gatherings: Gatherings
    ) -> None:
        self.program, self.gatherings = program, gatherings
        self.told: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self.generation: Generation | None = None
        self._member = member
        self._lock = threading.RLock()
        self._ranks: dict[int, _Rank] = {}
        self._stopped = ""
        self._begun = threading.Event()  # there is a generation, or there will be none
        member.found(1, time.monotonic())
        self.add(first)
        self._thread = threading.Thread(target=self._serve, name="fsdpcore-elastic", daemon=True)
        self._thread.start()
        self._begun.wait()

    # What a user does.

    def add(self, count: int = 1) -> None:
        """Start more ranks, which are taken along at the next commit; does not block.

        Args:
            count: how many. Those beyond the job's most wait.

        Raises:
            StateError: the job has ended.
        """
        with self._lock:
            if self._member.finished or self._member.stopped:
                raise StateError("no rank can be added: the job has ended")
            for _ in range(as_int(count, "how many ranks to add", minimum=0)):
                number = len(self._ranks)
                found = self._ranks[number] = _Rank(self, number)
                self._member.seat_started(number, time.monotonic())
                found.thread.start()

    def kill(self, rank: int) -> None:
        """End a rank as if its process was killed, at its next call of the library.

        Args:
            rank: of this generation.

        Raises:
            ArgumentError: this generation has no such rank.
        """
        with self._lock:
            number, found = self._at(rank)
            found.kill()
            self.told.put((number, {"kind": "killed"}))

    def leave(self, rank: int, reason: str = "it was asked to") -> None:
        """Have a rank leave at the next commit, in order; does not block.

        Args:
            rank: of this generation.
            reason: in words.

        Raises:
            ArgumentError: this generation has no such rank.
        """
        with self._lock:
            number, _ = self._at(rank)
            self.told.put((number, {"kind": "leave", "reason": reason}))

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Block until the program has ended.

        Args:
            timeout: seconds; by default as long as it takes.

        Returns:
            The results of the last generation's ranks, in their order.

        Raises:
            TimeoutError: it has not ended in time; it goes on.
            ElasticError: the job could not go on.
            Exception: what the program of a rank has raised, if no rank has come to its end.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the job has not ended within {timeout:g} s")
        well = [rank for rank in self._ranks.values() if rank.well]
        if well:
            return [each.result for each in sorted(well, key=lambda each: each.rank or 0)]
        ended = [rank.error for rank in self._ranks.values() if not rank.killed]
        for error in ended:
            if error is not None and not isinstance(error, (SystemExit, ElasticError)):
                raise error
        raise ElasticError(self._stopped or "all ranks have left")

    def _at(self, rank: int) -> tuple[int, _Rank]:
        for number, found in self._ranks.items():
            if found.rank == rank and not found.ended and not found.killed:
                return number, found
        number = 0 if self.generation is None else self.generation.number
        raise ArgumentError(f"no rank {rank} is alive in generation {number} of the job")

    # The agent.

    def _serve(self) -> None:
        while not all(rank.ended for rank in list(self._ranks.values())):
            number, message = -1, None
            try:
                seconds = max(0.0, self._member.next_tick() - time.monotonic())
                number, message = self.told.get(timeout=min(seconds, 1.0))
            except queue.Empty:
                pass
            with self._lock:
                if message is not None:
                    self._heard(number, self._ranks[number], message)
                self._member.tick(time.monotonic())
                self._member.take_outbox()
                while events := self._member.take_events():
                    for event in events:
                        self._handle(event)
        self._begun.set()

    def _heard(self, number: int, rank: _Rank, message: Message) -> None:
        member, now, kind = self._member, time.monotonic(), message["kind"]
        if kind in ("ended", "killed"):
            rank.ended = rank.ended or kind == "ended"
            member.seat_ended(number, now)
        elif not rank.killed:
            rank.leaves |= kind == "leave"
            rank.well |= kind == "finished"
            pass_on(member, number, message, now)

    def _handle(self, event: Event) -> None:
        there = {n: rank for n, rank in self._ranks.items() if not (rank.ended or rank.killed)}
        if isinstance(event, Install):
            self.generation = event.generation
            self._begun.set()
            for number, rank in there.items():
                rank.rank = event.ranks.get(number)
                if rank.rank is not None:
                    rank.channel.tell(_told(event.generation, rank.rank))
                elif number in event.dropped:
                    rank.channel.tell({"kind": "left"})
            return
        for rank in there.values():
            if isinstance(event, Change):
                if rank.rank is not None:
                    told = {"kind": "change", "reason": event.reason, "leaves": rank.leaves}
                    rank.channel.tell(told)
            elif isinstance(event, Finished):
                rank.well = rank.well or rank.rank is not None
                rank.channel.tell({"kind": "finished"})
            elif isinstance(event, Stop):
                self._stopped = event.reason
                rank.channel.tell({"kind": "stop", "reason": event.reason})


def _told(generation: Generation, rank: int) -> Message:
    place, content = generation.place(rank), generation.encode()
    return {"kind": "generation", "place": place, "generation": content}


def launch(
    fn: Callable[..., Any],
    *,
    world_size: int | tuple[int, int],
    transport: str | None = None,
    args: Sequence[Any] = (),
    **options: Any,
) -> ElasticThreads:
    """Start an elastic job of threads, to try with what a program does when ranks change.

    ::

        job = fc.elastic.launch(train, world_size=(1, 8), args=(100,))
        job.kill(0)
        job.add(2)
        print(job.wait())

    Args:
        fn: a function that ``fc.elastic.run`` has decorated.
        world_size: how many ranks there are to begin with, and at most; or with how few the job
            goes on, and how many there are to begin with, and at most.
        transport: one whose ranks are threads (default: ``sim``).
        args: of ``fn``, behind the job.
        **options: as of ``fc.launch``.

    Returns:
        The job, whose first generation has begun: ``add(n)``, ``kill(rank)``, ``leave(rank)``,
        ``wait()``.

    Raises:
        ConfigError: an option is wrong, or ranks of the transport are processes; those are started
            with ``fsdpcore run --elastic``.
        ArgumentError: another argument is wrong.
    """
    if not getattr(fn, "elastic_program", False):
        raise ArgumentError(f"launch() needs a function that elastic.run has made, got {fn!r}")
    if isinstance(world_size, tuple) and len(world_size) != 2:
        raise ArgumentError(f"world_size is a number, or a pair of them, got {world_size!r}")
    least, most = world_size if isinstance(world_size, tuple) else (1, world_size)
    most = as_int(most, "world_size", minimum=1)
    least = as_int(least, "world_size", minimum=1, maximum=most)
    config = resolve({"transport": transport, **options}, os.environ, Path.cwd())
    if not config.transport_class.ranks_are_threads:
        raise ConfigError(
            f"ranks of transport {config.transport!r} are processes: start them with 'fsdpcore run "
            f"--elastic -n {least}:{most} SCRIPT'"
        )
    threadpool_limits(config.blas_threads or 1, user_api="blas")
    card = HostCard(secrets.token_hex(8), "this process", "this process")
    member = Member(
        card, minimum=least, maximum=most, lost_after=_LOST_AFTER, patience=_PATIENCE, job=card.id
    )
    return ElasticThreads(lambda: fn(*args), most, member, Gatherings(config))
