"""One call of ``load``: all ranks agree, read, agree again; or try an older step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fsdpcore.checkpoint.format.generators import Generators, restore, states_of
from fsdpcore.checkpoint.load.batches import LoadBatch, planned
from fsdpcore.checkpoint.load.finding import Finder, chosen_step, goes_on
from fsdpcore.checkpoint.load.finding_together import SharedCandidate, find_together
from fsdpcore.checkpoint.load.gaps import Gaps, check_info
from fsdpcore.checkpoint.load.leaves import Fitted, Stored
from fsdpcore.checkpoint.load.reading import FileSet, usual_threads
from fsdpcore.checkpoint.load.shared_reads import read_all
from fsdpcore.checkpoint.load.target import Target
from fsdpcore.checkpoint.memory.overlaps import check_disjoint
from fsdpcore.checkpoint.memory.shards import checked_state
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.stored_state import StoredState
from fsdpcore.checkpoint.plan.targets import (
    TargetMatch,
    checked_patterns,
    chosen,
    is_tied,
    match,
)
from fsdpcore.checkpoint.storage.opening import StoragePath
from fsdpcore.checkpoint.storage.ranking import Step
from fsdpcore.checkpoint.storage.steps import Skipped, StepName, Which
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.collectives import all_reduce
from fsdpcore.collectives.consensus import LocalAttempt, agree
from fsdpcore.comm.backend import Backend
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError, CheckpointError, CorruptCheckpointError
from fsdpcore.core.text import listed
from fsdpcore.fsdp.state.state import OPTIMIZER_PREFIX

_UNTOUCHED = "Nothing was changed on any rank"
_TORN = (
    "What was loaded into may be half overwritten: do not go on with it before a load has succeeded"
)


@dataclass(frozen=True)
class Loaded:
    """What was loaded; all but the bytes is the same on all ranks.

    Attributes:
        step: of the checkpoint.
        name: of its directory.
        extra, metrics: what the user saved with it.
        info: what the engine saved; its number of steps and loss scale. By the names of the
            entries where engines are entries of a state.
        missing: arrays and values of the target that are not in the checkpoint; they stayed as they
            were.
        unexpected: arrays and values of the checkpoint that no rank has.
        uncovered: arrays of which elements are not in the checkpoint; these stayed as they were.
        skipped: newer checkpoints that are not valid, with the reasons.
        bytes_read: of arrays, by this rank, from files.
        bytes_needed: of arrays, for this rank.
        bytes_beside: of headers and checksums, by this rank.
        state: the target, with new values in place of those that cannot be changed: numbers, text,
            tuples, arrays of JAX. Containers in which nothing is new are the target's own.
    """

    step: int
    name: str
    extra: Any
    metrics: Mapping[str, float]
    info: Mapping[str, Any]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    uncovered: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    bytes_read: int
    bytes_needed: int
    bytes_beside: int
    state: Any = None


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of ``load``."""

    step: Step
    strict: bool
    optimizer: bool
    cast: bool
    names: str | Iterable[str] | None
    generators: Generators | None
    threads: int | None


@dataclass(frozen=True)
class _Fit:
    """What a checkpoint has for this rank.

    Attributes:
        catalog: of its pieces.
        batches: what to read.
        matched: to which tensors the arrays belong.
        uncovered: names of arrays of which elements are not stored.
        generators: as they were saved.
        stored: values, and the rest that is not arrays.
        leaves: how each leaf of the target is loaded.
    """

    catalog: Catalog
    batches: list[LoadBatch]
    matched: TargetMatch
    uncovered: tuple[str, ...]
    generators: Mapping[str, np.random.Generator]
    stored: StoredState
    leaves: list[Fitted]


