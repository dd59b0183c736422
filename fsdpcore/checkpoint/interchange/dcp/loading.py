"""``load_dcp`` and ``read_dcp``: tensors of PyTorch's distributed checkpoints, into arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.checkpoint.format.metadata import make_metadata
from fsdpcore.checkpoint.interchange.array_sources import WINDOW_BYTES, FillTarget
from fsdpcore.checkpoint.interchange.dcp.source import DcpSource
from fsdpcore.checkpoint.interchange.selection import Renaming, SelectedArray, Selection
from fsdpcore.checkpoint.load.gaps import Gaps
from fsdpcore.checkpoint.memory.overlaps import check_disjoint
from fsdpcore.checkpoint.memory.rounding import put, rounded
from fsdpcore.checkpoint.memory.shards import Part, Shard, State, checked_state
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.describe import StatefulEngine, check_ranks, is_engine
from fsdpcore.checkpoint.plan.targets import TargetMatch, checked_patterns, chosen, is_tied, match
from fsdpcore.checkpoint.storage.opening import DISK_TIMEOUT
from fsdpcore.collectives import all_reduce
from fsdpcore.collectives.consensus import LocalAttempt, agree
from fsdpcore.comm.backend import Backend
from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_instance, as_positive
from fsdpcore.core.geometry.regions import Box, Range, whole

_WHAT = "load_dcp"
_UNTOUCHED = "Nothing was changed on any rank"
_TORN = (
    "What was loaded into may be half overwritten: do not go on with it before a load has succeeded"
)


@dataclass(frozen=True)
class DcpLoaded:
    """What ``load_dcp`` has loaded; the same on all ranks.

    Attributes:
        missing: arrays of the target that are not in the checkpoint; they stayed as they were.
        unexpected: arrays of the checkpoint that no rank has, by the names that they were given.
        objects: names in the checkpoint of what is no tensor, and was not read.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    objects: tuple[str, ...]


