"""The program of a rank that measures: it waits for orders, carries them out, and answers.

Orders and answers are lines of JSON on a local socket. Whoever waits for an order is asleep in a
blocking read, so that a competitor that is not being measured takes no processor time from one
that is.

==========  ===============================================  ======================
order       what is done                                     answer
==========  ===============================================  ======================
prepare     allocate the arrays of a case                    nothing
check       one untimed run on known values                  number of wrong elements
run         ``warmup`` untimed runs, a barrier, then         seconds of the
            ``iterations`` runs back to back                 ``iterations``
memory      look at the process                              its id, the peak of its resident
                                                             set since ``prepare``, and its
                                                             proportional set size, in bytes
release     forget the arrays                                nothing
==========  ===============================================  ======================
"""

from __future__ import annotations

import gc
import itertools
import json
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

import fsdpcore
from fsdpcore.bench.buffers import Buffers
from fsdpcore.bench.cases import Case
from fsdpcore.bench.contestants import OURS, Contestant, Ours, Step
from fsdpcore.bench.memory import Memory, reset_peak
from fsdpcore.bench.peer_gloo import Gloo
from fsdpcore.bench.peer_mpi import Mpi
from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import ArgumentError, in_words


class Member:
    """A rank of one or several contestants that share its process."""

    def __init__(self, contestants: Mapping[str, Contestant]) -> None:
        self._contestants = contestants
        self._ready: dict[str, tuple[Buffers, Step]] = {}

    @property
    def versions(self) -> dict[str, dict[str, str]]:
        """Versions of libraries, by contestant."""
        return {name: one.versions for name, one in self._contestants.items()}

    def obey(self, order: Mapping[str, Any]) -> list[float]:
        """Carry out one order of the table in the module docstring."""
        name = order["contestant"]
        contestant = self._contestants[name]
        if order["do"] == "prepare":
            reset_peak()
            buffers = Buffers.allocate(Case(**order["case"]), contestant)
            step = contestant.step(buffers.case, buffers.source, buffers.output)
            self._ready[name] = buffers, step
            return []
        if order["do"] == "release":
            self._ready.pop(name, None)
            return []
        if order["do"] == "memory":
            return Memory.now().as_answer()
        buffers, step = self._ready[name]
        if order["do"] == "check":
            return [float(_checked(contestant, buffers, step))]
        return [timed(contestant.barrier, step, order["warmup"], order["iterations"])]

    def close(self) -> None:
        """Leave all contestants' jobs."""
        self._ready.clear()
        for contestant in self._contestants.values():
            contestant.close()


def _checked(contestant: Contestant, buffers: Buffers, step: Step) -> int:
    buffers.pose()
    contestant.barrier()
    step()
    contestant.barrier()
    wrong = buffers.wrong()
    buffers.settle()
    return wrong


def timed(barrier: Step, step: Step, warmup: int, iterations: int) -> float:
    """Seconds of ``iterations`` steps back to back, after ``warmup`` more and a barrier."""
    for _ in itertools.repeat(None, warmup):
        step()
    enabled = gc.isenabled()
    gc.disable()  # as timeit does: what a collection costs depends on the program around it
    try:
        barrier()
        started = time.perf_counter()
        for _ in itertools.repeat(None, iterations):
            step()
        return time.perf_counter() - started
    finally:
        if enabled:
            gc.enable()


def make_member(backend: Backend, options: Mapping[str, Any]) -> Member:
    """A member for our contestant and, where the job runs on MPI, a bare loop beside it."""
    ours = Ours(backend, options["algorithm"], plain=options["plain"])
    contestants: dict[str, Contestant] = {OURS: ours}
    if "mpi" in options["contestants"]:
        contestants["mpi"] = Mpi()
    return Member(contestants)


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


def serve_ours(backend: Backend, options: Mapping[str, Any]) -> None:
    """The program of a rank of ours."""
    member = make_member(backend, options)
    serve(backend.rank, backend.world_size, member, options["path"])


def main() -> None:
    """Become the rank that the first argument describes, in JSON."""
    options = json.loads(sys.argv[1])
    if OURS in options["contestants"]:
        fsdpcore.launch(serve_ours, args=(options,))
        return
    if "mpi" in options["contestants"]:
        mpi = Mpi()
        serve(mpi.rank, mpi.world_size, Member({"mpi": mpi}), options["path"])
        return
    rank, size = options["rank"], options["world_size"]
    gloo = Gloo(rank, size, options["store"])
    serve(rank, size, Member({"gloo": gloo}), options["path"])


if __name__ == "__main__":
    main()
