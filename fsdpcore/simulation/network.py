"""The model of a network: a tree of switches over the ranks, and what a rank itself takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fsdpcore.core.checks import as_finite, as_int, as_name
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.quantities import as_rate, as_seconds
from fsdpcore.core.text import nearest

HOST = "host"
_RANK = "rank"


@dataclass(frozen=True)
class Level:
    """One level of the tree, and the links that lead up to it.

    Attributes:
        name: of what stands at this level: "host", "rack". Its members are those of the level
            below, or ranks.
        size: members that make one of these; 0 at the last level, for all that are left.
        rate: bytes per second of each member's link, each way; infinity for no limit.
        latency: seconds that a message between two members takes, one way and in all: what it
            takes below is part of it.
        burst: bytes that a member's link lets pass faster than its rate, each way, after it had
            less to carry.
        spread: part of the rate that a member's link carries up while it goes to several others.
            Streams of TCP share it unevenly, so that now and then one of those has nothing to take.
        cores: of a processor that the ranks under each of these share; 0 if each rank has its own.
    """

    name: str
    size: int
    rate: float
    latency: float
    burst: int = 0
    spread: float = 1.0
    cores: int = 0

    def __post_init__(self) -> None:
        what = f"level {as_name(self.name, 'name of a level', error=ConfigError)!r}"
        size = as_int(self.size, f"{what}: size", minimum=0, error=ConfigError)
        rate = as_rate(self.rate, f"{what}: rate", error=ConfigError)
        latency = as_seconds(self.latency, f"{what}: latency", error=ConfigError)
        for name, value in {"size": size, "rate": rate, "latency": latency}.items():
            object.__setattr__(self, name, value)
        as_int(self.burst, f"{what}: burst", minimum=0, error=ConfigError)
        as_part(self.spread, f"{what}: spread", error=ConfigError)
        as_int(self.cores, f"{what}: cores", minimum=0, error=ConfigError)


@dataclass(frozen=True)
class Link:
    """What one member's link differs in from those of its level; None where it does not."""

    rate: float | None = None
    latency: float | None = None
    burst: int | None = None


@dataclass(frozen=True)
class _Way:
    """The links between a rank and each level above it, and the longest latency of them."""

    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]
    latency: tuple[float, ...]


