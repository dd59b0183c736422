"""Ranks as processes of this host, started with ``multiprocessing`` (spawn)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from socket import socket
from typing import Any

from fsdpcore import supervise
from fsdpcore.config import Config
from fsdpcore.environment import Place
from fsdpcore.errors import ArgumentError, PeerFailedError, RankFailedError
from fsdpcore.rendezvous import listen

Become = Callable[[Callable[..., Any], Sequence[Any], Place, Config], Any]

_LOOPBACK = "127.0.0.1"


class RemoteTraceback(Exception):  # noqa: N818 (it carries a traceback's text, as a cause)
    """The traceback of a failed rank, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class _Outcome:
    """What a rank's process reports through its pipe before it ends."""

    result: Any = None
    error: str = ""
    traceback: str = ""
    consequence: bool = False


class _Child:
    """A rank's process, as ``supervise`` sees it."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe
        self.outcome: _Outcome | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        # A large result fills the pipe, and its sender cannot end before it was read.
        if self.outcome is None:
            with contextlib.suppress(EOFError, OSError):
                if self._pipe.poll():
                    self.outcome = self._pipe.recv()
        return self._process.exitcode

    def close(self) -> None:
        self._process.join()
        self._process.close()
        self._pipe.close()


def run_processes(
    fn: Callable[..., Any], args: Sequence[Any], world_size: int, config: Config, become: Become
) -> list[Any]:
    """Run ``fn`` in ``world_size`` processes; see ``launch``."""
    _check_picklable(fn, args)
    children: list[_Child] = []
    try:
        with listen(config.host or _LOOPBACK, config.port) as listener:
            _start(children, listener, fn, args, world_size, config, become)
        first = supervise.wait(children, failed=bool)
        if first is not None:
            raise _failure(children, first)
        return [child.outcome.result if child.outcome else None for child in children]
    finally:
        supervise.stop(children)
        for child in children:
            child.close()


def _start(
    children: list[_Child],
    listener: socket,
    fn: Callable[..., Any],
    args: Sequence[Any],
    world_size: int,
    config: Config,
    become: Become,
) -> None:
    context = multiprocessing.get_context("spawn")
    host, port = listener.getsockname()[:2]
    token = secrets.token_hex(16)
    for rank in range(world_size):
        receiving, sending = context.Pipe(duplex=False)
        place = Place(rank, world_size, rank, world_size, "launch", f"{host}:{port}", None, token)
        process = context.Process(
            target=_child_main,
            args=(place, listener if rank == 0 else None, os.getpid(), sending, become),
            kwargs={"fn": fn, "args": args, "config": config},
            name=f"rank-{rank}",
        )
        process.start()
        sending.close()
        children.append(_Child(process, receiving))


def _child_main(
    place: Place,
    listener: socket | None,
    parent: int,
    pipe: Connection,
    become: Become,
    *,
    fn: Callable[..., Any],
    args: Sequence[Any],
    config: Config,
) -> None:
    supervise.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)  # it was gone before the kernel was asked
    if listener is not None:
        place = Place(**{**vars(place), "listener_fd": listener.fileno()})
    try:
        outcome = _Outcome(become(fn, args, place, config))
    except KeyboardInterrupt:
        # Ctrl-C reaches all processes of the terminal; the parent speaks for them.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(128 + signal.SIGINT)
    except BaseException as error:
        outcome = _Outcome(
            error=f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc(),
            consequence=isinstance(error, PeerFailedError),
        )
        if isinstance(error, SystemExit) and not error.code:
            outcome = _Outcome()
    _report(pipe, outcome, place.rank)
    sys.exit(1 if outcome.error else 0)


def _report(pipe: Connection, outcome: _Outcome, rank: int) -> None:
    try:
        pipe.send(outcome)
    except Exception as error:
        reason = f"the result of rank {rank} cannot be pickled for the parent process: {error}"
        pipe.send(_Outcome(error=reason, traceback=traceback.format_exc()))
        sys.exit(1)


def _failure(children: list[_Child], first: int) -> RankFailedError:
    """The error to raise: about the rank that failed by itself, not one that it took along."""
    own = [
        rank
        for rank, child in enumerate(children)
        if child.outcome is not None and child.outcome.error and not child.outcome.consequence
    ]
    silent = [r for r, c in enumerate(children) if c.poll() not in (0, None) and c.outcome is None]
    culprit = first if first in own + silent else (own + silent + [first])[0]
    outcome, code = children[culprit].outcome, children[culprit].poll()
    if outcome is None:
        how = supervise.describe_exit(code or 0)
        return RankFailedError(f"rank {culprit} ended without a result: {how}", culprit)
    failure = RankFailedError(f"rank {culprit} failed: {outcome.error}", culprit)
    failure.__cause__ = RemoteTraceback(outcome.traceback)
    return failure


def _check_picklable(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        pickle.dumps((fn, tuple(args)))
    except Exception as error:
        raise ArgumentError(
            "ranks that are processes import the function and unpickle its arguments; pass a "
            f"function at the top of a module and picklable arguments ({error})"
        ) from error
