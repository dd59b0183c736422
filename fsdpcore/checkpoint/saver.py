"""What all ranks agree on before a save: that they can, and who writes what."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fsdpcore.backend import Backend
from fsdpcore.checkpoint.agree import agree
from fsdpcore.checkpoint.committing import Commit, Prepared, Saved
from fsdpcore.checkpoint.describe import Holding, holding_of, rows_of
from fsdpcore.checkpoint.generators import Generators, states_of
from fsdpcore.checkpoint.plan_save import (
    HeldArray,
    SavePlan,
    Written,
    decode,
    decode_written,
    encode,
    encode_written,
    plan,
)
from fsdpcore.checkpoint.retention import Retention
from fsdpcore.checkpoint.steps import check_step
from fsdpcore.checkpoint.storage import StoragePath, open_storage
from fsdpcore.checkpoint.strict_json import check_json
from fsdpcore.checkpoint.talk import deal_text, gather_text
from fsdpcore.errors import ArgumentError
from fsdpcore.fsdp.checks import as_finite
from fsdpcore.fsdp.consent import check_equal

TIMEOUT = 1800.0
"""Seconds that ranks wait for one another's disks."""

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
        if not isinstance(backend, Backend):
            raise ArgumentError(
                f"the backend comes behind path and state, got {type(backend).__name__} for it"
            )
        if retention is not None and not isinstance(retention, Retention):
            raise ArgumentError(f"retention must be a Retention, got {retention!r}")
        self._storage = open_storage(path)
        self._backend = backend
        self._retention = retention
        self._timeout = timeout
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
            holding = holding_of(state)
            number = _step_of(step, holding)
            numbers = _checked_metrics(metrics)
            check_json(extra, "extra")
            mine = {"generators": states_of(generators)} if generators else {}
        except Exception as error:
            failed = error
        # What is equal on all ranks, and what is as it was at the last save on this one.
        common = _digest(json.dumps([number, extra, numbers] if failed is None else []))
        told = json.dumps([common, holding.arrays == self._arrays])
        replies = agree(
            self._backend, "save", failed, told, timeout=self._timeout, ending=_UNWRITTEN
        )
        everyone = [json.loads(reply) for reply in replies]
        check_equal(
            self._backend,
            [theirs for theirs, _ in everyone],
            "save: the ranks give different steps, metrics or extra; what differs between ranks "
            f"belongs into arrays. {_UNWRITTEN}",
        )
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
        texts = gather_text(described, self._backend, timeout=self._timeout)
        deals: list[str] | None = None
        if texts is not None:
            try:
                self._plan = plan([decode(text) for text in texts])
                deals = [json.dumps(["", encode_written(each)]) for each in self._plan.written]
            except ArgumentError as error:
                deals = [json.dumps([str(error), ""])] * len(texts)
        problem, pieces = json.loads(deal_text(deals, self._backend, timeout=self._timeout))
        if problem:
            raise ArgumentError(f"save: {problem}. {_UNWRITTEN}")
        self._pieces = decode_written(pieces)

    def write(self, prepared: Prepared, backend: Backend) -> Saved:
        """Write what was prepared, and commit it; a collective of ``backend``'s ranks, blocks."""
        return Commit(self._storage, backend, prepared, self._retention, self._timeout).run()


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
    return {name: as_finite(value, f"metric {name!r}") for name, value in metrics.items()}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