def read_dcp(
    path: str | os.PathLike[str],
    names: str | Iterable[str] | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> dict[str, Array]:
    """Read whole tensors of a distributed checkpoint of PyTorch, without PyTorch; blocks.

    All of them have to fit into memory. ::

        weights = fc.checkpoint.read_dcp("checkpoint/step-1000", "model.*")

    Args:
        path: a folder with ``.metadata`` and ``.distcp`` files, which PyTorch's
            ``torch.distributed.checkpoint`` writes. No object in there is unpickled; those that are
            no tensors are left out.
        names: patterns (of the shell) of the tensors to read; by default all.
        dtype: floating arrays are rounded to it, a real floating one; the others keep theirs.

    Returns:
        New arrays by name, in C order, in the order of the checkpoint.

    Raises:
        ArgumentError: there is no such checkpoint, a pattern fits no name, or a tensor has a dtype
            that NumPy does not have or was compressed.
        CorruptCheckpointError: its files make no sense, or do not fit.
        CheckpointError: something could not be read, or was not saved in full.
    """
    source = DcpSource(path)
    taken = Selection(names, dtype=dtype).of(source)
    source.check(taken)
    found: dict[str, Array] = {}
    for name, (_, array) in taken.items():
        stored = source.arrays[name]
        values: Array = np.empty(stored.shape, stored.dtype)
        if values.size:
            source.fill([FillTarget(name, whole(stored.shape), values.reshape(-1))])
        found[name] = rounded(values, array.dtype)
    return found


def load_dcp(
    path: str | os.PathLike[str],
    target: StatefulEngine | State,
    backend: Backend,
    *,
    strict: bool = True,
    cast: bool = False,
    names: str | Iterable[str] | None = None,
    rename: Renaming | None = None,
    strip_prefix: str = "",
    add_prefix: str = "",
    timeout: float | None = None,
) -> DcpLoaded:
    """Load tensors of a distributed checkpoint of PyTorch; a collective, which blocks.

    However it was sharded there and is sharded here, each rank reads what it needs, straight into
    its arrays, or by way of 8 MiB of the host's memory to those of another dtype or on a GPU.
    PyTorch is not needed. An engine gets its parameters; the optimizer stays as it is. ::

        fc.checkpoint.load_dcp("checkpoint/step-1000", engine, backend, strip_prefix="model.")

    Args:
        path: see ``read_dcp``; a folder that all ranks see.
        target: see ``load``.
        backend: all ranks that call.
        strict: names that are missing or unexpected are an error; else they are returned.
        cast: round values to the dtypes of the target; else another dtype is an error.
        names: patterns (of the shell) of the target's arrays to load; the others stay as they are.
        rename: new names by those in the checkpoint, or a function that gives them. Names that a
            mapping does not have go through the next two.
        strip_prefix: taken away from the names in the checkpoint that begin with it.
        add_prefix: put in front of these names.
        timeout: seconds to wait for the slowest rank's disk; by default 1800.

    Returns:
        What was missing, unexpected, or no tensor.

    Raises:
        ArgumentError: something does not fit, on some rank; on all ranks, and nothing was changed.
        StateError: inside of a step of the engine.
        CorruptCheckpointError: the files make no sense; on all ranks, as is CheckpointError.
        CheckpointError: something could not be read, or was not saved in full. Where arrays may be
            half overwritten the message says so, and ``engine.partially_updated`` is set.
        CommunicationError: a rank is gone.
    """
    as_instance(backend, Backend, "backend", "a Backend", "load_dcp takes (path, target, backend)")
    limit = DISK_TIMEOUT if timeout is None else as_positive(timeout, "timeout")
    loader = _DcpLoader(backend, limit, strict=bool(strict), cast=bool(cast))
    renaming = Selection(
        None, rename=rename, strip_prefix=strip_prefix, add_prefix=add_prefix, dtype=None
    )
    return loader.run(path, target, renaming, names)


class _DcpLoader:
    def __init__(self, backend: Backend, timeout: float, *, strict: bool, cast: bool) -> None:
        self._backend = backend
        self._timeout = timeout
        self._strict = strict
        self._cast = cast

    def _agree(self, attempt: LocalAttempt, value: str = "", ending: str = _UNTOUCHED) -> list[str]:
        backend, error = self._backend, attempt.error
        return agree(backend, _WHAT, error, value, timeout=self._timeout, ending=ending)

    def run(
        self,
        path: str | os.PathLike[str],
        target: StatefulEngine | State,
        renaming: Selection,
        names: str | Iterable[str] | None,
    ) -> DcpLoaded:
        with LocalAttempt() as attempt:
            check_ranks(target, self._backend)
            patterns = checked_patterns(names)
            source = DcpSource(path)
            taken = renaming.of(source)
        self._agree(attempt)
        engine = target if is_engine(target) else None
        partial = engine is not None and engine.partially_updated
        missing = ""
        with ExitStack() as stack:
            with LocalAttempt() as attempt:
                state: object = target
                if is_engine(target):
                    state = stack.enter_context(target.writing_state(optimizer=False))
                arrays, ties = self._checked(state, patterns)
                matched = self._matched(arrays, ties, taken)
                missing = json.dumps(matched.missing)
            gaps = self._gaps(self._agree(attempt, missing), matched, taken, patterns)
            with LocalAttempt() as attempt:
                pairs = zip(taken.values(), matched.used.tolist(), strict=True)
                source.check(each.source for each, used in pairs if used)
            self._agree(attempt)
            if engine is not None:
                engine.partially_updated = True
            with LocalAttempt() as attempt:
                self._read(source, matched, list(taken.values()))
                stack.close()  # which writes what an engine keeps in files
        self._agree(attempt, ending=_TORN)
        if engine is not None:
            engine.partially_updated = partial
        return DcpLoaded(gaps.missing, gaps.unexpected, source.skipped)

    def _checked(
        self, state: object, patterns: list[str] | None
    ) -> tuple[dict[str, Shard], Mapping[str, str]]:
        """Return the arrays to fill, and which of them are tied."""
        every = checked_state(state, self._backend.device)
        ties: Mapping[str, str] = getattr(state, "info", {}).get("ties") or {}
        arrays = {name: every[name] for name in chosen(list(every), patterns)}
        apart = {name: each for name, each in arrays.items() if not is_tied(name, ties)}
        check_disjoint(apart, self._backend.device)
        return arrays, ties

    def _matched(
        self,
        arrays: Mapping[str, Shard],
        ties: Mapping[str, str],
        taken: Mapping[str, SelectedArray],
    ) -> TargetMatch:
        kinds = {name: (each.array.dtype.name, each.array.shape) for name, each in taken.items()}
        about = make_metadata(
            save_id="dcp", step=0, world_size=1, created="", files=[], arrays=kinds, pieces=[]
        )
        return match(Catalog(about), arrays, ties, cast=self._cast)

    def _gaps(
        self,
        replies: list[str],
        matched: TargetMatch,
        taken: Mapping[str, SelectedArray],
        patterns: list[str] | None,
    ) -> Gaps:
        """Find out, together, what does not fit; ``replies`` are what each rank misses."""
        missing = tuple(dict.fromkeys(name for reply in replies for name in json.loads(reply)))
        used = all_reduce(
            matched.used, self._backend, op="max", timeout=self._timeout, label="load_dcp, names"
        )
        unused = [name for name, flag in zip(taken, used.tolist(), strict=True) if not flag]
        gaps = Gaps(missing, tuple(chosen(unused, patterns)), ())
        if self._strict:
            gaps.check_none(_WHAT, "", _UNTOUCHED)
        return gaps

    def _read(self, source: DcpSource, matched: TargetMatch, taken: list[SelectedArray]) -> None:
        direct = []
        for number, part in matched.wanted:
            name = taken[number].source
            dtype = source.arrays[name].dtype
            plain = on_host(part.array) and part.array.dtype == dtype
            if plain and (isinstance(part.region, Box) or part.array.flags.c_contiguous):
                direct.append(FillTarget(name, part.region, part.array))
                continue
            for region, array in _windows(part, WINDOW_BYTES // dtype.itemsize):
                values = np.empty(array.shape, dtype)
                source.fill([FillTarget(name, region, values)])
                if on_host(array):
                    put(array, values)
                else:
                    self._backend.device.write(array, values)
        source.fill(direct)


def _windows(part: Part, size: int) -> Iterator[Part]:
    """Cut a part into some of at most ``size`` elements."""
    region, array = part
    if region.size <= size:
        yield part
    elif isinstance(region, Range):
        for start in range(0, region.size, size):
            some = array[start : start + size]
            yield Part(Range(region.start + start, region.start + start + some.size), some)
    else:
        axis = int(np.argmax(region.shape))
        middle = region.shape[axis] // 2
        cut = region.start[axis] + middle
        first, second = list(region.stop), list(region.start)
        first[axis] = second[axis] = cut
        ahead = (slice(None),) * axis
        low, high = array[(*ahead, slice(None, middle))], array[(*ahead, slice(middle, None))]
        yield from _windows(Part(Box(region.start, tuple(first)), low), size)
        yield from _windows(Part(Box(tuple(second), region.stop), high), size)
