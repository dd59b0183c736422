"""What all ranks agree on before a save: that they can, and who writes what."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.checkpoint.format.generators import Generators, states_of
from fsdpcore.checkpoint.format.strict_json import check_json
from fsdpcore.checkpoint.plan.contents import Contents, contents_of
from fsdpcore.checkpoint.plan.describe import HeldState, holding_of, rows_of
from fsdpcore.checkpoint.plan.held import HeldArray, HeldTable, RankHolding, decode, holding
from fsdpcore.checkpoint.plan.save_plan import (
    SavePlan,
    WrittenPiece,
    decode_written,
    plan_table,
)
from fsdpcore.checkpoint.save.alike import Said, check_alike, in_one, said_of
from fsdpcore.checkpoint.save.commit import Commit, PreparedSave
from fsdpcore.checkpoint.save.step_folder import Saved
from fsdpcore.checkpoint.storage.opening import DISK_TIMEOUT, StoragePath, open_storage
from fsdpcore.checkpoint.storage.retention import Retention
from fsdpcore.checkpoint.storage.steps import check_step
from fsdpcore.collectives.consensus import LocalAttempt, agree, receive
from fsdpcore.collectives.objects import gather_object
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_instance, as_positive
from fsdpcore.core.digests import digest, hex_digest
from fsdpcore.core.disagreement import Disagreement, check_same
from fsdpcore.core.errors import ArgumentError

_UNWRITTEN = "Nothing was written"


class _SaveRequest(NamedTuple):
    """What a rank has been given to save, and that makes sense.

    Attributes:
        contents: the state, taken apart.
        holding: its arrays.
        step, metrics: see ``save``.
        rank_state: what of the metadata is this rank's own.
    """

    contents: Contents
    holding: HeldState
    step: int
    metrics: dict[str, float]
    rank_state: dict[str, Any]


class OwnState(NamedTuple):
    """What one rank would save.

    Attributes:
        request: in full; None if it cannot be saved.
        extra: a copy of the user's.
        said: of what all ranks should have alike.
        text: what the ranks tell each other.
        alike: a digest of 16 bytes. If all ranks have the same one, ``prepared`` may follow; empty
            where there is no plan yet for these arrays.
        error: why it cannot be saved.
    """

    request: _SaveRequest | None
    extra: Any
    said: Said
    text: str
    alike: bytes
    error: Exception | None = None


class Saver:
    """Saves steps into one folder, and remembers the last plan: the next is mostly the same.

    Args:
        path: see ``save``.
        backend: on which the ranks agree.
        retention, timeout: see ``save``.
    """

    def __init__(
        self,
        path: StoragePath,
        backend: Backend,
        *,
        retention: Retention | None = None,
        timeout: float = DISK_TIMEOUT,
    ) -> None:
        as_instance(backend, Backend, "backend", "a Backend", "it comes behind the path")
        if retention is not None:
            as_instance(retention, Retention, "retention", "a Retention")
        self._storage = open_storage(path)
        self._backend = backend
        self._retention = retention
        self._timeout = as_positive(timeout, "timeout")
        self._arrays: tuple[HeldArray, ...] | None = None  # for which there is a plan
        self._told = RankHolding("", 0, np.empty(0, np.int64))  # the same, as others are told
        self._pieces: tuple[WrittenPiece, ...] = ()
        self._plan: SavePlan | None = None

    def prepare(self, own: OwnState) -> PreparedSave:
        """Agree on a save; a collective.

        Args:
            own: of this rank, by ``describe``.
        """
        # No disk is involved yet: the ranks wait for one another as in any collective. But for what
        # a GPU has to do before its arrays can be compared.
        patience = None if self._backend.device.on_host else self._timeout
        replies = refuse(self._backend, own.error, own.text, patience)
        everyone = [json.loads(reply) for reply in replies]
        _check_same(everyone, self._backend)
        assert own.request is not None
        if not all(known for *_, known, _ in everyone):
            self._arrays, arrays = None, own.request.holding.arrays
            self._agree(arrays, [names for *_, names in everyone])
            self._arrays = arrays
        if len({alike for *_, alike, _, _ in everyone}) > 1:
            check_alike(own.said, self._backend, _UNWRITTEN)
        return self.prepared(own)

    def describe(
        self,
        state: object,
        *,
        step: int | None = None,
        extra: Any = None,
        generators: Generators | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> OwnState:
        """Return what this rank would save, or why it cannot; the arguments of ``save``."""
        with LocalAttempt() as attempt:
            request = _checked(state, self._backend, step, extra, generators, metrics)
            if self._retention is not None:
                self._retention.check_metrics([*(metrics or ())])
            said = said_of(request.contents, self._backend)
            known = request.holding.arrays == self._arrays
            if not known:
                self._told = holding(request.holding.arrays)
            about = [request.step, request.metrics, _digest(extra), in_one(said), known]
            text = json.dumps([*about, hex_digest(self._told.names.encode())])
            alike = digest(json.dumps(about).encode()) if known else b""
            # The caller's may change before it is written.
            return OwnState(request, copy.deepcopy(extra), said, text, alike)
        return OwnState(None, None, {}, "", b"", attempt.error)

    def prepared(self, own: OwnState) -> PreparedSave:
        """Return a save on which the ranks agree, as they know by ``alike``; sends nothing."""
        request = own.request
        assert request is not None
        return PreparedSave(
            request.step,
            self._pieces,
            sources_of(own, self._pieces),
            self._plan,
            request.contents.info,
            own.extra,
            request.metrics,
            request.rank_state,
        )

    def _agree(self, arrays: Sequence[HeldArray], names: Sequence[str]) -> None:
        """Have rank 0 decide who writes what.

        Args:
            arrays: of this rank.
            names: for each rank a digest of the names of its arrays, which mostly are the same on
                all: the first rank that has them tells them.
        """
        backend, pieces = self._backend, None
        named = names.index(names[backend.rank]) == backend.rank
        told = self._told.encode(named=named)
        texts = gather_object(told, backend)
        with LocalAttempt() as attempt:
            if texts is not None:
                held = HeldTable.of(decode(texts, names))
                self._plan = plan_table(held, len(texts))
                pieces = [self._plan.encode(rank) for rank in range(len(texts))]
        received = receive(
            backend, "save", attempt.error, pieces, timeout=backend.timeout, ending=_UNWRITTEN
        )
        self._pieces = decode_written(received, arrays)

    def write(self, prepared: PreparedSave, backend: Backend) -> Saved:
        """Write what was prepared, and commit it; a collective of ``backend``'s ranks, blocks."""
        return Commit(self._storage, backend, prepared, self._retention, self._timeout).run()


