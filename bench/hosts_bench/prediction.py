"""What virtual time says that a case takes, on the model of the hosts that it is measured on."""

from __future__ import annotations

import contextlib
import importlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from fsdp_bench.cases import Training
from fsdp_bench.training import Alone, OurTraining
from gpt_model import keep_freed_memory
from threadpoolctl import threadpool_limits

import fsdpcore as fc
from fsdpcore.comm.transport import transport_of
from fsdpcore.core.policy import Costs
from hosts_bench.cases import Case
from hosts_bench.member import cases_of

# Bytes per second of a reduction, and of memory that the ranks of a host share.
_COMPUTE = """
reduce = "14GB/s"
memory = "2GB/s"
"""
_SEGMENT = 1 << 20
# What numbers of the model are searched for between: seconds of the processor; how many times
# slower than plain TCP the links are; and how many times more while a host sends to several others.
_BETWEEN = {"byte": (1e-11, 1e-7), "message": (1e-6, 3e-3), "wake": (1e-6, 3e-3)}
_SLOWED = 0.9, 3.0
_SPREAD = 1.0, 2.0
_TURNS = 3
# Steps with which the median of what is computed is found, and those that are simulated where no
# outer step is longer.
_ALONE_STEPS, _STEPS = 3, 1
# Before all ranks have made what they need for a case.
_LEAD_SECONDS = 10.0


