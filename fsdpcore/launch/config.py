"""From a URL, environment variables and a TOML file to one frozen ``Config``.

Precedence: arguments (with the options in the URL of a ``transport`` argument), then
``FSDPCORE_*`` variables, then ``fsdpcore.toml`` or ``[tool.fsdpcore]`` of ``pyproject.toml`` in
the working directory, then defaults. The file may hold a table named like a transport with that
transport's options. A variable that is set to nothing counts as not set.

Which algorithm carries a collective out can be overridden in the same places, for each collective
by itself: ``algorithms={"all_reduce": "doubling:0-8KiB;direct:8193-max"}``, the variable
``FSDPCORE_ALL_REDUCE``, the key ``all_reduce`` of a table ``[algorithms]``; the grammar is that of
``collectives.selection.overrides``. Ragged collectives follow the base one.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from fsdpcore.collectives.selection.costs import read_table, shipped
from fsdpcore.collectives.selection.overrides import UNITS, check_collective, parse
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.comm.config import Settings, TransportConfig
from fsdpcore.comm.transport import Transport
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.policy import Policy, Tuning
from fsdpcore.core.text import nearest
from fsdpcore.core.toml import parse_toml
from fsdpcore.launch.environment import LAUNCH_VARIABLES

PREFIX = "FSDPCORE_"
# The argument, and the table of a file, that overrides algorithms.
ALGORITHMS_TABLE = "algorithms"


@dataclass(frozen=True)
class Config(TransportConfig):
    """Settings, and what the transport's URL says, resolved and checked.

    Attributes:
        transport_class: the transport.
        sources: where each setting and option that is no default comes from, in words.
    """

    transport_class: type[Transport] = Transport  # type: ignore[type-abstract]
    sources: Mapping[str, str] = field(default_factory=dict)


class SourcedValue(NamedTuple):
    """A value, and where it comes from."""

    value: Any
    source: str


def resolve(
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    directory: Path | None = None,
    *,
    default_transport: str = "sim",
) -> Config:
    """Combine all sources into one ``Config``.

    Args:
        arguments: settings, ``algorithms`` and transport options by name; None counts as not given.
        environ: environment variables.
        directory: where to look for a TOML file; None for none.
        default_transport: taken where nothing names one.

    Raises:
        ConfigError: an unknown key or a bad value; the message names the source and the key.
    """
    general = {f.name for f in dataclasses.fields(Settings)}
    # Imported when it is needed: what reads packages' metadata takes a sixth of all imports.
    from fsdpcore.comm import registry

    given = {k: SourcedValue(v, "argument") for k, v in arguments.items() if v is not None}
    file, tables, path = _read_file(directory, general)
    algorithms = {
        **tables.pop(ALGORITHMS_TABLE, {}),
        **_environment_algorithms(environ),
        **_argument_algorithms(given.pop(ALGORITHMS_TABLE, None)),
    }
    settings = {
        "transport": SourcedValue(default_transport, "default"),
        **file,
        **_read_environment(environ, general),
        **{name: item for name, item in given.items() if name in general},
    }
    built = _build(Settings, settings)
    if "world_size" in settings and not built.world_size:
        raise ConfigError(f"{settings['world_size'].source}: world_size must be at least 1, got 0")
    url = parse_url(built.transport)
    transport = registry.load(url.scheme)
    _check_tables(tables, path)
    options = {
        **tables.get(url.scheme, {}),
        **_url_options(url, built.transport),
        **{name: item for name, item in given.items() if name not in general},
    }
    _check_known(options, url.scheme, {f.name for f in dataclasses.fields(transport.options)})
    if url.netloc and not transport.takes_address:
        raise ConfigError(f"transport {url.scheme!r} takes no address, got {built.transport!r}")
    used = {**settings, **options, **algorithms}
    return Config(
        **dataclasses.asdict(built),
        transport_class=transport,
        host=url.hostname or "",
        port=url.port or 0,
        transport_options=_build(transport.options, options),
        policy=_policy(built, url.scheme, algorithms, settings, directory),
        sources={n: item.source for n, item in used.items() if item.source != "default"},
    )


def _policy(
    built: Settings,
    scheme: str,
    algorithms: Mapping[str, SourcedValue],
    settings: Mapping[str, SourcedValue],
    directory: Path | None,
) -> Policy:
    overrides = {}
    for name, (text, source) in algorithms.items():
        check_collective(name, source)
        overrides[name] = parse(name, text, source, canonical=built.deterministic)
    tuning = shipped().get(scheme, Tuning())
    if built.tuning:
        try:
            table = read_table((directory or Path()) / built.tuning)
        except ConfigError as error:
            raise ConfigError(f"{settings['tuning'].source}: {error}") from error
        tuning = table.get(scheme, Tuning()).over(tuning)
    return Policy(built.deterministic, overrides, tuning)


def _environment_algorithms(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    variables = {name: PREFIX + name.upper() for name in ALGORITHMS}
    return {
        name: SourcedValue(environ[variable], f"environment variable {variable}")
        for name, variable in variables.items()
        if environ.get(variable)
    }


def _argument_algorithms(given: SourcedValue | None) -> dict[str, SourcedValue]:
    if given is None:
        return {}
    if not isinstance(given.value, Mapping):
        raise ConfigError(
            f"argument: {ALGORITHMS_TABLE}={given.value!r}: expected a dict of collectives, such "
            'as {"all_reduce": "doubling:0-8KiB;direct:8193-max"}'
        )
    return {
        name: SourcedValue(text, "argument")
        for name, text in given.value.items()
        if text is not None
    }


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


def _url_options(url: SplitResult, text: str) -> dict[str, SourcedValue]:
    options: dict[str, SourcedValue] = {}
    for name, value in parse_qsl(url.query, keep_blank_values=True):
        if name in options:
            raise ConfigError(f"bad transport URL {text!r}: option {name!r} is given twice")
        options[name] = SourcedValue(value, f"transport URL {text!r}")
    return options


def _check_known(options: Mapping[str, SourcedValue], scheme: str, names: set[str]) -> None:
    general = {f.name for f in dataclasses.fields(Settings)}
    for name, item in options.items():
        if name in names:
            continue
        if name in general:
            raise ConfigError(
                f"{item.source}: {name!r} is no option of a transport; it goes into an argument, "
                f"a variable ({PREFIX}{name.upper()}) or the top of the configuration file"
            )
        # Only an argument can have been meant for either.
        known = general | names | {ALGORITHMS_TABLE} if item.source == "argument" else names
        raise ConfigError(
            f"{item.source}: unknown option {name!r} for transport {scheme!r}"
            f"{nearest(name, known)}; it has {', '.join(sorted(names)) or 'none'}"
        )


def _read_environment(environ: Mapping[str, str], general: set[str]) -> dict[str, SourcedValue]:
    found = {}
    ours = {PREFIX + name.upper() for name in general}
    elsewhere = {*LAUNCH_VARIABLES, *(PREFIX + name.upper() for name in ALGORITHMS)}
    known = ours | elsewhere
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            hint = nearest(variable, known)
            raise ConfigError(f"unknown environment variable {variable}{hint}")
        if variable in ours and value:
            name = variable[len(PREFIX) :].lower()
            found[name] = SourcedValue(value, f"environment variable {variable}")
    return found


def _read_file(
    directory: Path | None, general: set[str]
) -> tuple[dict[str, SourcedValue], dict[str, dict[str, SourcedValue]], str]:
    """Return the settings of the TOML file, its tables of transport options, and its path."""
    content: dict[str, Any] = {}
    source = ""
    for name, keys in (("fsdpcore.toml", ()), ("pyproject.toml", ("tool", "fsdpcore"))):
        file = directory / name if directory is not None else None
        if file is None or not file.is_file():
            continue
        content = _parse_file(file, keys)
        source = str(file)
        if content:
            break
    plain: dict[str, SourcedValue] = {}
    tables: dict[str, dict[str, SourcedValue]] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            tables[key] = {name: SourcedValue(v, f"{source} [{key}]") for name, v in value.items()}
        elif key in general:
            plain[key] = SourcedValue(value, source)
        else:
            raise ConfigError(f"{source}: unknown key {key!r}{nearest(key, general)}")
    return plain, tables, source


def _parse_file(file: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """Read one table of a TOML file; empty where there is none."""
    try:
        content: Any = parse_toml(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    for key in keys:
        content = content.get(key, {})
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: [{'.'.join(keys)}] is not a table")
    return dict(content)


def _check_tables(tables: Mapping[str, Any], path: str) -> None:
    if not tables:
        return  # the schemes are looked up among all installed packages, which takes milliseconds
    from fsdpcore.comm import registry

    known = [*registry.schemes(), ALGORITHMS_TABLE]
    for name in tables:
        if name not in known:
            raise ConfigError(f"{path}: [{name}] is no transport{nearest(name, known)}")


def _build(cls: type[Any], values: Mapping[str, SourcedValue]) -> Any:
    """Make a dataclass from values that may be text, converted by the fields' types."""
    types = typing.get_type_hints(cls)
    converted = {}
    for name, (value, source) in values.items():
        try:
            converted[name] = _convert(value, types[name])
        except ValueError as error:
            raise ConfigError(f"{source}: {name}={value!r}: {error}") from None
    try:
        return cls(**converted)
    except ValueError as error:  # its message begins with the field's name
        blamed = values.get(str(error).partition(" ")[0])
        raise ConfigError(f"{blamed.source}: {error}" if blamed else str(error)) from error


def _convert(value: Any, kind: Any) -> Any:
    if kind is bool:
        known = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
        if str(value).lower() not in known:
            raise ValueError("expected true or false")
        return known[str(value).lower()]
    if kind is int:
        return _integer(value)
    if kind is float:
        return _number(value)
    if kind is str and not isinstance(value, str):
        raise ValueError("expected text")
    if isinstance(value, str) and kind is not str:
        raise ValueError("can be given from Python only")
    return value


def _integer(value: Any) -> int:
    """Read an integer; text may carry a unit: 64KiB, 2MiB."""
    factor = 1
    number = value
    if isinstance(value, str):
        for unit, size in UNITS.items():
            if unit and value.endswith(unit):
                number, factor = value[: -len(unit)], size
    try:
        whole = int(number)
        exact = isinstance(value, str) or whole == value
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact or isinstance(value, bool):
        raise ValueError("expected an integer")
    return whole * factor


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("expected a number") from None
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return number