class StepLoader:
    """One call of ``load``.

    Args:
        backend: all ranks.
        request: what is wanted.
        timeout: seconds to wait for the slowest rank.
    """

    def __init__(self, backend: Backend, request: LoadRequest, timeout: float) -> None:
        self._backend = backend
        self._request = request
        self._timeout = timeout
        self._which: Which = None
        self._patterns: list[str] | None = None
        self._target: Target
        self._chosen: set[str] = set()
        self._left: set[str] | None = None
        self._read_last = ""
        self._threads = 1

    @property
    def _ending(self) -> str:
        return _TORN if self._read_last else _UNTOUCHED

    def run(self, path: StoragePath, given: object) -> Loaded:
        """Load; a collective, which blocks. The errors are those of ``load``."""
        with ExitStack() as stack:
            storage = self._begin(path, given, stack)
            finder = None
            if self._backend.rank == 0:
                finder = stack.enter_context(Finder(storage, self._which))
            found, fit, loaded = self._newest(storage, finder)
            with LocalAttempt() as attempt:
                stack.close()  # which writes what an engine keeps in files
                state = self._target.result(fit.leaves, {*loaded.missing})
        self._agree(f"load of {found.name}", attempt)
        self._finish(loaded, fit)
        return replace(loaded, state=state)

    # Before anything is read.

    def _begin(self, path: StoragePath, given: object, stack: ExitStack) -> Storage:
        """Check the arguments, on all ranks, and open the engine for writing."""
        storage, self._target = self._checked(path, given)
        fitting = ""
        with LocalAttempt() as attempt:
            names = self._open(stack)
            fitting = json.dumps([each for each in self._patterns or () if chosen(names, [each])])
        replies = self._agree("load", attempt, fitting)
        fits = {pattern for reply in replies for pattern in json.loads(reply)}
        idle = [each for each in self._patterns or () if each not in fits]
        if idle:
            raise ArgumentError(
                f"load: no rank has an array whose name fits {listed(idle)}. {_UNTOUCHED}"
            )
        return storage

    def _checked(self, path: StoragePath, given: object) -> tuple[Storage, Target]:
        """Check the arguments, before the engine is opened, in which ranks wait for each other."""
        request, options = self._request, ""
        storage: Storage | None = None
        target: Target | None = None
        with LocalAttempt() as attempt:
            target = Target(given, self._backend)
            storage, self._which = chosen_step(path, request.step)
            if request.generators is not None:
                states_of(request.generators)  # for the types
            self._threads = usual_threads(self._backend)
            if request.threads is not None:
                self._threads = as_int(request.threads, "threads", minimum=1)
            self._patterns = checked_patterns(request.names)
            options = self._options(target)
        different = sorted(set(self._agree("load", attempt, options)))
        if len(different) > 1:
            raise ArgumentError(
                f"load: the ranks differ in step, strict, optimizer, cast, names or the engines "
                f"of the target: {' and '.join(different[:2])}. {_UNTOUCHED}"
            )
        assert storage is not None
        assert target is not None
        return storage, target

    def _open(self, stack: ExitStack) -> list[str]:
        """Open the engines, and check the arrays; return all names that patterns may choose."""
        target, device = self._target, self._backend.device
        target.open(stack, optimizer=self._request.optimizer)
        arrays = checked_state(target.arrays(), device)
        names = target.names
        self._chosen = {*chosen(names, self._patterns)}
        ties = target.ties
        check_disjoint(
            {
                name: each
                for name, each in arrays.items()
                if name in self._chosen and not is_tied(name, ties)
            },
            device,
        )
        return names

    def _agree(self, what: str, attempt: LocalAttempt, value: str = "") -> list[str]:
        backend, error = self._backend, attempt.error
        return agree(backend, what, error, value, timeout=self._timeout, ending=self._ending)

    def _options(self, target: Target) -> str:
        request = self._request
        flags = [bool(each) for each in (request.strict, request.optimizer, request.cast)]
        engines = [leaf.name for leaf in target.engines]
        which = self._which
        step = which.name if isinstance(which, StepName) else which
        return json.dumps([step, *flags, self._patterns, engines])

    # One checkpoint after the other.

    def _newest(
        self, storage: Storage, finder: Finder | None
    ) -> tuple[SharedCandidate, _Fit, Loaded]:
        while True:
            found = find_together(finder, self._backend, timeout=self._timeout, ending=self._ending)
            fit, gaps = self._fitted(found)
            files = FileSet(storage, found.name, fit.catalog, self._threads)
            problem = self._read(files, fit, gaps, found)
            if problem is None:
                return found, fit, self._loaded(found, fit, gaps, files)
            if finder is not None:
                finder.skip(found.name, problem)

    def _fitted(self, found: SharedCandidate) -> tuple[_Fit, Gaps]:
        """Find out what to read, and agree on what does not fit."""
        what = f"load of {found.name}"
        lacking = ""
        with LocalAttempt() as attempt:
            fit = self._fit(found)
            values = itertools.chain.from_iterable(each.missing for each in fit.leaves)
            lacking = json.dumps([[*fit.matched.missing, *values], fit.uncovered])
        replies = self._agree(what, attempt, lacking)
        every = [json.loads(reply) for reply in replies]
        missing, uncovered = (
            tuple(dict.fromkeys(itertools.chain.from_iterable(each)))
            for each in zip(*every, strict=True)
        )
        gaps = Gaps(missing, self._unexpected(fit), uncovered)
        if self._request.strict:
            beside = self._beside(fit.stored) + self._only(gaps)
            gaps.check_none(what, beside, self._ending)
        self._check_mixed(what, gaps)
        for name in self._moving(fit.stored):
            check_info(what, name, fit.stored.engines.get(name, {}), self._ending)
        return fit, gaps

    def _beside(self, stored: StoredState) -> str:
        """Say where engines are, if the target has them elsewhere."""
        wanted, there = {leaf.name for leaf in self._target.engines}, stored.engines
        if wanted <= there.keys():
            return ""
        if not there:
            return "; it was not saved from an engine"
        if "" in there:
            return "; it was saved from an engine alone, not from a mapping with one"
        return f"; its engines are {listed(sorted(there))}"

    def _only(self, gaps: Gaps) -> str:
        """Say how an engine is loaded alone, if the target has nothing else."""
        names = [leaf.name for leaf in self._target.engines if leaf.name]
        if self._patterns is not None or not gaps.unexpected or gaps.missing:
            return ""
        if len(self._target.leaves) > 1 or len(names) != 1:
            return ""
        return f", names={f'{names[0]}/*'!r:.80} loads the parameters alone"

    def _fit(self, found: SharedCandidate) -> _Fit:
        catalog = Catalog(found.metadata)
        stored = StoredState.of(found.metadata)
        leaves = self._target.fit(Stored(stored, catalog, self._request.strict), self._chosen)
        state = checked_state(
            {name: array for each in leaves for name, array in each.arrays.items()},
            self._backend.device,
        )
        ties, cast = self._target.ties, self._request.cast
        matched = match(catalog, state, ties, stored=stored.ties, cast=cast)
        batches, lacking = planned(catalog, matched.wanted, self._backend.device)
        uncovered = tuple(dict.fromkeys(matched.names[position] for position in lacking))
        return _Fit(catalog, batches, matched, uncovered, self._restored(found), stored, leaves)

    def _restored(self, found: SharedCandidate) -> Mapping[str, np.random.Generator]:
        """Return generators as they were saved; those of the caller stay as they are."""
        given = self._request.generators
        if given is None:
            return {}
        kinds = {name: type(each.bit_generator) for name, each in given.items()}
        made = {name: np.random.Generator(kind()) for name, kind in kinds.items()}
        lacking = restore(made, found.metadata.ranks, self._backend.rank)
        if lacking and self._request.strict:
            raise ArgumentError(
                f"no state was saved of the generators {listed(lacking)} (strict=False leaves them "
                "as they are)"
            )
        return {name: each for name, each in made.items() if name not in lacking}

    def _moving(self, stored: StoredState) -> list[str]:
        """Return the names of the engines that take over the number of steps."""
        if not (self._request.optimizer and self._patterns is None):
            return []
        engines = [leaf.name for leaf in self._target.engines if leaf.engine is not None]
        return [name for name in engines if self._request.strict or name in stored.engines]

    def _unexpected(self, fit: _Fit) -> tuple[str, ...]:
        """Return what is stored, and no rank has; a collective."""
        entries = list(fit.stored.values())
        mine = {name for each in fit.leaves for name in each.used}
        own = np.array([name in mine for name, _ in entries], np.uint8)
        for name, arrays in entries:
            numbers = [fit.catalog.number.get(each) for each in arrays] if name in mine else []
            fit.matched.used[[each for each in numbers if each is not None]] = 1
        used = all_reduce(
            np.concatenate([fit.matched.used, own]),
            self._backend,
            op="max",
            timeout=self._timeout,
            label="load, names",
        )
        every = [*(tensor.name for tensor in fit.catalog.tensors), *(name for name, _ in entries)]
        names = [every[index] for index in np.flatnonzero(used == 0).tolist()]
        if not self._request.optimizer:
            names = [name for name in names if not name.startswith(OPTIMIZER_PREFIX)]
        return tuple(chosen(names, self._patterns))

    def _check_mixed(self, what: str, gaps: Gaps) -> None:
        """Raise if arrays would keep what was read before of a checkpoint that is damaged."""
        if self._left is None:
            return
        mixed = [name for name in (*gaps.missing, *gaps.uncovered) if name not in self._left]
        if mixed:
            raise CheckpointError(
                f"{what}, after {self._read_last} turned out to be damaged: it does not have all "
                f"of {listed(mixed)}, of which the other has been read. {_TORN}"
            )

    # Reading.

    def _read(self, files: FileSet, fit: _Fit, gaps: Gaps, found: SharedCandidate) -> str | None:
        """Read; return why this is no valid checkpoint where another one may be loaded."""
        missing = set(gaps.missing)
        for leaf in self._target.engines:
            if leaf.engine is not None:
                leaf.engine.partially_updated = True
                leaf.forget(missing)
        self._read_last = found.name
        self._left = missing if self._left is None else self._left & missing
        with files:
            error = read_all(files, fit.catalog, fit.batches, self._backend, timeout=self._timeout)
        try:
            agree(self._backend, f"load of {found.name}", error, timeout=self._timeout)
        except CheckpointError as agreed:
            if goes_on(self._which) and isinstance(agreed, CorruptCheckpointError):
                return str(agreed)
            raise type(agreed)(f"{agreed}. {_TORN}") from agreed
        return None

    def _loaded(self, found: SharedCandidate, fit: _Fit, gaps: Gaps, files: FileSet) -> Loaded:
        metadata = found.metadata
        return Loaded(
            metadata.step,
            found.name,
            metadata.extra,
            metadata.metrics,
            fit.stored.engines.get("", fit.stored.engines),
            gaps.missing,
            gaps.unexpected,
            gaps.uncovered,
            found.skipped,
            files.bytes_read,
            sum(batch.plan.needed for batch in fit.batches),
            files.bytes_beside,
        )

    def _finish(self, loaded: Loaded, fit: _Fit) -> None:
        """Take over what is no array, now that all ranks have theirs."""
        request = self._request
        for name, each in fit.generators.items():
            assert request.generators is not None
            request.generators[name].bit_generator.state = each.bit_generator.state
        whole = request.optimizer and self._patterns is None
        moving = self._moving(fit.stored)
        left = {*loaded.missing, *loaded.uncovered}
        for leaf in self._target.engines:
            info = fit.stored.engines.get(leaf.name, {}) if leaf.name in moving else None
            leaf.finish(left, whole=whole, info=info)