@dataclass(frozen=True)
class Network:
    """A network as a tree, and the speed of the ranks at its leaves.

    Ranks fill it in their order: with eight to a host, ranks 0 to 7 are on host 0. A message goes
    up from the sender to the lowest level that both ranks are under, and down to the receiver.
    Every link has two directions, which do not slow each other.

    Attributes:
        levels: from the ranks upwards.
        links: exceptions, by what is at the lower end of the link: "host 3", "rank 12".
        flops: floating-point operations per second of a rank.
        message: seconds of a rank's processor for each message that it sends, before it leaves, and
            for each that it receives, when it has come.
        wake: seconds more for one that comes while a rank's processor has no message to see to.
        copy: bytes per second that a core which ranks share moves of messages, where they are sent
            and where they are received; infinity for no time.
        reduce: bytes per second that a rank reduces; infinity for no time.
        eager: bytes up to which a message is sent unasked. Of a larger one the sender asks first,
            and waits for the answer.
        ahead: bytes of a larger one that it sends meanwhile.
        memory: bytes per second that a rank reads or writes of what the ranks of its host share; 0
            if they share no memory, and send messages.
        speed: with ``compute=measured``, how fast a rank computes against this machine: at 0.5 it
            takes twice as long.

    Raises:
        ConfigError: there is no such network.
    """

    levels: tuple[Level, ...]
    links: Mapping[str, Link] = field(default_factory=dict)
    flops: float = 4e14
    message: float = 2e-6
    wake: float = 0.0
    copy: float = math.inf
    reduce: float = 1e12
    eager: int = 64 * 1024
    ahead: int = 0
    memory: float = 0.0
    speed: float = 1.0
    _ways: dict[int, _Way] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if not names:
            raise ConfigError("a network needs at least one level")
        for name in names:
            if [_RANK, *names].count(name) > 1:
                raise ConfigError(f"a level is called {name!r}, as another or the ranks are")
        for level in self.levels[:-1]:
            if level.size == 0:
                raise ConfigError(f"level {level.name!r}: only the last level has size = 0")
        if self.copy < math.inf and not self.cores:
            raise ConfigError(
                "copy is of cores that ranks share, and there are none: give a level its cores"
            )
        _ = self._exceptions

    def hosts(self, world_size: int) -> list[int]:
        """Return the number of each rank's host.

        Ranks under one member of the level called "host" share it. Where no level has that name,
        each rank has a host of its own.
        """
        for level, span in zip(self.levels, self.spans, strict=True):
            if level.name == HOST:
                return [0 if span is None else rank // span for rank in range(world_size)]
        return list(range(world_size))

    def check_room(self, world_size: int) -> None:
        """Raise ConfigError if there are more ranks than places."""
        for level, member in self._exceptions:
            if member >= self.members(level, world_size):
                name = f"{self._below(level)} {member}"
                raise ConfigError(f"link of {name!r}: {world_size} ranks have no {name}")
        places = self.spans[-1]
        if places is not None and world_size > places:
            raise ConfigError(
                f"the network has places for {places} ranks, not for {world_size}; size = 0 at "
                "its last level makes room for any number"
            )

    @cached_property
    def spans(self) -> tuple[int | None, ...]:
        """How many ranks are under one member of each level; None at the last one for all."""
        found: list[int | None] = []
        ranks = 1
        for level in self.levels:
            ranks *= level.size
            found.append(ranks or None)
        return tuple(found)

    def members(self, level: int, world_size: int) -> int:
        """Return how many links lead up to a level: ranks, or members of the level below."""
        span = self.spans[level - 1] if level else 1
        return -(-world_size // (span or world_size))

    def link(self, level: int, member: int) -> int:
        """Return the number of the link from a member up to a level; the next is the one down."""
        return (member * len(self.levels) + level) * 2

    def links_of(self, world_size: int) -> Iterator[int]:
        """Give the numbers of all directed links that so many ranks have."""
        for level in range(len(self.levels)):
            for member in range(self.members(level, world_size)):
                up = self.link(level, member)
                yield from (up, up + 1)

    def route(self, src: int, dst: int) -> tuple[tuple[int, ...], float]:
        """Return the directed links that a message crosses, and the seconds of its latency.

        That is the longest that one of these links has. A rank reaches itself over none.
        """
        if src == dst:
            return (), 0.0
        level = self._meeting(src, dst)
        up, down = self._way(src), self._way(dst)
        return up.up[level] + down.down[level], max(up.latency[level], down.latency[level])

    def rate(self, link: int) -> float:
        """Return the bytes per second of a link."""
        member, level = divmod(link // 2, len(self.levels))
        own = self._exceptions.get((level, member), _USUAL).rate
        return self.levels[level].rate if own is None else own

    def burst(self, link: int) -> int:
        """Return the bytes that a link lets pass faster than its rate."""
        member, level = divmod(link // 2, len(self.levels))
        own = self._exceptions.get((level, member), _USUAL).burst
        return self.levels[level].burst if own is None else own

    def spread(self, link: int) -> float:
        """Return the part of its rate that a link carries while it goes to several others."""
        level = link // 2 % len(self.levels)
        return 1.0 if link % 2 else self.levels[level].spread

    def without_bursts(self) -> Network:
        """Return the same network, whose links let nothing pass faster than their rate."""
        levels = tuple(replace(level, burst=0) for level in self.levels)
        links = {member: replace(link, burst=0) for member, link in self.links.items()}
        return replace(self, levels=levels, links=links)

    def slowest(self, level: int) -> tuple[float, float]:
        """Return the lowest rate and the longest latency of links that lead up to a level."""
        usual = self.levels[level]
        own = [link for (at, _), link in self._exceptions.items() if at == level]
        rates = [usual.rate, *(link.rate for link in own if link.rate is not None)]
        latencies = [usual.latency, *(link.latency for link in own if link.latency is not None)]
        return min(rates), max(latencies)

    @cached_property
    def cores(self) -> int:
        """How many cores ranks share, with those under the same member of a level; or 0."""
        return 0 if self._sharing is None else self.levels[self._sharing].cores

    @cached_property
    def _sharing(self) -> int | None:
        """The level under whose members ranks share cores."""
        levels = [at for at, level in enumerate(self.levels) if level.cores]
        if levels[1:]:
            first, second = (self.levels[at].name for at in levels[:2])
            raise ConfigError(f"cores of {first!r} and of {second!r}: a rank has those of one")
        return levels[0] if levels else None

    def processor(self, rank: int) -> int:
        """Return the number of the member whose cores a rank shares."""
        assert self._sharing is not None, "ranks have cores of their own"
        span = self.spans[self._sharing]
        return rank // span if span else 0

    def link_name(self, link: int) -> str:
        """Return a directed link in words: ``host 3 -> rack``, ``rack -> host 3``."""
        member, level = divmod(link // 2, len(self.levels))
        ends = f"{self._below(level)} {member}", self.levels[level].name
        return " -> ".join(ends[::-1] if link % 2 else ends)

    def _below(self, level: int) -> str:
        return self.levels[level - 1].name if level else _RANK

    @cached_property
    def _exceptions(self) -> dict[tuple[int, int], Link]:
        """The links that differ, by level and member."""
        known = [self._below(level) for level in range(len(self.levels))]
        found = {}
        for name, link in self.links.items():
            match = re.fullmatch(r"(.+) (\d{1,9})", name)
            if match is None or match[1] not in known:
                hint = nearest(name.partition(" ")[0], known)
                names = ", ".join(known)
                raise ConfigError(
                    f"link of {name!r}: a member is one of {names}, and its number{hint}"
                )
            key = known.index(match[1]), int(match[2])
            if key in found:
                raise ConfigError(f"two links of {match[1]} {key[1]}")
            found[key] = link
        return found

    def _meeting(self, src: int, dst: int) -> int:
        for level, span in enumerate(self.spans):
            if span is None or src // span == dst // span:
                return level
        raise ConfigError(f"no level of the network is above both rank {src} and rank {dst}")

    def _way(self, rank: int) -> _Way:
        way = self._ways.get(rank)
        if way is None:
            way = self._ways[rank] = self._find_way(rank)
        return way

    def _find_way(self, rank: int) -> _Way:
        up: list[int] = []
        latencies: list[float] = []
        for level, usual in enumerate(self.levels):
            member = rank // ((self.spans[level - 1] or 1) if level else 1)
            up.append(self.link(level, member))
            own = self._exceptions.get((level, member), _USUAL).latency
            latencies.append(usual.latency if own is None else own)
        ends = range(1, len(up) + 1)
        return _Way(
            tuple(tuple(up[:end]) for end in ends),
            tuple(tuple(link + 1 for link in reversed(up[:end])) for end in ends),
            tuple(max(latencies[:end]) for end in ends),
        )


_USUAL = Link()


def as_part(value: object, what: str, *, error: type[ConfigError]) -> float:
    """Return a part of a rate as a float; raise ``error`` if it is none."""
    number = as_finite(value, what, error=error)
    if not 1e-3 <= number <= 1:
        raise error(f"{what} must be a number from 0.001 to 1, got {value!r}")
    return number


# What is used without a file: hosts of eight H100 GPUs, each host with eight ports of 400 Gbit/s,
# on switches that are never full. From NVIDIA's data sheets of H100 SXM and DGX H100: NVLink moves
# 450 GB/s each way per GPU, the ports of a host 400 GB/s; a dense bfloat16 product does 989 TFLOPS
# at best, of which training gets some 40 %; memory moves 3.35 TB/s, and to reduce a byte, two are
# read and one is written. Latencies and the time of a message are guesses of the right order.
DEFAULT = Network(
    levels=(Level("host", 8, 450e9, 2e-6), Level("cluster", 0, 400e9, 5e-6)),
    flops=4e14,
    message=2e-6,
    reduce=1.1e12,
    eager=64 * 1024,
)
