"""The program of a rank that measures: it waits for orders, carries them out, and answers.

Orders and answers are lines of JSON on a local socket. Whoever waits for an order is asleep in a
blocking read, so that a competitor that is not being measured takes no processor time from one
that is. An order names a contestant:

==========  ===============================================  ======================
order       what is done                                     answer
==========  ===============================================  ======================
prepare     make the job of a ``case``                       nothing
run         ``warmup`` untimed steps, a barrier, then        seconds of the
            ``iterations`` steps back to back                ``iterations``
release     give the job up                                  nothing
before      nothing                                          memory before the first job
any other   the method of the job that has this name,        what it returns: nothing,
            with the rest of the order as arguments          a number, or a list of them
==========  ===============================================  ======================

Memory is that of the process, as in ``memory``: its id, resident, proportional.
"""

from __future__ import annotations

import gc
import itertools
import json
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import fsdpcore
from fsdpcore.bench.harness.memory import Memory, reset_peak
from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import ArgumentError, in_words

Options = Mapping[str, Any]
Make = Callable[[Mapping[str, Any]], "CaseRunner"]


class CaseRunner(ABC):
    """One contestant's way to do a case on one rank.

    All ranks make theirs at the same time. What a bench asks for besides are further methods.
    """

    @abstractmethod
    def barrier(self) -> None:
        """Block until all ranks are here."""

    def step(self) -> object:
        """What is timed."""
        raise NotImplementedError(f"{type(self).__name__} is not timed by steps")

    def call(self) -> Callable[[], object]:
        """``step``, or a function that does the same with nothing around it."""
        return self.step

    def finish(self) -> None:  # noqa: B027 (a step on the host has ended when it returns)
        """Wait for what steps have only begun; this is timed as well."""

    def check(self) -> int:
        """Make an untimed step on known values; how many elements were wrong on this rank."""
        return 0

    def memory(self) -> list[float]:
        """Memory of this process since the job was made."""
        return Memory.now().as_answer()

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Give up what is not just memory."""


class Member:
    """A rank of one contestant, or of several that share its process.

    Args:
        make: makes the job of a case, by contestant.
        versions: of libraries, by contestant.
        leave: called at the end.
    """

    def __init__(
        self,
        make: Mapping[str, Make],
        versions: Mapping[str, dict[str, str]],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.versions = dict(versions)
        self._make = make
        self._leave = leave
        self._jobs: dict[str, CaseRunner] = {}
        self._before = Memory.now()

    def obey(self, order: Mapping[str, Any]) -> list[float]:
        """Carry out one order of the table in the module docstring."""
        details = dict(order)
        name, do = details.pop("contestant"), details.pop("do")
        if do in ("prepare", "release"):
            self._release(name)
            if do == "prepare":
                reset_peak()
                self._jobs[name] = self._make[name](details["case"])
            return []
        if do == "before":
            return self._before.as_answer()
        job = self._jobs[name]
        if do == "run":
            return [timed(job, **details)]
        answer = getattr(job, do)(**details)
        if answer is None:
            return []
        return list(map(float, answer if isinstance(answer, list) else [answer]))

    def _release(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is not None:
            job.close()
            del job
            gc.collect()  # hooks of PyTorch's modules refer to each other

    def close(self) -> None:
        """Leave all contestants' jobs, the last one first."""
        for name in reversed(list(self._jobs)):
            self._release(name)
        self._leave()


def timed(job: CaseRunner, warmup: int, iterations: int) -> float:
    """Seconds of ``iterations`` steps back to back, after ``warmup`` more and a barrier."""
    return timed_calls(job.barrier, job.call(), job.finish, warmup, iterations)


def timed_calls(
    barrier: Callable[[], object],
    call: Callable[[], object],
    finish: Callable[[], object],
    warmup: int,
    iterations: int,
) -> float:
    """As ``timed``, of any function."""
    for _ in itertools.repeat(None, warmup):
        call()
    enabled = gc.isenabled()
    gc.disable()  # as timeit does: what a collection costs depends on the program around it
    try:
        barrier()
        started = time.perf_counter()
        for _ in itertools.repeat(None, iterations):
            call()
        finish()
        return time.perf_counter() - started
    finally:
        if enabled:
            gc.enable()


class Obedient(Protocol):
    """What carries out a rank's orders."""

    @property
    def versions(self) -> dict[str, dict[str, str]]:
        """Versions of libraries, by contestant."""

    def obey(self, order: Mapping[str, Any]) -> list[float]:
        """Carry out one order."""

    def close(self) -> None:
        """Leave."""


def serve(rank: int, world_size: int, member: Obedient, path: str) -> None:
    """Carry out orders that arrive on the socket at ``path``, until it is closed."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
        with channel.makefile("rwb") as lines:
            _say(lines, {"rank": rank, "world_size": world_size, "versions": member.versions})
            for line in lines:
                try:
                    answer = member.obey(json.loads(line))
                except Exception as error:
                    _say(lines, {"error": in_words(error)})
                    if isinstance(error, ArgumentError):  # on all ranks alike
                        return
                    raise
                _say(lines, {"answer": answer})
    member.close()


def _say(lines: Any, value: Any) -> None:
    lines.write(json.dumps(value).encode() + b"\n")
    lines.flush()


def become_rank(
    ours: Callable[[Backend, Options], Obedient], peer: Callable[[Options], Obedient]
) -> None:
    """Become the rank that the first argument of this process describes, in JSON.

    Args:
        ours: makes the member of a rank that our launcher started.
        peer: makes that of one that ``start.one_by_one`` did.
    """
    options = json.loads(sys.argv[1])
    if "rank" in options:
        serve(options["rank"], options["world_size"], peer(options), options["path"])
        return

    def main(backend: Backend) -> None:
        serve(backend.rank, backend.world_size, ours(backend, options), options["path"])

    fsdpcore.launch(main)
