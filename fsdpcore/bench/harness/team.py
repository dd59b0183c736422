"""Teams: all ranks of one or more contestants, asked together."""

from __future__ import annotations

import json
import selectors
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.bench.harness.member import Obedient
from fsdpcore.collectives import all_gather
from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import RankFailedError
from fsdpcore.core.text import name_ranks
from fsdpcore.launch import supervision
from fsdpcore.launch.supervision import LaunchedProcess

START_SECONDS = 120.0
# Nothing that is asked for takes longer: who has not answered by then hangs.
ANSWER_SECONDS = 300.0
_END_SECONDS = 10.0


class Team(ABC):
    """Ranks that carry out orders.

    Attributes:
        versions: of libraries, by contestant; those of rank 0.
    """

    versions: dict[str, dict[str, str]]

    @abstractmethod
    def ask(self, contestant: str, do: str, **details: Any) -> list[list[float]]:
        """Give an order of ``member``'s table to all ranks; their answers in rank order.

        Raises:
            RankFailedError: a rank could not do it, or is gone. The team is of no more use.
        """


class LocalTeam(Team):
    """The rank of this process, with its peers, which call the same in the same order."""

    def __init__(self, backend: Backend, member: Obedient) -> None:
        self._backend = backend
        self._member = member
        self.versions = member.versions

    def ask(self, contestant: str, do: str, **details: Any) -> list[list[float]]:
        mine = self._member.obey({"contestant": contestant, "do": do, **details})
        if not mine:
            return [[]] * self._backend.world_size
        everyone = all_gather(np.array([mine], np.float64), self._backend)
        return [list(map(float, row)) for row in everyone]


class _RankChannel(NamedTuple):
    """The connection of one rank."""

    socket: socket.socket
    file: Any

    def read(self) -> Any:
        """The next message, or None at the end; blocks."""
        text = self.file.readline()
        return json.loads(text) if text else None

    def close(self) -> None:
        self.file.close()
        self.socket.close()


class RemoteTeam(Team):
    """Ranks in processes of this host, which it starts and ends.

    Args:
        name: for error messages.
        world_size: number of ranks.
        start: given the directory and the path of the socket at which it listens, starts the
            processes; several ranks may be in one, or a process may start them in turn.
    """

    def __init__(
        self, name: str, world_size: int, start: Callable[[Path, str], list[LaunchedProcess]]
    ) -> None:
        self._name = name
        self._processes: list[LaunchedProcess] = []
        self._lines: list[_RankChannel | None] = [None] * world_size
        self._directory = tempfile.TemporaryDirectory(prefix="fsdpcore-bench-")
        try:
            self._start(start)
        except BaseException:
            self.close(kill=True)
            raise

    def _start(self, start: Callable[[Path, str], list[LaunchedProcess]]) -> None:
        directory = Path(self._directory.name)
        path = str(directory / "orders")
        deadline = time.monotonic() + START_SECONDS
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(len(self._lines))
            listener.settimeout(0.1)
            self._processes = start(directory, path)
            while None in self._lines:
                self._check_processes()
                if time.monotonic() > deadline:
                    raise RankFailedError(
                        f"{self._name}: not all ranks had started after {START_SECONDS:.0f} s"
                    )
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        connection.settimeout(START_SECONDS)
        line = _RankChannel(connection, connection.makefile("rwb"))
        hello = line.read()
        if hello is None:
            line.close()
            raise RankFailedError(f"{self._name}: a rank ended as soon as it had started")
        rank, size = hello["rank"], hello["world_size"]
        if size != len(self._lines) or self._lines[rank] is not None:
            line.close()
            raise RankFailedError(
                f"{self._name}: rank {rank} thinks that there are {size} ranks, not "
                f"{len(self._lines)}; does the launcher belong to the library that it starts?"
            )
        self._lines[rank] = line
        if rank == 0:
            self.versions = hello["versions"]

    def _check_processes(self) -> None:
        for process in self._processes:
            code = process.poll()
            if code is not None:
                raise RankFailedError(
                    f"{self._name} could not be started ({supervision.describe_exit(code)}); "
                    "what it printed is above"
                )

    def ask(self, contestant: str, do: str, **details: Any) -> list[list[float]]:
        order = {"contestant": contestant, "do": do, **details}
        text = json.dumps(order).encode() + b"\n"
        lines = [line for line in self._lines if line is not None]
        for rank, line in enumerate(lines):
            try:
                line.file.write(text)
                line.file.flush()
            except OSError as error:
                raise RankFailedError(f"{self._name}: rank {rank} has ended", rank) from error
        return self._answers(lines, order)

    def _answers(
        self, lines: Sequence[_RankChannel], order: Mapping[str, Any]
    ) -> list[list[float]]:
        answers: dict[int, list[float]] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        with selectors.DefaultSelector() as selector:
            for rank, line in enumerate(lines):
                selector.register(line.socket, selectors.EVENT_READ, rank)
            while len(answers) < len(lines):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(set(range(len(lines))) - set(answers))
                    raise RankFailedError(
                        f"{self._name}: {name_ranks(missing)} have not answered {order['do']!r} "
                        f"after {ANSWER_SECONDS:.0f} s"
                    )
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    answers[key.data] = self._answer(key.data, lines[key.data])
        return [answers[rank] for rank in range(len(lines))]

    def _answer(self, rank: int, line: _RankChannel) -> list[float]:
        try:
            message = line.read()
        except OSError:
            message = None
        if message is None:
            raise RankFailedError(f"{self._name}: rank {rank} has ended", rank)
        if "error" in message:
            raise RankFailedError(f"{self._name}: rank {rank} failed: {message['error']}", rank)
        return [float(value) for value in message["answer"]]

    def close(self, *, kill: bool = False) -> None:
        """Let the ranks end, and make them where they don't."""
        for index, line in enumerate(self._lines):
            if line is not None:
                line.close()
                self._lines[index] = None
        try:
            if not kill:
                _let_end(self._processes, _END_SECONDS)
            supervision.stop(self._processes)
        finally:
            supervision.release(self._processes, kill=True)
            self._processes = []
            self._directory.cleanup()

    def __enter__(self) -> RemoteTeam:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(kill=error is not None)


def _let_end(processes: Sequence[LaunchedProcess], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.01)
