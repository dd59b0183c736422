"""Ranks that are processes, started once and used for many jobs.

For each job the first ``world_size`` of them join a
new backend through the transport's own rendezvous, so that every job starts clean and a broken
one costs nothing. The test's process tells them what to do over a connection each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import queue
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support import forks
from support.hosts.namespaces import end_with_parent
from support.spmd_job import Job, Meeting, Outcome, expect_all, failure, perform
from support.waits import wait_mostly_asleep
from threadpoolctl import threadpool_limits

from fsdpcore.comm.place import RankPlace
from fsdpcore.launch.config import resolve
from fsdpcore.launch.endpoints import listen

_START_SECONDS = 90.0
_DEAD = Outcome(error="its process has died")


@dataclass(frozen=True)
class Hello:
    """What a process says first; ``port`` is that of its listening socket for rendezvous."""

    number: int
    pid: int
    port: int


@dataclass(frozen=True)
class Order:
    """One rank's part of a job.

    The job, with what its options come to, is pickled by itself, since unpickling it may fail.
    """

    job: bytes
    rank: int
    rendezvous: str
    token: str
    path: list[str]


class Worker:
    """A process of the fleet, seen from the test's process."""

    def __init__(self, connection: Connection, hello: Hello, stacks: Path) -> None:
        self.connection = connection
        self.port = hello.port
        self._pid = hello.pid
        self._stacks = stacks / str(hello.number)

    def stack(self) -> str:
        """Where all threads of the process are."""
        before = self._stacks.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR1)
        end = time.monotonic() + 2.0
        while self._stacks.stat().st_size == before and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.05)  # the rest of it
        return self._stacks.read_text()[before:]

    def kill(self) -> None:
        """End the process; its launcher then ends the others."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


class Fleet:
    """Processes that wait for jobs.

    Args:
        transport: of the jobs.
        size: number of processes.

    Attributes:
        size: see there.
        broken: a process has died or is stuck; only ``close`` helps.
    """

    def __init__(self, transport: str, size: int) -> None:
        self.size = size
        self.broken = False
        self._transport = transport
        self._closing = False
        self._directory = tempfile.TemporaryDirectory()
        self._workers: list[Worker] = []
        self._error: BaseException | None = None
        self._arrivals: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._key = secrets.token_bytes(16)
        self._listener = Listener(authkey=self._key)
        self._launcher = threading.Thread(target=self._launch, name="fleet", daemon=True)
        self._acceptor = threading.Thread(target=self._accept, name="fleet-accept", daemon=True)
        self._launcher.start()
        self._acceptor.start()
        self._welcome()

    def _launch(self) -> None:
        args = (self._listener.address, self._key, self._directory.name)
        processes: list[BaseProcess] = []
        try:
            for number in range(self.size):
                processes.append(forks.start(_serve, number, *args))
            wait([process.sentinel for process in processes])
            self._error = RuntimeError("a process of the fleet has ended")
        except OSError as error:
            self._error = error
        for process in processes:
            if not self._closing:
                process.kill()
            forks.exit_code(process)
            process.close()
        self._arrivals.put(None)

    def _accept(self) -> None:
        for _ in range(self.size):
            self._arrivals.put(self._listener.accept())

    def _welcome(self) -> None:
        stacks = Path(self._directory.name)
        found: dict[int, Worker] = {}
        while len(found) < self.size:
            connection = self._arrivals.get(timeout=_START_SECONDS)
            if connection is None:
                assert self._error is not None
                raise self._error
            hello = connection.recv()
            found[hello.number] = Worker(connection, hello, stacks)
        self._acceptor.join()
        self._listener.close()
        self._workers = [found[number] for number in range(self.size)]

    def run(self, job: Job) -> list[Outcome]:
        """Run a job on the first processes."""
        workers = self._workers[: job.world_size]
        orders = self._orders(job, workers)
        for worker, order in zip(workers, orders, strict=True):
            worker.connection.send(order)
        outcomes = _Attendance(workers, job).outcomes()
        stuck = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        self.broken = bool(stuck) or _DEAD in outcomes
        late = f"not finished after {job.timeout:g} s"
        where = {rank: Outcome(traceback=workers[rank].stack(), error=late) for rank in stuck}
        for rank in stuck:
            workers[rank].kill()
        return [outcome or where[rank] for rank, outcome in enumerate(outcomes)]

    def _orders(self, job: Job, workers: list[Worker]) -> list[Order]:
        options = {"transport": self._transport, "rendezvous_timeout": job.timeout, **job.options}
        rendezvous, token = f"127.0.0.1:{workers[0].port}", secrets.token_hex(8)
        config, orders = resolve({n: _of(0, v) for n, v in options.items()}, {}), []
        for rank in range(len(workers)):
            if any(isinstance(value, tuple) for value in options.values()):
                config = resolve({n: _of(rank, v) for n, v in options.items()}, {})
            content = pickle.dumps((job, config))
            orders.append(Order(content, rank, rendezvous, token, list(sys.path)))
        return orders

    def close(self) -> None:
        """Let the processes end, and wait for that."""
        self._closing = not self.broken
        for worker in self._workers:
            if not self.broken:
                worker.connection.send(None)
        self._launcher.join()
        for worker in self._workers:
            worker.connection.close()
        self._directory.cleanup()


def _of(rank: int, option: Any) -> Any:
    return option[rank] if isinstance(option, tuple) else option


class _Attendance:
    """Waits for the outcomes of one job, and lets its ranks meet."""

    def __init__(self, workers: list[Worker], job: Job) -> None:
        self._ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
        self._connections = [worker.connection for worker in workers]
        self._meeting = Meeting(len(workers))
        self._outcomes: list[Outcome | None] = [None] * len(workers)
        self._end = time.monotonic() + job.timeout

    def outcomes(self) -> list[Outcome | None]:
        """Return when all ranks have ended or died, or the time is over; None for no outcome."""
        open_ = set(self._connections)
        while open_ and (left := self._end - time.monotonic()) > 0:
            for ready in wait(list(open_), left):
                assert isinstance(ready, Connection)
                if not self._read(ready, self._ranks[ready]):
                    open_.discard(ready)
        return self._outcomes

    def _read(self, connection: Connection, rank: int) -> bool:
        """Handle one message; return whether the rank goes on."""
        try:
            message = connection.recv()
        except (EOFError, OSError):
            self._outcomes[rank] = _DEAD
            self._release(self._meeting.leave(rank))
            return False
        if isinstance(message, Outcome):
            self._outcomes[rank] = message
            self._release(self._meeting.leave(rank))
            return False
        self._release(self._meeting.arrive(rank))
        return True

    def _release(self, ranks: dict[int, bool]) -> None:
        for rank, complete in ranks.items():
            self._connections[rank].send(complete)


def _serve(number: int, address: Any, key: bytes, stacks: str) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threadpool_limits(1, user_api="blas")
    serve(number, address, key, stacks)


def serve(number: int, address: Any, key: bytes, stacks: str) -> None:
    """The program of a process of the fleet: run what it is sent until it is sent None."""
    wait_mostly_asleep()
    if not sys.warnoptions:  # who starts the tests may want to see warnings only
        warnings.simplefilter("error")
    with (
        Path(stacks, str(number)).open("w") as file,
        listen("127.0.0.1") as listener,
        Client(address, authkey=key) as connection,
    ):
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        connection.send(Hello(number, os.getpid(), listener.getsockname()[1]))
        while (order := connection.recv()) is not None:
            connection.send(_obey(order, connection, listener))


def _obey(order: Order, connection: Connection, listener: socket.socket) -> Outcome:
    def meet() -> None:
        connection.send("meet")
        expect_all(connection.recv())

    try:
        sys.path += [entry for entry in order.path if entry not in sys.path]
        job, config = pickle.loads(order.job)
        place = RankPlace(
            order.rank,
            job.world_size,
            order.rank,
            job.world_size,
            "the test suite",
            order.rendezvous,
            listener.fileno() if order.rank == 0 else None,
            order.token,
        )
        backend = config.transport_class.join(place, config)
    except BaseException as error:
        return failure(error)
    return perform(job, backend, meet)
