"""Which transports there are: entry points of the group ``fsdpcore.transports``.

A transport, ours or a third party's, is an entry point named by its URL scheme that refers to a
``Transport`` class; the module is imported when it is first used. If that import fails for want
of a package, the entry point's extra (in brackets) says what to install.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fsdpcore.errors import ConfigError, MissingDependencyError, UnknownTransportError
from fsdpcore.transport import Transport

GROUP = "fsdpcore.transports"


def schemes() -> list[str]:
    """Names of all transports that some installed package offers, sorted."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load(scheme: str) -> type[Transport]:
    """Import and return the transport class of a scheme.

    Raises:
        UnknownTransportError: no installed package offers it.
        MissingDependencyError: a package that it needs is not installed.
        ConfigError: the entry point does not refer to a transport.
    """
    for point in entry_points(group=GROUP, name=scheme):
        return _import(point)
    known = schemes()
    if not known:
        raise UnknownTransportError(
            "no transports are installed; install the package itself: pip install -e ."
        )
    raise UnknownTransportError(
        f"unknown transport {scheme!r}{nearest(scheme, known)}; known are {', '.join(known)}"
    )


def _import(point: EntryPoint) -> type[Transport]:
    try:
        loaded: Any = point.load()
    except ImportError as error:
        package = error.name or str(error)
        raise MissingDependencyError(
            f"transport {point.name!r} needs {package}, which cannot be imported; "
            f"install it with: {install_hint(point)}"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"transport {point.name!r}: {point.value} does not exist") from error
    abstract = inspect.isclass(loaded) and inspect.isabstract(loaded)
    if not (inspect.isclass(loaded) and issubclass(loaded, Transport)) or abstract:
        raise ConfigError(
            f"transport {point.name!r}: {point.value} is not a complete Transport class"
        )
    return loaded


def install_hint(point: EntryPoint) -> str:
    """The command that installs what a transport needs."""
    name = point.dist.name if point.dist is not None else "fsdpcore"
    extras = f"[{','.join(point.extras)}]" if point.extras else ""
    return f'pip install "{name}{extras}"'


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is closest to a wrong one, or nothing if none is close."""
    matches = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
