"""Tables of costs: the one that ships, and those that ``fsdpcore tune`` writes.

TOML, with one table for each transport. Everything in it is optional::

    format = 1

    [zmq]
    alpha = 6.0e-05                       # seconds per message
    beta = 5.0e-10                        # seconds per byte moved
    gamma = 1.0e-10                       # seconds per byte reduced
    latency = 0.01                        # seconds per trip, beyond alpha; 0 by default

    [zmq.own.shared]                      # the same of an algorithm of the transport's own
    alpha = 2.0e-06
    beta = 1.0e-10
    gamma = 1.0e-10

    [[zmq.measured]]                      # in a group of so many ranks on so many hosts
    ranks = 4
    hosts = 1
    all_reduce = "shared:0-max"
    general.all_reduce = "doubling:0-16384;direct:16385-max"

The ranges have the grammar of ``overrides``. Where the fastest algorithm is the transport's own,
``general`` has the fastest that every transport has, for what the former does not support.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from fsdpcore.collectives.selection.overrides import check_collective, parse
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.policy import AlgorithmRanges, Costs, MeasuredAlgorithms, Tuning
from fsdpcore.core.toml import Table, parse_toml

FORMAT = 1
_SHIPPED = "the shipped costs.toml"

_NUMBERS = ("alpha", "beta", "gamma", "latency")


@functools.lru_cache(maxsize=1)
def shipped() -> Mapping[str, Tuning]:
    """The table that comes with the package, by transport."""
    file = files("fsdpcore.collectives") / "costs.toml"
    return parse_table(file.read_text(encoding="utf-8"), _SHIPPED)


def read_table(path: Path) -> dict[str, Tuning]:
    """Read a user's table.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tuning table {path} cannot be read: {error}") from error
    return parse_table(text, f"tuning table {path}")


def parse_table(text: str, source: str) -> dict[str, Tuning]:
    """Read a table; raises as ``read_table`` does."""
    content = parse_toml(text, source)
    version = content.pop("format", None)
    if version != FORMAT:
        raise ConfigError(
            f"{source}: format = {version!r} is not {FORMAT}, which this version reads; write it "
            "anew with 'fsdpcore tune'"
        )
    return {name: _tuning(Table(value, f"{source}: [{name}]")) for name, value in content.items()}


def _tuning(table: Table) -> Tuning:
    table.check_keys((*_NUMBERS, "own", "measured"))
    own = Table(table.get("own", {}), f"{table.where} own")
    measured = tuple(map(_measured, table.tables("measured")))
    groups = [(entry.ranks, entry.hosts) for entry in measured]
    for ranks, hosts in groups:
        if groups.count((ranks, hosts)) > 1:
            raise ConfigError(f"{table.where} measured: two for {ranks} ranks on {hosts} hosts")
    return Tuning(
        _costs(table) if any(name in table for name in _NUMBERS) else None,
        {name: _own(Table(costs, f"{own.where} {name}")) for name, costs in own.items()},
        measured,
    )


def _own(table: Table) -> Costs:
    table.check_keys(_NUMBERS)
    return _costs(table)


def _costs(table: Table) -> Costs:
    numbers = []
    for name in _NUMBERS:
        number: Any = table.get(name, 0.0 if name == "latency" else None)
        if type(number) not in (int, float) or not 0 <= number < math.inf:
            raise ConfigError(f"{table.where}: {name} must be seconds, 0 or more, got {number!r}")
        numbers.append(float(number))
    return Costs(*numbers)


def _measured(table: Table) -> MeasuredAlgorithms:
    sizes = {"ranks": table.pop("ranks", None), "hosts": table.pop("hosts", 1)}
    for name, number in sizes.items():
        if type(number) is not int or number < 1:
            raise ConfigError(f"{table.where}: {name} must be 1 or more, got {number!r}")
    where = f"{table.where} for {sizes['ranks']} ranks"
    general = Table(table.pop("general", {}), f"{where} general")
    best, rest = _ranges(Table(table, where)), _ranges(general)
    return MeasuredAlgorithms(sizes["ranks"], sizes["hosts"], best, rest)


def _ranges(table: Table) -> dict[str, AlgorithmRanges]:
    found = {}
    # Names in our own table are right, and to look transports up takes time in every program.
    ours = table.where.startswith(_SHIPPED)
    for name, text in table.items():
        check_collective(name, table.where)
        found[name] = parse(name, text, table.where, canonical=True, any_name=ours)
    return found


def write_table(path: Path, table: Mapping[str, Tuning]) -> None:
    """Write a table that ``read_table`` reads; what was there before is replaced at once.

    Raises:
        ConfigError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            temporary.write_text(format_table(table), encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"tuning table {path} cannot be written: {error}") from error


def format_table(table: Mapping[str, Tuning]) -> str:
    """Return a table as TOML."""
    lines = [
        "# Written by 'fsdpcore tune'. To use it, set FSDPCORE_TUNING to this file's name,",
        '# or put tuning = "NAME" into fsdpcore.toml. All ranks need the same one.',
        f"format = {FORMAT}",
    ]
    for scheme, tuning in table.items():
        name = f'"{scheme}"'
        lines += ["", f"[{name}]"]
        if tuning.costs is not None:
            lines += _cost_lines(tuning.costs)
        for algorithm, costs in tuning.own.items():
            lines += ["", f"[{name}.own.{algorithm}]", *_cost_lines(costs)]
        for entry in sorted(tuning.measured, key=lambda e: (e.ranks, e.hosts)):
            lines += [
                "",
                f"[[{name}.measured]]",
                f"ranks = {entry.ranks}",
                f"hosts = {entry.hosts}",
            ]
            lines += [f'{key} = "{ranges}"' for key, ranges in entry.best.items()]
            lines += [f'general.{key} = "{ranges}"' for key, ranges in entry.general.items()]
    return "\n".join([*lines, ""])


def _cost_lines(costs: Costs) -> list[str]:
    units = {"alpha": "message", "beta": "byte moved", "gamma": "byte reduced"}
    if costs.latency:
        units["latency"] = "trip, beyond alpha"
    return [
        f"{name} = {getattr(costs, name):.3e}  # seconds per {unit}" for name, unit in units.items()
    ]
