"""What a user has chosen for an engine, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdpcore.collectives.algorithms.table import ALGORITHMS
from fsdpcore.collectives.device_transport import device_transport_of
from fsdpcore.comm.backend import Backend
from fsdpcore.core.checks import as_choice, as_instance, as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.offload.offload import Offload
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.step.schedule import Prefetch
from fsdpcore.fsdp.units.precision import Precision


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

    @classmethod
    def of(
        cls,
        strategy: Strategy | str,
        precision: Precision | None,
        prefetch: Prefetch | int,
        window: bool,
        offload: Offload | None,
        seed: int,
        algorithm: str,
        backend: Backend,
    ) -> EngineOptions:
        """Check options, for an engine on ``backend``.

        Raises:
            ArgumentError: one that makes no sense.
        """
        precision = Precision() if precision is None else precision
        _check_kinds(precision, offload, window)
        _check_algorithm(algorithm, backend)
        return cls(
            strategy if isinstance(strategy, Strategy) else Strategy(strategy),
            precision,
            Prefetch.of(prefetch),
            window,
            offload,
            as_int(seed, "seed"),
            algorithm,
        )


def _check_kinds(precision: object, offload: object, window: object) -> None:
    """Raise ArgumentError for an option that is of another type."""
    such = "a fc.Precision, such as fc.Precision(param_dtype=np.float16)"
    as_instance(precision, Precision, "precision", such)
    if offload is not None:
        as_instance(offload, Offload, "offload", "a fc.Offload, such as fc.Offload('/scratch')")
    as_choice(window, (True, False), "window")


def _check_algorithm(algorithm: str, backend: Backend) -> None:
    has: Mapping[str, Mapping[str, Any]] = ALGORITHMS
    if not backend.device.on_host:
        has = device_transport_of(backend).device_algorithms(backend)
    known = set.intersection(
        *(set(has.get(name, ())) for name in ("all_gather", "reduce_scatter", "all_reduce"))
    )
    if algorithm != "auto" and algorithm not in known:
        names = ", ".join(repr(name) for name in ["auto", *sorted(known)])
        raise ArgumentError(f"unknown algorithm {algorithm!r}; known: {names}")
