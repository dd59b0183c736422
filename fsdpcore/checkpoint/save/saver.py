"""What all ranks agree on before a save: that they can, and who writes what."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsdpcore.checkpoint.format.generators import Generators, states_of
from fsdpcore.checkpoint.format.strict_json import check_json
from fsdpcore.checkpoint.load.talk import TIMEOUT, deal_text, gather_text
from fsdpcore.checkpoint.plan.describe import Holding, check_ranks, holding_of, rows_of
from fsdpcore.checkpoint.plan.plan_save import (
    HeldArray,
    SavePlan,
    Written,
    decode,
    decode_written,
    encode,
    encode_written,
    plan,
)
from fsdpcore.checkpoint.save.committing import Commit, Prepared
from fsdpcore.checkpoint.storage.protocol import Saved
from fsdpcore.checkpoint.storage.retention import Retention
from fsdpcore.checkpoint.storage.steps import check_step
from fsdpcore.checkpoint.storage.storage import StoragePath, open_storage
from fsdpcore.collectives.agree import agree
from fsdpcore.comm.backend import Backend
from fsdpcore.core.checks import as_positive
from fsdpcore.core.errors import ArgumentError, MismatchError, in_words

_UNWRITTEN = "Nothing was written"


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
        timeout: float = TIMEOUT,
    ) -> None:
        check_backend(backend)
        if retention is not None and not isinstance(retention, Retention):
            raise ArgumentError(f"retention must be a Retention, got {retention!r}")
        self._storage = open_storage(path)
        self._backend = backend
        self._retention = retention
        self._timeout = as_positive(timeout, "timeout")
        self._arrays: tuple[HeldArray, ...] | None = None  # for which there is a plan
        self._pieces: tuple[Written, ...] = ()
        self._plan: SavePlan | None = None

    def prepare(
        self,
        state: object,
        *,
        step: int | None = None,
        extra: Any = None,
        generators: Generators | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Prepared:
        """Agree on a save; a collective. The arguments are those of ``save``."""
        failed, number = None, -1
        holding = Holding((), (), {})
        numbers: dict[str, float] = {}
        mine: dict[str, Any] = {}
        try:
            check_ranks(state, self._backend)
            holding = holding_of(state, self._backend.device)
            number = _step_of(step, holding)
            numbers = _checked_metrics(metrics)
            check_json(extra, "extra")
            if generators:
                mine = {"generators": states_of(generators)}
                check_json(mine, "the states of generators")
        except Exception as error:
            failed = error
        common = (
            [number, numbers, _digest(json.dumps(extra, sort_keys=True))] if failed is None else []
        )
        told = json.dumps([common, holding.arrays == self._arrays])
        # No disk is involved yet: the ranks wait for one another as in any collective.
        replies = refuse(self._backend, failed, told)
        everyone = [json.loads(reply) for reply in replies]
        _check_equal([theirs for theirs, _ in everyone])
        if not all(known for _, known in everyone):
            self._arrays = None
            self._agree(encode(holding.arrays))
            self._arrays = holding.arrays
        sources = [rows_of(holding.sources[each.rows.piece], each.rows) for each in self._pieces]
        info = dict(holding.info)
        return Prepared(
            number,
            self._pieces,
            tuple(sources),
            self._plan,
            info,
            copy.deepcopy(extra),  # the caller's may change before it is written
            numbers,
            mine,
        )

    def _agree(self, described: str) -> None:
        """Have rank 0 decide who writes what."""
        texts = gather_text(described, self._backend, timeout=self._backend.timeout)
        deals: list[str] | None = None
        if texts is not None:
            try:
                self._plan = plan([decode(text) for text in texts])
                deals = [json.dumps(["", encode_written(each)]) for each in self._plan.written]
            except Exception as error:
                wrong = isinstance(error, ArgumentError)
                deals = [json.dumps([str(error) if wrong else in_words(error), ""])] * len(texts)
        problem, pieces = json.loads(deal_text(deals, self._backend, timeout=self._backend.timeout))
        if problem:
            raise ArgumentError(f"save: {problem}. {_UNWRITTEN}")
        self._pieces = decode_written(pieces)

    def write(self, prepared: Prepared, backend: Backend) -> Saved:
        """Write what was prepared, and commit it; a collective of ``backend``'s ranks, blocks."""
        return Commit(self._storage, backend, prepared, self._retention, self._timeout).run()


def check_backend(backend: object) -> None:
    """Raise ArgumentError if this is none."""
    if not isinstance(backend, Backend):
        raise ArgumentError(
            f"the backend comes behind path and state, got {type(backend).__name__} for it"
        )


def refuse(backend: Backend, error: Exception | None, told: str = "") -> list[str]:
    """Begin a save together, or have all ranks raise what one of them found; a collective."""
    return agree(backend, "save", error, told, timeout=backend.timeout, ending=_UNWRITTEN)


def _step_of(step: int | None, holding: Holding) -> int:
    if step is None:
        step = holding.info.get("step")
        if step is None:
            raise ArgumentError("save() of a mapping needs step=, the number to find it by")
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


def _check_equal(told: Sequence[Sequence[Any]]) -> None:
    """Raise MismatchError, which says how, unless all ranks told the same."""
    for rank, (step, metrics, extra) in enumerate(told):
        first_step, first_metrics, first_extra = told[0]
        where = f"on rank 0 and rank {rank}"
        if step != first_step:
            raise MismatchError(f"save: step is {first_step} and {step} {where}. {_UNWRITTEN}")
        for name in {**first_metrics, **metrics}:
            if first_metrics.get(name) != metrics.get(name):
                raise MismatchError(
                    f"save: the metric {name!r} is {first_metrics.get(name)} and "
                    f"{metrics.get(name)} {where}; average it over the ranks first. {_UNWRITTEN}"
                )
        if extra != first_extra:
            raise MismatchError(
                f"save: extra differs {where}; what ranks have of their own belongs into arrays. "
                f"{_UNWRITTEN}"
            )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
