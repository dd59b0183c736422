"""A program of ranks played in virtual time, where a seed says what happens in which order."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fsdpcore.transports.simulated.backend import SimBackend
from fsdpcore.transports.simulated.faults import Faults, InjectedCrash

import fsdpcore as fc
from fsdpcore.core.errors import CommunicationError
from fsdpcore.launch.config import resolve
from fsdpcore.launch.threads import run_threads

_POSTS = 60  # within which a fault happens, if there are so many


@dataclass(frozen=True)
class Schedule:
    """Which order, and which faults; all of it follows from the seed.

    Attributes:
        seed: of the order.
        faults: what happens to messages and ranks.
        eager_bytes: above which messages are asked for.
        timeout: seconds of virtual time that an operation may take.
        shm: whether ranks meet in memory, where the faults let them, or all send messages.
    """

    seed: int
    faults: Faults
    eager_bytes: int
    timeout: float = 60.0
    shm: str = "auto"

    @classmethod
    def of(cls, seed: int, world_size: int) -> Schedule:
        """Draw a schedule: in three of four a rank dies, a link breaks, or time is short."""
        chance = random.Random(f"{seed}/{world_size}")
        faults = Faults(seed, chance.choice([0.0, 0.0, 1e-4, 1.0]))
        victim, other = chance.randrange(world_size), chance.randrange(world_size)
        at = int(_POSTS ** chance.random())  # early ones more often
        kind = chance.randrange(4)
        if kind == 0:
            faults = replace(faults, crash={victim: at})
        elif kind == 1 and victim != other:
            faults = replace(faults, drop={(victim, other): range(at, sys.maxsize)})
        timeout = 10 ** chance.uniform(-4, -2) if kind == 2 else 60.0
        eager_bytes, shm = chance.choice([0, 100, 4096]), chance.choice(["auto", "off"])
        return cls(seed, faults, eager_bytes, timeout, shm)

    @property
    def fault(self) -> str:
        """What may keep the program from ending well; empty where nothing may."""
        if self.faults.crash:
            return "a rank dies"
        if self.faults.drop:
            return "a link breaks"
        return "time is short" if self.timeout < 60 else ""


def seeds(count: int) -> range:
    """The seeds of a campaign: as many as ``TEST_SCHEDULES`` says, or ``count``.

    ``TEST_SEED`` says which: 1 for those behind the first so many, and so on.
    """
    count = int(os.environ.get("TEST_SCHEDULES", count))
    first = int(os.environ.get("TEST_SEED", "0")) * count
    return range(first, first + count)


def elsewhere(module: str, expression: str) -> str:
    """What an expression of a test module is in another process, with other hashes."""
    code = f"import {module} as module\nprint(eval({expression!r}, vars(module)))"
    environ = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@dataclass
class Played:
    """How it went.

    Attributes:
        digest, turns: of all that happened, in its order.
        seconds: of virtual time.
        results: of the ranks that ended well.
        errors: of the others.
    """

    digest: int = 0
    turns: int = 0
    seconds: float = 0.0
    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)

    @property
    def wrong(self) -> list[BaseException]:
        """What no fault explains: results that are not those of the program, and bugs."""
        return [error for error in self.errors.values() if not _explained(error)]


def play(
    body: Callable[..., Any],
    world_size: int,
    schedule: Schedule,
    *args: Any,
    cls: type[SimBackend] | None = None,
    **options: Any,
) -> Played:
    """Run ``body(backend, *args)`` on every rank; returns when all of them have ended."""
    played = Played()

    def main(backend: fc.Backend) -> None:
        try:
            played.results[backend.rank] = body(backend, *args)
        except BaseException as error:
            played.errors[backend.rank] = error
            raise
        finally:
            clock: Any = backend.clock
            played.digest, played.turns = clock.digest, clock.turns
            played.seconds = clock.now()

    settings = {"clock": "virtual", "seed": schedule.seed, "faults": schedule.faults, **options}
    settings.setdefault("eager_bytes", schedule.eager_bytes)
    settings.setdefault("shm", schedule.shm)
    settings["timeout"] = schedule.timeout
    config = resolve({"transport": "sim", **settings}, {})
    if cls is not None:
        config = replace(config, transport_class=cls)
    with contextlib.suppress(fc.RankFailedError):
        run_threads(main, (), world_size, config)
    return played


def _explained(error: BaseException) -> bool:
    """Whether an error, or the one that it is about, tells of a failure of the job."""
    while error is not None:
        if isinstance(error, (CommunicationError, InjectedCrash)):
            return not isinstance(error, fc.MismatchError)
        error = error.__cause__  # type: ignore[assignment]
    return False
