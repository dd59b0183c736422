"""What can run on this machine: the facts behind ``fsdpcore doctor``."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from threadpoolctl import threadpool_info

from fsdpcore.comm import registry
from fsdpcore.comm.config import Settings
from fsdpcore.core.errors import FsdpcoreError, MissingDependencyError
from fsdpcore.launch.blas import available_cores
from fsdpcore.launch.config import Config, parse_url, resolve
from fsdpcore.launch.environment import detect, launched_threads

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (looked at, never written to)
_LIBRARIES = ("fsdpcore", "numpy", "ml_dtypes", "safetensors", "threadpoolctl")


@dataclass(frozen=True)
class TransportReport:
    """One transport: whether it can run here, on which versions, or what is missing.

    ``install`` is the command that would help, empty where no installation would.
    """

    scheme: str
    package: str
    usable: bool
    versions: str = ""
    problem: str = ""
    install: str = ""


@dataclass(frozen=True)
class BlasReport:
    """A BLAS library that is loaded."""

    name: str
    version: str
    threads: int


@dataclass(frozen=True)
class SharedMemoryReport:
    """Size and free space of the file system for shared memory, in bytes."""

    path: str
    size: int
    free: int


@dataclass(frozen=True)
class SettingReport:
    """A resolved setting, and where it comes from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``fsdpcore doctor`` shows.

    Attributes:
        transports: all that are offered by installed packages, by scheme.
        python: version and implementation.
        libraries: name to version.
        cores: that this process may use.
        shared_memory: None where the system has none.
        launcher: whose variables are set here, in words.
        settings: as a script in this directory would find them, with the transport's options and
            the overrides of algorithms.
        configuration_error: why they could not be resolved.
        transport_error: why the configured transport cannot run here, where that is not why.
    """

    transports: tuple[TransportReport, ...]
    python: str
    libraries: Mapping[str, str]
    cores: int
    blas: tuple[BlasReport, ...]
    shared_memory: SharedMemoryReport | None
    launcher: str
    settings: tuple[SettingReport, ...]
    configuration_error: str | None
    transport_error: str | None = None

    @property
    def well(self) -> bool:
        """Whether a script in this directory and environment could run."""
        return self.configuration_error is None and self.transport_error is None


def examine(environ: Mapping[str, str], directory: Path) -> Diagnosis:
    """Look around; nothing that is found broken raises."""
    points = sorted(entry_points(group=registry.GROUP), key=lambda point: point.name)
    config, problem = _resolved(environ, directory)
    transports = tuple(_examine_transport(point) for point in dict.fromkeys(points))
    return Diagnosis(
        transports=transports,
        python=f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})",
        libraries={name: _version(name) for name in _LIBRARIES},
        cores=available_cores(),
        blas=tuple(
            BlasReport(str(pool["internal_api"]), str(pool["version"]), int(pool["num_threads"]))
            for pool in threadpool_info()
            if pool["user_api"] == "blas"
        ),
        shared_memory=_shared_memory(),
        launcher=_launcher(environ),
        settings=() if config is None else _settings(config),
        configuration_error=problem,
        transport_error=None if config is None else _cannot_run(config, transports),
    )


def _cannot_run(config: Config, transports: Sequence[TransportReport]) -> str | None:
    scheme = parse_url(config.transport).scheme
    for report in transports:
        if report.scheme == scheme and not report.usable:
            source = config.sources.get("transport", "default")
            return f"transport {scheme!r}, which is configured ({source}), cannot run here"
    return None


def _examine_transport(point: EntryPoint) -> TransportReport:
    package = registry.package(point)
    try:
        versions = registry.import_transport(point).versions()
    except MissingDependencyError as error:
        problem, command = _innermost(error), registry.install_command(point)
        if error.install is not None:
            problem, command = str(error), error.install
        return TransportReport(point.name, package, False, problem=problem, install=command)
    except Exception as error:  # a transport may fail in any way, and the others are still of use
        return TransportReport(point.name, package, False, problem=_innermost(error))
    return TransportReport(point.name, package, True, versions)


def _innermost(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}" if not isinstance(cause, ImportError) else str(cause)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _shared_memory() -> SharedMemoryReport | None:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return SharedMemoryReport(
        str(SHARED_MEMORY), status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    )


def _launcher(environ: Mapping[str, str]) -> str:
    try:
        threads, place = launched_threads(environ), detect(environ)
    except FsdpcoreError as error:
        return f"unusable variables: {error}"
    if threads:
        return f"fsdpcore run: {threads} ranks as threads"
    if place is None:
        return "none: launch() starts the ranks"
    return f"{place.launcher}: this is rank {place.rank} of {place.world_size}"


def _resolved(environ: Mapping[str, str], directory: Path) -> tuple[Config | None, str | None]:
    try:
        return resolve({}, environ, directory), None
    except FsdpcoreError as error:
        return None, str(error)


def _settings(config: Config) -> tuple[SettingReport, ...]:
    names = [field.name for field in dataclasses.fields(Settings)]
    values = {name: getattr(config, name) for name in names}
    options = config.transport_options
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default:  # its value alone may say little
            value = field.metadata.get("default", value)
        values[field.name] = value
    values |= {name: str(ranges) for name, ranges in config.policy.overrides.items()}
    return tuple(
        SettingReport(name, str(value), config.sources.get(name, "default"))
        for name, value in values.items()
    )


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print it as tables, then what to type for the transports that cannot run."""
    console.print(_transports(diagnosis))
    console.print(_machine(diagnosis))
    if diagnosis.configuration_error is None:
        console.print(_configuration(diagnosis))
    else:
        problem = f"Configuration: {diagnosis.configuration_error}"
        console.print(Text(problem, style="red"), soft_wrap=True)
    if diagnosis.transport_error is not None:
        console.print(Text(f"Problem: {diagnosis.transport_error}", style="red"), soft_wrap=True)
    for transport in diagnosis.transports:
        if transport.install:
            # Outside of the table, where nothing breaks a line that is to be copied.
            console.print(Text(f"For {transport.scheme}: {transport.install}"), soft_wrap=True)


def _transports(diagnosis: Diagnosis) -> Table:
    table = Table(title="Transports", title_justify="left")
    for name in ("transport", "package", "can run", "versions, or what is missing"):
        table.add_column(name, overflow="fold")
    for report in diagnosis.transports:
        mark = Text("yes", style="green") if report.usable else Text("no", style="red")
        detail = Text(report.versions if report.usable else report.problem)
        table.add_row(Text(report.scheme), Text(report.package), mark, detail)
    return table


def _machine(diagnosis: Diagnosis) -> Table:
    table = Table(title="This machine", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    shm = diagnosis.shared_memory
    rows = {
        "Python": diagnosis.python,
        **diagnosis.libraries,
        "cores": str(diagnosis.cores),
        "BLAS": ", ".join(
            f"{blas.name} {blas.version} ({blas.threads} threads)" for blas in diagnosis.blas
        )
        or "none found",
        "shared memory": "none"
        if shm is None
        else f"{shm.path}: {shm.size / 2**30:.1f} GiB, {shm.free / 2**30:.1f} GiB free",
        "launcher": diagnosis.launcher,
    }
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    return table


def _configuration(diagnosis: Diagnosis) -> Table:
    table = Table(title="Configuration", title_justify="left")
    for name in ("setting", "value", "from"):
        table.add_column(name, overflow="fold")
    for setting in diagnosis.settings:
        table.add_row(Text(setting.name), Text(setting.value), Text(setting.source))
    return table
