"""Reduced gradients by name, for a while: ``step.gradients``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from fsdpcore.collectives import barrier
from fsdpcore.core.buffers import Array
from fsdpcore.fsdp.offload.arrays import GRADIENTS
from fsdpcore.fsdp.state.entries import StateEntry, gradient_entries
from fsdpcore.fsdp.state.full import check_written_alike
from fsdpcore.fsdp.state.save import gathered, sharded
from fsdpcore.fsdp.state.state import ShardedArray
from fsdpcore.fsdp.units.model import ShardedModel
from fsdpcore.fsdp.units.views import ClosingArrays, UnknownParameterError, locked, read_only


class GradientArrays(ClosingArrays[ShardedArray | Array]):
    """Gradients by ``unit.param``, until the end of ``step.gradients()``."""

    def __getitem__(self, name: str) -> ShardedArray | Array:
        arrays = self._open()
        try:
            return arrays[name]
        except KeyError:
            raise UnknownParameterError(
                f"no gradient of {name!r}; there are those of {', '.join(arrays) or 'nothing'}"
            ) from None

    def _closed(self) -> str:
        return (
            "step.gradients() has ended, and its mapping with it; use it inside of the with "
            "block, or copy the arrays there"
        )


@contextmanager
def gradient_arrays(model: ShardedModel, *, full: bool, write: bool) -> Iterator[GradientArrays]:
    """Give the reduced gradients of all units; see ``Step.gradients``."""
    what = f"gradients(full={full}, write={write})"
    barrier(model.groups.everyone, label=what)
    with ExitStack() as stack:
        entries: list[StateEntry] = []
        for unit in model.units:
            if unit.trainable:
                entries += gradient_entries(unit)
                unit.store.begin(GRADIENTS, write=write)
                stack.callback(unit.store.end, GRADIENTS, written=write)
        with (_full if full else _shards)(model, entries, what, write=write) as arrays:
            found = GradientArrays(arrays)
            try:
                yield found
            finally:
                found.close()


@contextmanager
def _shards(
    model: ShardedModel, entries: list[StateEntry], what: str, *, write: bool
) -> Iterator[Mapping[str, ShardedArray | Array]]:
    views = [entry.data.view() if write else read_only(entry.data) for entry in entries]
    try:
        yield {
            entry.name: sharded(model.groups, entry, view)
            for entry, view in zip(entries, views, strict=True)
        }
    finally:
        for view in views:
            locked(view)


@contextmanager
def _full(
    model: ShardedModel, entries: list[StateEntry], what: str, *, write: bool
) -> Iterator[Mapping[str, ShardedArray | Array]]:
    arrays = {entry.name: gathered(model.groups, entry) for entry in entries}
    yield arrays
    if write:
        check_written_alike(model, what, list(arrays), arrays)
        for entry in entries:
            entry.data[:] = entry.cut(arrays[entry.name])
