"""Ranks of the ``zmq`` transport that a test can kill, stop and interrupt, or make one by one.

Two kinds: processes, for what happens to processes, and threads of the test's process, each with a
backend of its own, for the rest. Neither goes through ``fsdpcore.launch``, which would end the
other ranks by itself when one dies.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fsdpcore.transports.zmq.backend import ZmqBackend
from support import forks
from support.hosts.namespaces import end_with_parent

from fsdpcore import Backend
from fsdpcore.comm.place import RankPlace
from fsdpcore.launch.config import Config, resolve

# Nothing here takes that long unless it hangs: it must only be longer than any deadline within.
PATIENCE = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: the result of its body, or the error that it raised.

    Attributes:
        result: of the body.
        error: name of the exception's type; empty for none.
        text: of the exception.
        culprit, pair: its ``rank`` and its ``pair``, if it has them.
        ended: when that was, by ``time.monotonic``, which all processes of a machine share.
    """

    result: Any = None
    error: str = ""
    text: str = ""
    culprit: int | None = None
    pair: tuple[int, int] | None = None
    ended: float = field(default_factory=time.monotonic, compare=False)

    @staticmethod
    def of(error: BaseException) -> Outcome:
        """The outcome of a rank that raised."""
        culprit, pair = getattr(error, "rank", None), getattr(error, "pair", None)
        return Outcome(None, type(error).__name__, str(error), culprit, pair)


Tell = Callable[[Any], None]


def config(**options: Any) -> Config:
    """Settings for one rank; by default with deadlines longer than any test's patience."""
    given = {"timeout": 2 * PATIENCE, "rendezvous_timeout": 2 * PATIENCE, **options}
    return resolve({"transport": "zmq", **given}, {})


def listener() -> socket.socket:
    """A socket for the ranks to meet at."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(64)
    return sock


def place(
    rank: int, world_size: int, port: int, token: str, listening: socket.socket | None = None
) -> RankPlace:
    """Who a rank is, for ``ZmqBackend.join``."""
    descriptor = listening.fileno() if listening is not None else None
    address = f"127.0.0.1:{port}"
    return RankPlace(rank, world_size, rank, world_size, "a test", address, descriptor, token)


# Ranks that are threads of this process.


def run_threads(
    body: Callable[[ZmqBackend], Any], world_size: int, **options: Any
) -> list[Outcome]:
    """Call ``body(backend)`` on every rank, each a thread of this process; close the backends."""
    settings = config(**options)
    return run_joined(lambda here: ZmqBackend.join(here, settings), body, world_size)


def run_joined(
    join: Callable[[RankPlace], Any], body: Callable[[Any], Any], world_size: int
) -> list[Outcome]:
    """Do as ``run_threads``, with the backends that ``join`` makes."""
    outcomes: list[Outcome] = [Outcome(error="hangs")] * world_size
    token = secrets.token_hex(8)

    def run(rank: int) -> None:
        try:
            here = place(rank, world_size, port, token, meeting if rank == 0 else None)
            with join(here) as backend:
                outcomes[rank] = Outcome(body(backend))
        except BaseException as error:
            outcomes[rank] = Outcome.of(error)

    with listener() as meeting:
        port = meeting.getsockname()[1]
        threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    return outcomes


# Ranks that are processes.


class RankProcess:
    """A rank that is a process, and the test's connection to its body."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sleeps(self) -> bool:
        """Whether all its threads wait for something else than a processor."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        try:
            said = [(each / "stat").read_text() for each in threads]
        except OSError:  # a thread has just ended
            return False
        return all(text.rpartition(")")[2].split()[0] == "S" for text in said)

    def hear(self) -> Any:
        """Return the next thing that the body told."""
        assert self._pipe.poll(PATIENCE), "the rank hangs"
        return self._pipe.recv()

    def outcome(self) -> Outcome:
        """Wait for the end of the body and of the process."""
        found = self.hear()
        assert isinstance(found, Outcome), found
        code = forks.exit_code(self._process, PATIENCE)
        assert code == 0, f"exit code {code}"
        return found

    def say(self, message: Any) -> None:
        """Send something for the body to receive."""
        self._pipe.send(message)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Make sure that the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # works on stopped ones, too
        forks.exit_code(self._process)
        self._process.close()
        self._pipe.close()


class Line:
    """A body's connection to the test."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, message: Any) -> None:
        """Send something to the test."""
        self._pipe.send(message)

    def ask(self) -> Any:
        """Receive what the test says."""
        assert self._pipe.poll(PATIENCE), "the test says nothing"
        return self._pipe.recv()


Body = Callable[[Backend, Line], Any]
Join = Callable[[], contextlib.AbstractContextManager[Backend]]


def ready(ranks: Iterable[RankProcess]) -> float:
    """Wait until all have told "ready"; the time, since which something may happen to them."""
    for rank in ranks:
        assert rank.hear() == "ready"
    return time.monotonic()


@contextlib.contextmanager
def processes(body: Body, world_size: int, **options: Any) -> Iterator[list[RankProcess]]:
    """Run ``body(backend, line)``, from the top of a module, on ranks that are processes.

    At the end none of them is left. Options are settings, such as another ``transport`` that is
    built on this one, and options of the transport.
    """
    token = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        with listener() as meeting:
            port = meeting.getsockname()[1]
            places = [place(rank, world_size, port, token) for rank in range(world_size)]
            joins = [
                partial(_join, here, None if here.rank else meeting, options) for here in places
            ]
            ranks = stack.enter_context(joined(body, joins))
        yield ranks


@contextlib.contextmanager
def joined(body: Body, joins: Iterable[Join]) -> Iterator[list[RankProcess]]:
    """Do as ``processes``, with ranks that join as these functions do, each in its process."""
    ranks = list[RankProcess]()
    try:
        for join in joins:
            ours, theirs = forks.Pipe()
            process = forks.start(_main, body, join, theirs)
            theirs.close()
            ranks.append(RankProcess(process, ours))
        yield ranks
    finally:
        for rank_process in ranks:
            rank_process.end()


def _join(
    here: RankPlace, passed: socket.socket | None, options: dict[str, Any]
) -> contextlib.AbstractContextManager[Backend]:
    settings = config(**options)
    with passed or contextlib.nullcontext():
        if passed is not None:
            here = RankPlace(**{**vars(here), "listener_fd": passed.fileno()})
        return settings.transport_class.join(here, settings)


def _main(body: Body, join: Join, pipe: Connection) -> None:
    end_with_parent()
    if not sys.warnoptions:  # who starts the tests may want to see warnings only
        warnings.simplefilter("error")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with join() as backend:
            result = body(backend, Line(pipe))
        outcome = Outcome(result)
    except BaseException as error:
        outcome = Outcome.of(error)
    with contextlib.suppress(BrokenPipeError):
        pipe.send(outcome)
    pipe.close()
    sys.exit(0)
