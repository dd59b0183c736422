"""The options of ``sim``: what a URL of that transport may say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fsdpcore.core.errors import ConfigError
from fsdpcore.core.text import nearest

from .faults import Faults

_CHOICES = {
    "shm": ("auto", "off"),
    "clock": ("wall", "virtual"),
    "played": ("all", "one"),
    "arrays": ("real", "abstract"),
    "compute": ("free", "measured"),
}


@dataclass(frozen=True)
class SimOptions:
    """Options of ``sim://`` URLs.

    Attributes:
        clock: "wall" for ranks that are threads, or "virtual": they are carried by one thread, on
            a clock that jumps to what happens next (``simulated.virtual``).
        network: of ``clock=virtual``, the file that describes what messages travel over
            (``simulation.network_file``); without one they take no time, or "default".
        played: of ``clock=virtual``, "all" ranks or "one", which stands for all: a collective takes
            as long as it would between all of them (``simulated.lone``).
        arrays: of ``clock=virtual``, "real", or "abstract" for arrays without values, which take no
            memory and no time (``simulation.abstract``).
        compute: of ``clock=virtual``, "free" if what Python computes takes no time, or "measured"
            if it takes as long as this thread's processor did.
        eager_bytes: sends up to this size are copied at once and never wait.
        hosts: the ranks are treated as if they ran on so many hosts, in equal blocks.
        seed, max_delay: random delays in every post of a message, to shake out races. In virtual
            time every seed but 0 is also another order of what could go on next.
        faults: a whole plan of faults (from Python only); replaces the two above.
        shm: "auto" lets collectives use the arrays of all ranks of a host where they are, unless
            faults are planned that only messages can have, or there is a network whose ranks share
            no memory; "off" has them send messages.
    """

    clock: str = "wall"
    network: str = ""
    played: str = "all"
    arrays: str = "real"
    compute: str = "free"
    eager_bytes: int = 4096
    hosts: int = 1
    seed: int = 0
    max_delay: float = 0.0
    faults: Faults | None = None
    shm: str = "auto"

    @classmethod
    def named(cls, given: Mapping[str, Any], what: str) -> SimOptions:
        """Make the options that are given by their names.

        Raises:
            ConfigError: there is no such option, or no such value; the former begins with ``what``.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"{what}: sim has no option {name!r}{nearest(name, known)}; it has "
                    f"{', '.join(sorted(known))}"
                )
        return cls(**given)

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                words = " or ".join(map(repr, known))
                raise ConfigError(f"sim: {name} must be {words}, got {getattr(self, name)!r}")
        if self.clock == "wall":
            for name in ("network", "played", "arrays", "compute"):
                if getattr(self, name) != getattr(SimOptions, name):
                    raise ConfigError(f"sim: {name}= is for ranks in virtual time: clock=virtual")
        elif self.seed < 0:
            raise ConfigError(f"sim: seed= of a schedule must not be negative, got {self.seed}")
        if self.network:
            for name in ("hosts", "eager_bytes"):
                if getattr(self, name) != getattr(SimOptions, name):
                    raise ConfigError(f"sim: {name}= is what the file of network= says")
        if not (self.max_delay >= 0 and math.isfinite(self.max_delay)) or self.eager_bytes < 0:
            raise ConfigError(
                "sim: max_delay must be a finite number of seconds >= 0, and eager_bytes >= 0; got "
                f"{self.max_delay:g} and {self.eager_bytes}"
            )
        if self.played == "one" and (self.max_delay or self.faults):
            raise ConfigError("sim: delays and faults need all ranks (played=all)")
        if self.played == "one" and self.compute == "measured":
            raise ConfigError(
                "sim: compute=measured needs all ranks (played=all): one that stands for all does "
                "some of what the others would"
            )
