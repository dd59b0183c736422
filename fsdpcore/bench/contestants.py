"""``Contestant``: whose collectives are measured; and ours."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import fsdpcore
from fsdpcore import collectives
from fsdpcore.bench.cases import Case
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.transport import transport_of
from fsdpcore.core.buffers import Array

Step = Callable[[], Any]

_ALIGNMENT = 64


class Contestant(ABC):
    """One library on one rank.

    Attributes:
        rank: this rank's number.
        versions: of the libraries that do the work.
    """

    rank: int
    versions: dict[str, str]

    @abstractmethod
    def barrier(self) -> None:
        """Block until all ranks are here."""

    @abstractmethod
    def step(self, case: Case, source: Array | None, output: Array | None) -> Step:
        """Prepare a collective, so that a call of what is returned carries it out.

        Args:
            case: what to do.
            source: flat input; None for a rank that has none.
            output: flat output; None for a rank that gets none. Where ``case.in_place``, one of
                the two is the other, or a part of it.
        """

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Memory for ``count`` elements, aligned to a cache line."""
        raw = np.empty(count * dtype.itemsize + _ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % _ALIGNMENT
        return raw[skip : skip + count * dtype.itemsize].view(dtype)

    def part(self, case: Case, source: Array) -> Array:
        """The part of the input in which a reduce_scatter in place leaves a rank's result."""
        return source[self.rank * case.count :][: case.count]

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Leave."""


class Ours(Contestant):
    """This library, on a backend that its caller opens and closes.

    Args:
        backend: of this rank.
        algorithm: as the collectives take it.
        plain: measure arrays from ``numpy.empty`` rather than from ``backend.empty``.
    """

    def __init__(self, backend: Backend, algorithm: str = "auto", *, plain: bool = False) -> None:
        self.rank = backend.rank
        self._backend = backend
        self._algorithm = algorithm
        self._plain = plain
        self.versions = versions_of_ours(backend)

    def barrier(self) -> None:
        self._backend.barrier()

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        return super().empty(count, dtype) if self._plain else self._backend.empty(count, dtype)

    def step(self, case: Case, source: Array | None, output: Array | None) -> Step:
        keywords: dict[str, Any] = {"out": output, "algorithm": self._algorithm}
        if case.definition.reduces:
            keywords["op"] = case.op
        if case.definition.rooted:
            keywords["root"] = case.root
        function = getattr(collectives, case.operation)
        return partial(function, source, self._backend, **keywords)


def versions_of_ours(backend: Backend) -> dict[str, str]:
    """Versions of what our contestants run on."""
    found = {"fsdpcore": fsdpcore.__version__, "numpy": np.__version__}
    found["python"] = platform.python_version()
    carried = transport_of(backend).versions()
    return {**found, "transport": carried} if carried else found