def sources_of(own: OwnState, pieces: Sequence[WrittenPiece]) -> tuple[Array, ...]:
    """Return the elements of pieces that this rank, or one that holds the same, writes."""
    assert own.request is not None
    held = own.request.holding.sources
    return tuple(rows_of(held[each.rows.piece], each.rows) for each in pieces)


def held_digest(own: OwnState) -> bytes:
    """Return a digest of what a rank holds, of whichever replica; of 16 bytes."""
    assert own.request is not None
    arrays = [each._replace(replica=0) for each in own.request.holding.arrays]
    return digest(repr(arrays).encode())


def refuse(
    backend: Backend, error: Exception | None, value: str = "", timeout: float | None = None
) -> list[str]:
    """Begin a save together, or have all ranks raise what one of them found; a collective."""
    limit = backend.timeout if timeout is None else timeout
    return agree(backend, "save", error, value, timeout=limit, ending=_UNWRITTEN)


def _checked(
    state: object,
    backend: Backend,
    step: int | None,
    extra: Any,
    generators: Generators | None,
    metrics: Mapping[str, float] | None,
) -> _SaveRequest:
    """Check the arguments of ``save`` as far as a rank can by itself."""
    contents = contents_of(state, backend)
    holding = holding_of(contents.arrays, backend.device)
    number, numbers = _step_of(step, contents), _checked_metrics(metrics)
    check_json(extra, "extra")
    rank_state: dict[str, Any] = {}
    if generators:
        rank_state = {"generators": states_of(generators)}
        check_json(rank_state, "the states of generators")
    if contents.own:
        rank_state["state"] = contents.own
    return _SaveRequest(contents, holding, number, numbers, rank_state)


def _step_of(step: int | None, contents: Contents) -> int:
    if step is None:
        steps = {name: info.get("step") for name, info in contents.engines.items()}
        if len({*steps.values()}) > 1:
            told = ", ".join(f"{name!r} {each}" for name, each in steps.items())
            raise ArgumentError(
                f"save() needs step=, the number to find it by: the engines have made different "
                f"numbers of steps, {told}"
            )
        step = next(iter(steps.values()), None)
        if step is None:
            raise ArgumentError(
                "save() of a mapping without an engine needs step=, the number to find it by"
            )
    return check_step(step)


def _checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or any(not isinstance(name, str) for name in metrics):
        raise ArgumentError(f"metrics must map names to numbers, got {metrics!r}")
    check_json(list(metrics), "names of metrics")
    numbers = {name: _number(value, f"metric {name!r}") for name, value in metrics.items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _number(value: Any, what: str) -> float:
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:  # as collectives return it
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"{what} must be a number, got {value!r}")
    return float(value)


def _check_same(described: Sequence[Sequence[Any]], backend: Backend) -> None:
    """Raise MismatchError, which says how, unless all ranks save the same step."""
    names = list(dict.fromkeys(name for _, metrics, *_ in described for name in metrics))
    rows = [
        [step, *(metrics.get(name) for name in names), extra]
        for step, metrics, extra, *_ in described
    ]

    def message(found: Disagreement) -> str:
        where = f"on {found.ranks}"
        if found.position == 0:
            return f"save: step is {found.values} {where}. {_UNWRITTEN}"
        if found.position <= len(names):
            return (
                f"save: the metric {names[found.position - 1]!r} is {found.values} {where}; "
                f"average it over the ranks first. {_UNWRITTEN}"
            )
        return (
            f"save: extra differs {where}; what ranks have of their own belongs into arrays. "
            f"{_UNWRITTEN}"
        )

    check_same(rows, backend.ranks, message)


def _digest(extra: Any) -> str:
    return hex_digest(json.dumps(extra, sort_keys=True).encode())
