"""From what the ranks of a new generation have in memory to the state of the newest version."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from fsdpcore.checkpoint.format.metadata import Metadata
from fsdpcore.checkpoint.load.load import Loaded, load
from fsdpcore.checkpoint.plan.file_layout import lay_out
from fsdpcore.checkpoint.save.commit import with_own
from fsdpcore.checkpoint.save.step_folder import RankFile, commit, described, file_name
from fsdpcore.checkpoint.save.writing import FileSums
from fsdpcore.checkpoint.storage.opening import DISK_TIMEOUT
from fsdpcore.checkpoint.storage.steps import StepName
from fsdpcore.collectives.objects import all_gather_object, gather_object
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.message_status import MessageStatus
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import CommunicationError
from fsdpcore.core.wildcard import ANY
from fsdpcore.core.work import Work
from fsdpcore.elastic.memory import MemoryFile, MemoryStorage
from fsdpcore.elastic.parts import Vault, Version, Whole, pieces_of
from fsdpcore.elastic.versions import State

_ASK = 0  # tag of what is asked for; answers have others
_SERVED = 16  # answers under way at a time
_NO_SUMS = FileSums(0, 0)  # which the storage in memory does not look at


def newest_whole(told: Sequence[Iterable[Sequence[int]]]) -> Whole | None:
    """Return the newest version that is there whole.

    Args:
        told: of each rank, for each of its parts: generation and commit of the version, which part
            of how many, its size and that of its file.
    """
    keepers: dict[Version, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    sizes: dict[tuple[Version, int], tuple[int, int]] = {}
    counts: dict[Version, int] = {}
    for rank, rows in enumerate(told):
        for generation, number, part, count, *size in rows:
            version = Version(generation, number)
            keepers[version][part].append(rank)
            sizes[version, part], counts[version] = (size[0], size[1]), count
    whole = [version for version, parts in keepers.items() if len(parts) == counts[version]]
    if not whole:
        return None
    newest = max(whole)
    parts = range(counts[newest])
    return Whole(
        newest,
        tuple(tuple(keepers[newest][part]) for part in parts),
        tuple(sizes[newest, part] for part in parts),
    )


def recover(vault: Vault, backend: Backend, state: State) -> tuple[Whole, Loaded] | None:
    """Load the newest version that all ranks together have; a collective, which blocks.

    Args:
        vault: of this rank.
        backend: of the new generation.
        state: what ``checkpoint.load`` takes as its target.

    Returns:
        None if no version is there whole; then nothing was changed.

    Raises:
        The errors of ``checkpoint.load``.
    """
    mine = [
        [*part.version, part.rank, part.ranks, part.memory.size, part.file_bytes]
        for part in vault.parts.values()
    ]
    whole = newest_whole(all_gather_object(mine, backend, label="restore, versions"))
    if whole is None:
        return None
    vault.keep_only(whole.version)  # they all have left the generation before
    files = _Files(vault, backend, whole)
    storage = MemoryStorage("the ranks' memory")
    directory = StepName(whole.version.commit).name
    records = gather_object(files.records(), backend, label="restore, records")
    for part, (_, size) in enumerate(whole.sizes):
        storage.add(f"{directory}/{file_name(part)}", files.file(part, size))
    if records is not None:
        found = {int(part): each for held in records for part, each in held.items()}
        commit(storage, directory, _metadata(whole, found))
    with files:
        return whole, load(storage, state, backend)


def _metadata(whole: Whole, records: Mapping[int, Mapping[str, Any]]) -> Metadata:
    """Describe a version as the checkpoint that it is."""
    version, ranks = whole.version, len(whole.keepers)
    save_id = f"elastic-{version.generation}"
    files = []
    for part in range(ranks):
        layout = lay_out(pieces_of(records[part]), save_id, part)
        if layout.places.pieces:
            files.append(RankFile(part, layout.places, _NO_SUMS))
    every = [records[part]["about"] for part in range(ranks)]
    arrays = {name: (kind, tuple(shape)) for name, (kind, shape) in every[0]["arrays"].items()}
    states = [each["state"] for each in every]
    return described(
        files,
        save_id=save_id,
        step=version.commit,
        world_size=ranks,
        arrays=arrays,
        info=with_own(every[0]["info"], states),
        ranks=states,
    )


class _Files:
    """The files of a version: those here, and those that other ranks send on demand.

    A context manager: within it, this rank answers the others.
    """

    def __init__(self, vault: Vault, backend: Backend, whole: Whole) -> None:
        self._rank, self._whole = backend.rank, whole
        self._here = {
            part.rank: part for part in vault.parts.values() if part.version == whole.version
        }
        self._group = backend.sub(range(backend.world_size), name="elastic files")
        self._clock = backend.root.clock
        self._tags = itertools.count(_ASK + 1)

    def records(self) -> dict[str, Any]:
        """What rank 0 has to know of those parts that this rank is the first to have."""
        found = {}
        for number, part in self._here.items():
            if self._whole.keepers[number][0] == self._rank:
                found[str(number)] = part.record()
        return found

    def file(self, part: int, size: int) -> MemoryFile:
        """A part's file."""
        if part in self._here:
            return MemoryFile.of(self._here[part].file)
        keepers = self._whole.keepers[part]
        keeper = keepers[self._rank % len(keepers)]

        def fetch(offset: int, out: Bytes) -> None:
            if out.size:
                tag = next(self._tags)
                self._group.send(np.array([part, offset, out.size, tag]), keeper, tag=_ASK)
                self._group.recv(out, keeper, tag=tag)

        return MemoryFile(size, fetch)

    def __enter__(self) -> _Files:
        self._task = self._clock.start(self._serve, f"fsdpcore-elastic-{self._rank}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Where the load has ended well, no rank asks for anything any more.
        if error is None:
            self._group.send(np.full(4, -1), self._rank, tag=_ASK)
            self._task.join(DISK_TIMEOUT)
            self._group.close()

    def _serve(self) -> None:
        wanted, status = np.empty(4, np.int64), MessageStatus()
        answers: list[Work] = []
        try:
            while True:
                self._group.recv(wanted, ANY, tag=_ASK, timeout=DISK_TIMEOUT, status=status)
                part, offset, size, tag = wanted.tolist()
                if part < 0:
                    break
                data = self._here[part].file[offset : offset + size]
                answers.append(self._group.isend(data, status.source, tag=tag))
                if len(answers) > _SERVED:
                    answers.pop(0).wait()
            for answer in answers:
                answer.wait()
        except CommunicationError:
            pass  # the load fails on all ranks
