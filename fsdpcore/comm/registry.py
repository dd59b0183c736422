"""Which transports there are: entry points of the group ``fsdpcore.transports``.

A transport, ours or a third party's, is an entry point named by its URL scheme that refers to a
``Transport`` class; the module is imported when it is first used. If that import fails for want
of a package, the entry point's extra (in brackets) says what to install.

A transport that has algorithms of its own names them in the group ``fsdpcore.algorithms``, each
with the same reference. So their names are known where the transport itself cannot be imported.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from fsdpcore.comm.transport import Transport
from fsdpcore.core.errors import ConfigError, MissingDependencyError, UnknownTransportError
from fsdpcore.core.text import nearest

GROUP = "fsdpcore.transports"
ALGORITHMS_GROUP = "fsdpcore.algorithms"

# Where our own are. The folder has another place in a checkout: only its installation has it here.
_OURS = "fsdpcore.transports"


def schemes() -> list[str]:
    """Names of all transports that some installed package offers, sorted."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def own_algorithms() -> list[str]:
    """Names that the installed transports give algorithms of their own, sorted."""
    return sorted({point.name for point in entry_points(group=ALGORITHMS_GROUP)})


def load(scheme: str) -> type[Transport]:
    """Import and return the transport class of a scheme.

    Raises:
        UnknownTransportError: no installed package offers it.
        MissingDependencyError: a package that it needs is not installed.
        ConfigError: the entry point does not refer to a transport, or two packages offer it.
    """
    return import_transport(find(scheme))


def find(scheme: str) -> EntryPoint:
    """Return the entry point of a scheme, without importing anything.

    Raises:
        UnknownTransportError: no installed package offers it.
        ConfigError: two packages offer it.
    """
    points = {point.value: point for point in entry_points(group=GROUP, name=scheme)}
    if len(points) > 1:
        packages = " and ".join(sorted(package(point) for point in points.values()))
        raise ConfigError(
            f"transport {scheme!r} is offered by several packages ({packages}); uninstall all "
            "but one"
        )
    for point in points.values():
        return point
    known = schemes()
    if not known:
        raise UnknownTransportError(
            "no transports are installed, so this package itself is not: pip install -e ."
        )
    raise UnknownTransportError(
        f"unknown transport {scheme!r}{nearest(scheme, known)}; known are {', '.join(known)}"
    )


def import_transport(point: EntryPoint) -> type[Transport]:
    """Import what an entry point refers to; raises as ``load`` does."""
    try:
        loaded: Any = point.load()
    except ModuleNotFoundError as error:
        if error.name == _OURS:
            raise ConfigError(
                f"transport {point.name!r}: Python imports fsdpcore from the checkout in "
                f"{Path(__file__).parents[2]}, which is not what is installed: work in another "
                "folder, or install the checkout with: pip install -e ."
            ) from error
        raise MissingDependencyError(
            f"transport {point.name!r} needs the module {error.name or error}, which is not "
            f"installed; install it with: {install_command(point)}"
        ) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"transport {point.name!r} cannot be imported ({error}); what it needs is installed "
            f"with: {install_command(point)}"
        ) from error
    except AttributeError as error:
        raise ConfigError(
            f"transport {point.name!r}: {point.value} cannot be imported: {error}"
        ) from error
    except MissingDependencyError:  # by a transport that knows better what is missing
        raise
    except Exception as error:  # a broken transport of whatever kind must not look like ours
        raise ConfigError(
            f"transport {point.name!r}: importing {point.value} failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    abstract = inspect.isclass(loaded) and inspect.isabstract(loaded)
    if not (inspect.isclass(loaded) and issubclass(loaded, Transport)) or abstract:
        raise ConfigError(
            f"transport {point.name!r}: {point.value} is not a complete Transport class"
        )
    if not dataclasses.is_dataclass(getattr(loaded, "options", None)):
        raise ConfigError(
            f"transport {point.name!r}: {point.value} must have a dataclass named 'options'"
        )
    return loaded


def package(point: EntryPoint) -> str:
    """The name of the installed package that an entry point comes from."""
    return point.dist.name if point.dist is not None else "fsdpcore"


def install_command(point: EntryPoint) -> str:
    """The command that installs what a transport needs."""
    extra = re.search(r"\[.+\]$", point.value.strip())
    return f'pip install "{package(point)}{extra.group() if extra else ""}"'
