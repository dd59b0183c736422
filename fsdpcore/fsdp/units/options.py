"""What a user can choose for an engine, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdpcore.collectives.device_transport import device_transport_of
from fsdpcore.collectives.selection.choose import AUTOMATIC
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.transport import transport_of
from fsdpcore.compress.compression import Compression
from fsdpcore.core.checks import as_choice, as_instance, as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.offload.offload import Offload
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.units.precision import Precision


@dataclass(frozen=True)
class Prefetch:
    """What goes on in the background while a unit is in use; the same on all ranks.

    Args:
        units: so many of those that come next are gathered ahead of their use; 0 for none. By
            default 1 where ranks are on several hosts, or on GPUs, and 0 where all are on the
            processors of one host: they do the copying themselves, and it takes no less time in
            the background.
        max_bytes: no more than so many bytes are gathered ahead, but for a unit that is larger
            alone; None for no limit.
        reductions: 1 lets the gradients of a unit be reduced while the backward pass goes on with
            the next; with 0 it waits for them. By default 1 in the same places, if there are
            several ranks.

    Raises:
        ArgumentError: a number that makes no sense.

    Example::

        fc.FSDP(units, backend, prefetch=fc.Prefetch(units=2, max_bytes=1 << 30))
    """

    units: int | None = None
    max_bytes: int | None = None
    reductions: int | None = None

    def __post_init__(self) -> None:
        for field, what, least, most in (
            ("units", "prefetch (in units)", 0, None),
            ("max_bytes", "max_bytes of Prefetch", 1, None),
            ("reductions", "reductions of Prefetch", 0, 1),
        ):
            value = getattr(self, field)
            if value is not None:
                number = as_int(value, what, minimum=least, maximum=most)
                object.__setattr__(self, field, number)

    @classmethod
    def of(cls, given: Prefetch | int | None) -> Prefetch:
        """Return the policy that a number of units stands for.

        Args:
            given: so many units are gathered ahead; with 0, nothing goes on in the background. None
                for what is best where the ranks are. A ``Prefetch`` is returned as it is.

        Raises:
            ArgumentError: it is neither, or a negative number.
        """
        if isinstance(given, Prefetch):
            return given
        made = cls(given)
        return cls(0, reductions=0) if made.units == 0 else made

    def among(self, hosts: Sequence[int], *, on_host: bool) -> Prefetch:
        """Return the same policy with nothing left open, and without what has no effect.

        Args:
            hosts: of the ranks.
            on_host: they compute there, not on GPUs.
        """
        pays = not on_host or len(set(hosts)) > 1
        units = int(pays) if self.units is None else self.units
        reductions = int(pays) if self.reductions is None else self.reductions
        return Prefetch(units, self.max_bytes, reductions if len(hosts) > 1 else 0)


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine, as ``FSDP`` describes them; ``repr`` is what ranks compare."""

    strategy: Strategy
    precision: Precision
    prefetch: Prefetch
    window: bool
    offload: Offload | None
    seed: int
    algorithm: str
    virtual_ranks: int | None
    compression: Compression | None = None

    @classmethod
    def of(
        cls,
        strategy: Strategy | str,
        precision: Precision | None,
        prefetch: Prefetch | int | None,
        window: bool,
        offload: Offload | None,
        seed: int,
        algorithm: str,
        virtual_ranks: int | None,
        compression: Compression | None,
        backend: Backend,
    ) -> EngineOptions:
        """Check options, for an engine on ``backend``.

        Raises:
            ArgumentError: one that makes no sense.
        """
        precision = Precision() if precision is None else precision
        _check_kinds(precision, offload, window)
        _check_algorithm(algorithm, backend)
        if compression is not None:
            such = "a fc.Compression, such as fc.Compression('int8', 'int4')"
            as_instance(compression, Compression, "compression", such)
        if virtual_ranks is not None:
            virtual_ranks = _leaves(virtual_ranks, backend, precision)
            algorithm = _canonical(algorithm)
        return cls(
            strategy if isinstance(strategy, Strategy) else Strategy(strategy),
            precision,
            Prefetch.of(prefetch),
            window,
            offload,
            as_int(seed, "seed"),
            algorithm,
            virtual_ranks,
            compression,
        )


def _leaves(virtual_ranks: int, backend: Backend, precision: Precision) -> int:
    """Return how many virtual ranks there are, if these ranks can be them."""
    leaves = as_int(virtual_ranks, "virtual_ranks", minimum=1)
    if leaves < backend.world_size:
        raise ArgumentError(
            f"{leaves} virtual ranks are too few for {backend.world_size} ranks; each rank "
            "computes at least one of them"
        )
    reduced = precision.reduce_dtype or precision.param_dtype
    if reduced is not None and np.dtype(reduced).itemsize < 4:
        raise ArgumentError(
            f"virtual_ranks needs gradients that are summed in float32, not {np.dtype(reduced)}: "
            "pass Precision(..., reduce_dtype=np.float32)"
        )
    return leaves


def _canonical(algorithm: str) -> str:
    """Return the algorithm of an engine with virtual ranks."""
    found = ALGORITHMS["reduce_scatter"].get(algorithm)
    if algorithm not in AUTOMATIC and (found is None or not found.canonical):
        raise ArgumentError(
            f"virtual_ranks with algorithm={algorithm!r}, which reduces in an order of its own; "
            "leave it at 'auto'"
        )
    return "canonical" if algorithm == "auto" else algorithm


def _check_kinds(precision: object, offload: object, window: object) -> None:
    """Raise ArgumentError for an option that is of another type."""
    such = "a fc.Precision, such as fc.Precision(param_dtype=np.float16)"
    as_instance(precision, Precision, "precision", such)
    if offload is not None:
        as_instance(offload, Offload, "offload", "a fc.Offload, such as fc.Offload('/scratch')")
    as_choice(window, (True, False), "window")


def _check_algorithm(algorithm: str, backend: Backend) -> None:
    """Raise ArgumentError for an algorithm that not all collectives of an engine have."""
    known = set.intersection(
        *(_algorithms(name, backend) for name in ("all_gather", "reduce_scatter", "all_reduce"))
    )
    if algorithm not in AUTOMATIC and algorithm not in known:
        names = ", ".join(repr(name) for name in [*AUTOMATIC, *sorted(known)])
        raise ArgumentError(f"an engine has no algorithm {algorithm!r}; it has {names}")


def _algorithms(collective: str, backend: Backend) -> set[str]:
    """Names of those that move the engine's arrays: the general ones and the transport's own."""
    if backend.device.on_host:
        own = transport_of(backend).algorithms(backend).get(collective, {})
        return {*ALGORITHMS[collective], *own}
    return {*device_transport_of(backend).device_algorithms(backend).get(collective, {})}
