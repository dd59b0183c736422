"""From a URL, environment variables and a TOML file to one frozen ``Config``.

Precedence: arguments (with the options in the URL of a ``transport`` argument), then
``FSDPCORE_*`` variables, then ``fsdpcore.toml`` or ``[tool.fsdpcore]`` of ``pyproject.toml`` in
the working directory, then defaults. The file may hold a table named like a transport with that
transport's options.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from fsdpcore import registry
from fsdpcore.environment import LAUNCH_VARIABLES
from fsdpcore.errors import ConfigError
from fsdpcore.transport import Transport

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "FSDPCORE_"
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Settings:
    """What applies to every transport.

    Attributes:
        transport: URL, or bare scheme; empty for the default of whoever asks.
        world_size: number of ranks; 0 where nothing says.
        timeout: seconds that an operation may take.
        rendezvous_timeout: seconds until all ranks must have joined.
        blas_threads: threads of each rank's BLAS; 0 shares the cores of the host evenly.
    """

    transport: str = ""
    world_size: int = 0
    timeout: float = 60.0
    rendezvous_timeout: float = 60.0
    blas_threads: int = 0

    def __post_init__(self) -> None:
        for name in ("timeout", "rendezvous_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("world_size", "blas_threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True)
class Config(Settings):
    """Settings, and what the transport's URL says, resolved and checked.

    Attributes:
        transport_class: the transport.
        host, port: of the URL; empty and 0 where it names none.
        transport_options: instance of ``transport_class.options``.
    """

    transport_class: type[Transport] = Transport  # type: ignore[type-abstract]
    host: str = ""
    port: int = 0
    transport_options: Any = None


def resolve(
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    directory: Path | None = None,
    *,
    default_transport: str = "sim",
) -> Config:
    """Combine all sources into one ``Config``.

    Args:
        arguments: settings and transport options by name; None counts as not given.
        environ: environment variables.
        directory: where to look for a TOML file; None for none.
        default_transport: taken where nothing names one.

    Raises:
        ConfigError: an unknown key or a bad value; the message names the source and the key.
    """
    general = {field.name for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in arguments.items() if value is not None}
    file, tables = _read_file(directory, general)
    merged: dict[str, Any] = {
        "transport": default_transport,
        **file,
        **_read_environment(environ, general),
        **{name: value for name, value in given.items() if name in general},
    }
    settings = _build(Settings, merged, "option")
    url = parse_url(settings.transport)
    transport = registry.load(url.scheme)
    _check_tables(tables)
    names = {field.name for field in dataclasses.fields(transport.options)}
    options = {**tables.get(url.scheme, {}), **dict(parse_qsl(url.query, keep_blank_values=True))}
    options.update({name: value for name, value in given.items() if name not in general})
    for name in options:
        if name not in names:
            hint = registry.nearest(name, general | names)
            raise ConfigError(f"unknown option {name!r} for transport {url.scheme!r}{hint}")
    if url.netloc and not transport.takes_address:
        raise ConfigError(f"transport {url.scheme!r} takes no address, got {settings.transport!r}")
    return Config(
        **dataclasses.asdict(settings),
        transport_class=transport,
        host=url.hostname or "",
        port=url.port or 0,
        transport_options=_build(transport.options, options, f"option of {url.scheme!r}:"),
    )


def parse_url(text: str) -> SplitResult:
    """Split a transport URL such as ``zmq://10.0.0.1:29500?segment_bytes=2MiB``.

    The bare scheme works: ``zmq``.

    Raises:
        ConfigError: it is no such URL.
    """
    try:
        url = urlsplit(text if "://" in text else f"{text}://")
        port, bad = url.port, url.path not in ("", "/") or url.fragment or url.username
    except ValueError as error:
        raise ConfigError(f"bad transport URL {text!r}: {error}") from None
    if not url.scheme or bad:
        raise ConfigError(
            f"bad transport URL {text!r}: expected SCHEME, or SCHEME://HOST:PORT?OPTION=VALUE"
        )
    if port is not None and not url.hostname:
        raise ConfigError(f"bad transport URL {text!r}: a port needs a host before it")
    return url


def _read_environment(environ: Mapping[str, str], general: set[str]) -> dict[str, str]:
    found = {}
    known = {PREFIX + name.upper() for name in general} | set(LAUNCH_VARIABLES)
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            hint = registry.nearest(variable, [name.lower() for name in known]).upper()
            raise ConfigError(f"unknown environment variable {variable}{hint}")
        if variable not in LAUNCH_VARIABLES:
            found[variable[len(PREFIX) :].lower()] = value
    return found


def _read_file(
    directory: Path | None, general: set[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the settings of the TOML file, and its tables of transport options."""
    content: dict[str, Any] = {}
    source = ""
    for name, path in (("fsdpcore.toml", ()), ("pyproject.toml", ("tool", "fsdpcore"))):
        file = directory / name if directory is not None else None
        if file is None or not file.is_file():
            continue
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: not valid TOML: {error}") from error
        for key in path:
            content = content.get(key, {})
        source = str(file)
        if content:
            break
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    plain = {key: value for key, value in content.items() if key not in tables}
    for key in plain:
        if key not in general:
            raise ConfigError(f"{source}: unknown key {key!r}{registry.nearest(key, general)}")
    return plain, tables


def _check_tables(tables: Mapping[str, Any]) -> None:
    known = registry.schemes()
    for name in tables:
        if name not in known:
            hint = registry.nearest(name, known)
            raise ConfigError(f"configuration file: [{name}] is no transport{hint}")


def _build(cls: type[Any], values: Mapping[str, Any], what: str) -> Any:
    """Make a dataclass from values that may be text, converted by the fields' types."""
    types = typing.get_type_hints(cls)
    converted = {}
    for name, value in values.items():
        try:
            converted[name] = _convert(value, types[name])
        except ValueError as error:
            raise ConfigError(f"{what} {name}={value!r}: {error}") from None
    return cls(**converted)


def _convert(value: Any, kind: Any) -> Any:
    if kind is bool:
        known = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
        if str(value).lower() not in known:
            raise ValueError("expected true or false")
        return known[str(value).lower()]
    if kind is int:
        return _integer(value)
    if kind is float:
        return float(value)
    if kind is str and not isinstance(value, str):
        raise ValueError("expected text")
    if isinstance(value, str) and kind is not str:
        raise ValueError("can be given from Python only")
    return value


def _integer(value: Any) -> int:
    """Read an integer; text may carry a unit: 64KiB, 2MiB."""
    if isinstance(value, str):
        for unit, factor in _UNITS.items():
            if value.endswith(unit):
                return int(value[: -len(unit)]) * factor
        return int(value)
    if isinstance(value, bool) or int(value) != value:
        raise ValueError("expected an integer")
    return int(value)