@dataclass(frozen=True)
class Model:
    """Hosts on a switch.

    Attributes:
        hosts, per_host: of the ranks.
        rate: bytes per second of a host's link; ``slowest`` is that of the last one.
        latency: seconds from one host to another.
        burst: bytes that a link lets pass at once; ``slowest_burst`` is that of the last one.
        spread: part of the rate that a link carries while its host sends to several others.
        cores: of the machine, which its hosts share; 0 if each rank has as many as it needs.
        message: seconds of a rank's processor for a message.
        wake: more for one that comes when it has no other to see to.
        byte: seconds of a core for each byte of messages that it moves.
        speed: how fast a rank computes, against one that has this machine to itself.
        costs: by which the ranks choose algorithms; None for those of the links.
    """

    hosts: int
    per_host: int
    rate: float
    latency: float
    slowest: float = 0.0
    burst: int = 0
    slowest_burst: int = 0
    spread: float = 1.0
    cores: int = 0
    message: float = 0.0
    wake: float = 0.0
    byte: float = 0.0
    speed: float = 1.0
    costs: Costs | None = None

    @contextlib.contextmanager
    def options(self) -> Iterator[dict[str, Any]]:
        """The arguments of ``launch`` for ranks on them, while the file is there."""
        each = self.cores // self.hosts  # every host has cores of its own, or all have the same
        text = (
            f"[[level]]\nname = 'host'\nsize = {self.per_host}\nrate = '4GB/s'\n"
            f"latency = '10us'\ncores = {each}\n"
            f"[[level]]\nname = 'switch'\nsize = {self.hosts}\nrate = {self.rate}\n"
            f"latency = {self.latency}\nburst = {self.burst}\nspread = {self.spread}\n"
            f"cores = {0 if each else self.cores}\n"
        )
        if self.slowest:
            text += f"[[link]]\nmember = 'host {self.hosts - 1}'\n"
            text += f"rate = {self.slowest}\nburst = {self.slowest_burst}\n"
        ahead = self._ahead()
        text += f"[compute]\nmessage = {self.message}\nwake = {self.wake}\n"
        if self.cores and self.byte:
            text += f"copy = {1 / self.byte}\n"
        text += f"speed = {self.speed}\n"
        text += f"eager = {ahead}\nahead = {ahead}"  # what is no longer than that goes unasked
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "network.toml")
            path.write_text(text + _COMPUTE, encoding="utf-8")
            yield {
                "world_size": self.hosts * self.per_host,
                "transport": "sim",
                "clock": "virtual",
                "network": str(path),
            }

    def _ahead(self) -> int:
        """Bytes of a large message that ``zmq`` sends before it is asked for them."""
        speed: Any = importlib.import_module("fsdpcore.transports.zmq.link_speed")
        trip, rate = 2 * self.latency, self.slowest or self.rate
        if self.costs is not None:  # as the ranks have found it
            trip, rate = 2 * self.costs.latency, 1 / self.costs.beta
        return int(speed.LinkSpeed(trip, rate).flow(_SEGMENT).ahead)

    def seconds(self, case: Case) -> float:
        """Until the last rank is done with a case that all begin at one time."""

        def main(backend: fc.Backend) -> float:
            self._choose_by_costs(backend)
            job = cases_of(backend)(case.order())
            job.check()
            job.once(backend.clock.now())
            return job.once(_LEAD_SECONDS)

        with self.options() as options:
            return float(max(fc.launch(main, **options)))

    def _choose_by_costs(self, backend: fc.Backend) -> None:
        root = transport_of(backend)
        root.policy = replace(root.policy, link=self.costs or root.policy.link)

    def with_processor(self, seconds: Mapping[str, tuple[Case, float]], costs: Costs) -> Model:
        """The model whose processor takes as long as it did.

        Args:
            seconds: for ``byte``, ``message`` and ``wake``, a case that tells it, and how long it
                took on links without a limit.
            costs: by which the ranks chose algorithms there.
        """
        free = replace(self, rate=math.inf, slowest=0.0, burst=0, costs=costs)
        for _ in range(_TURNS):  # each of them has a little to do with the other cases
            for part, (case, took) in seconds.items():

                def with_part(each: float, model: Model = free, part: str = part) -> Model:
                    return replace(model, **{part: each})  # type: ignore[arg-type]

                free = _search(with_part, case, took, _BETWEEN[part])
        return replace(self, byte=free.byte, message=free.message, wake=free.wake)

    def with_links(self, seconds: Mapping[Case, float]) -> Model:
        """The model whose links are as fast as they were, where large cases took so long.

        The last case tells the rate. If there is one before it, in which all hosts send to several
        others, that tells how much of it is left then.
        """
        found, plain = self, self
        *others, last = seconds.items()
        for _ in range(_TURNS):

            def slowed(factor: float, spread: float = found.spread) -> Model:
                slowest = plain.slowest / factor
                return replace(plain, rate=plain.rate / factor, slowest=slowest, spread=spread)

            found = _search(slowed, *last, _SLOWED)
            if not others or self.hosts < 3:
                break

            def spread_out(factor: float, model: Model = found) -> Model:
                return replace(model, spread=1 / factor)

            found = _search(spread_out, *others[0], _SPREAD)
        return found

    def step_seconds(self, case: Training) -> float:
        """Of a training step, where computing takes what it takes here, by ``speed``."""

        def main(backend: fc.Backend) -> float:
            self._choose_by_costs(backend)
            job = OurTraining(case, backend)
            job.losses(1)
            job.barrier()
            began, steps = backend.clock.now(), case.every or _STEPS
            job.losses(steps)
            job.barrier()
            return (backend.clock.now() - began) / steps

        with threadpool_limits(1, user_api="blas"), self.options() as options:
            keep_freed_memory()
            return float(max(fc.launch(main, compute="measured", **options)))


def _search(
    make: Callable[[float], Model], case: Case, took: float, between: tuple[float, float]
) -> Model:
    """The model by whose number a case takes so long; the larger, the longer."""
    low, high = between
    for _ in range(12):
        middle = math.sqrt(low * high)
        if make(middle).seconds(case) < took:
            low = middle
        else:
            high = middle
    return make(low)


def computing_seconds(case: Training, ranks: int) -> float:
    """What a rank computes in a step with this machine to itself, of the processor's time."""
    with threadpool_limits(1, user_api="blas"):
        keep_freed_memory()
        alone = Alone(case, 0, ranks)
        alone.losses(1)
        taken = []
        for _ in range(_ALONE_STEPS):
            began = time.thread_time()
            alone.step()
            taken.append(time.thread_time() - began)
    return median(taken)
