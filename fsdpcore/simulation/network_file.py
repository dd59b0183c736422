"""The file of a network.

It is TOML. Rates are bytes per second or text ("100Mbit", "25GB/s", "inf"), times are
seconds or text ("5us")::

    [[level]]                # from the ranks upwards: eight ranks make a host
    name = "host"
    size = 8
    rate = "450GB/s"         # of each rank's link, each way
    latency = "2us"          # of a message from rank to rank within a host, one way, in all

    [[level]]
    name = "rack"            # the last level has all hosts that are left: size = 0
    size = 0
    rate = "50GB/s"          # of each host's link to its rack
    latency = "10us"
    burst = "1MB"            # optional, and so are spread and cores: see ``Level``

    [[link]]                 # what a single member's link differs in
    member = "host 3"
    rate = "100Mbit"

    [compute]                # optional, and so is each of its keys
    flops = 4e14
    message = "2us"
    wake = "20us"
    copy = "1GB/s"
    reduce = "1TB/s"
    eager = "64KiB"
    ahead = "256KiB"
    memory = "5GB/s"
    speed = 0.5
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdpcore.core.checks import as_finite, as_int, as_name
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.quantities import as_rate, as_seconds, as_size
from fsdpcore.core.toml import Table, parse_toml
from fsdpcore.simulation.network import DEFAULT, Level, Link, Network, as_part

Reader = Callable[..., Any]


def named(name: str) -> Network:
    """Return the network that is called "default", or read a file; raises as ``read`` does."""
    return DEFAULT if name == "default" else read(Path(name))


def read(path: Path) -> Network:
    """Read a file; this module's text says what is in it.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    source = f"network {path}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    file = parse_toml(text, source)
    file.check_keys(("level", "link", "compute"))
    levels = tuple(Level(**_values(each, _LEVEL, _NEEDED)) for each in file.tables("level"))
    links: dict[str, Link] = {}
    for each in file.tables("link"):
        values = _values(each, _LINK, ("member",))
        member = values.pop("member")
        if member in links:
            raise ConfigError(f"{each.where}: two for {member!r}")
        links[member] = Link(**values)
    compute = _values(Table(file.get("compute", {}), f"{source}: compute"), _COMPUTE, ())
    try:
        return Network(levels, links, **compute)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _values(table: Table, readers: Mapping[str, Reader], needed: Any) -> dict[str, Any]:
    """Read a table's values, each by the reader of its key."""
    table.check_keys(readers)
    for key in needed:
        if key not in table:
            raise ConfigError(f"{table.where}: {key} is missing")
    return {
        key: readers[key](value, f"{table.where}: {key}", error=ConfigError)
        for key, value in table.items()
    }


def _positive(value: object, what: str, *, error: type[ConfigError]) -> float:
    number = as_finite(value, what, error=error)
    if not 1e-30 < number < 1e30:
        raise error(f"{what} must be a positive number, got {value!r}")
    return number


def _size(value: object, what: str, *, error: type[ConfigError]) -> int:
    return as_int(value, what, minimum=0, error=error)


_LEVEL: dict[str, Reader] = {
    "name": as_name,
    "size": _size,
    "rate": as_rate,
    "latency": as_seconds,
    "burst": as_size,
    "spread": as_part,
    "cores": _size,
}
_NEEDED = "name", "size", "rate", "latency"
_LINK: dict[str, Reader] = {
    "member": as_name,
    "rate": as_rate,
    "latency": as_seconds,
    "burst": as_size,
}
_COMPUTE: dict[str, Reader] = {
    "flops": _positive,
    "message": as_seconds,
    "wake": as_seconds,
    "copy": as_rate,
    "reduce": as_rate,
    "eager": as_size,
    "ahead": as_size,
    "memory": as_rate,
    "speed": _positive,
}
