"""Versions of a job's state in the memory of its ranks: made at commits, copied to other hosts.

A version is a checkpoint whose files are in memory. Of each rank it has a part: the file that the
rank would write to a disk, and a record of what is in it. The part is on that rank, and soon on
another one, which ``buddies`` names. If that is a replica, which holds the same of the state, it
writes the file by itself, and only the record is sent. A version counts once every part is there
whole, wherever. While one is made, the one before stays.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.checkpoint.memory.fetching import fetched
from fsdpcore.checkpoint.plan.describe import StatefulEngine
from fsdpcore.checkpoint.plan.file_layout import FileLayout, lay_out
from fsdpcore.checkpoint.plan.kinds import Stateful
from fsdpcore.checkpoint.plan.save_plan import WrittenPiece
from fsdpcore.checkpoint.save.commit import PreparedSave
from fsdpcore.checkpoint.save.saver import OwnState, Saver, held_digest, sources_of
from fsdpcore.checkpoint.save.writing import chunks
from fsdpcore.checkpoint.storage.opening import DISK_TIMEOUT
from fsdpcore.collectives import all_gather
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.errors import CommunicationError
from fsdpcore.core.waiting import wait_all
from fsdpcore.core.work import Work
from fsdpcore.elastic.buddies import holders
from fsdpcore.elastic.memory import MemoryStorage
from fsdpcore.elastic.parts import Part, Vault, Version, Whole, encoded, pieces_of

State = StatefulEngine | Stateful | Mapping[str, Any]

NONE = -1
"""In place of the commit of a version: there is none."""
UNDER_WAY = -2
"""Likewise: some of it is still to come."""
_RECORD_STEP = 1024  # bytes


class Draft(NamedTuple):
    """What this rank would have of a version.

    Attributes:
        commit: of the version.
        own: the state, as this rank describes it.
        prepared: what it would write, by the plan of the version before; None if that is too old.
        record: likewise.
        alike: if all ranks have the same here, the version may be made without another word; empty
            where it may not.
    """

    commit: int
    own: OwnState
    prepared: PreparedSave | None = None
    record: bytes = b""
    alike: bytes = b""


class _Twin(NamedTuple):
    """How another rank writes its part.

    Attributes:
        pieces: in its file.
        layout: of the file.
    """

    pieces: Sequence[WrittenPiece]
    layout: FileLayout


class Versions:
    """Makes the versions of one generation, on one rank.

    Args:
        vault: of this rank.
        backend: of the generation; all ranks make this at the same time.
        generation: its number.
        hosts: the number of each rank's host, by its agent.
    """

    def __init__(
        self, vault: Vault, backend: Backend, generation: int, hosts: Sequence[int]
    ) -> None:
        self._vault, self._backend = vault, backend
        self._generation, self._hosts = generation, hosts
        self._saver = Saver(MemoryStorage("the ranks' memory"), backend)
        self._copies = backend.sub(range(backend.world_size), name="elastic copies")
        self._pieces: tuple[WrittenPiece, ...] | None = None
        self._layout: FileLayout
        self._told = ""
        # Of all ranks, as they have last told; what they hold as a digest in two numbers.
        self._sizes: list[tuple[int, int]] = []
        self._holdings: list[list[int]] = []
        self._twins: dict[int, _Twin] = {}
        # What is sent, and the parts that come.
        self._under_way: list[tuple[Work, Part | None]] = []
        self.made = NONE

    def complete(self) -> int:
        """The commit of ``made`` if nothing is sent or received any more, else ``UNDER_WAY``."""
        self._take_in()
        return UNDER_WAY if self._under_way else self.made

    def _take_in(self) -> None:
        """Keep the parts that have come."""
        for each in [each for each in self._under_way if each[0].done()]:
            self._under_way.remove(each)
            work, part = each
            work.wait()
            if part is not None:
                self._vault.keep(part)

    def salvage(self) -> None:
        """Keep what had come when the generation broke, and wait for nothing more."""
        while any(work.done() for work, _ in self._under_way):
            with contextlib.suppress(CommunicationError):  # of those that had not
                self._take_in()
        self._under_way.clear()

    def draft(self, state: State, commit: int) -> Draft:
        """Describe a version that may be made; sends nothing.

        Args:
            state: what ``checkpoint.save`` takes.
            commit: its number.
        """
        own = self._saver.describe(state, step=commit)
        if not own.alike:
            return Draft(commit, own)
        prepared = self._saver.prepared(own)
        record = self._record(prepared)
        told = self._size_of(record) == self._sizes[self._backend.rank]
        return Draft(commit, own, prepared, record, own.alike if told else b"")

    def make(self, draft: Draft, leaving: Collection[int] = (), *, alike: bool = False) -> None:
        """Make a version, and begin to copy it; blocks for the former.

        What is under way ends before.

        Args:
            draft: of it.
            leaving: ranks that keep no copies.
            alike: all ranks have the same ``draft.alike``. If not, it is a collective.
        """
        self.wait()
        prepared, record = draft.prepared, draft.record
        before: Version | None = Version(self._generation, self.made)
        if not alike or prepared is None:
            before = None  # none that was made by the same plan
            prepared = self._saver.prepare(draft.own)
            record = self._record(prepared)
            self._tell(draft.own, record)
        size, file_bytes = self._sizes[self._backend.rank]
        memory = self._vault.room(size)
        self._write(self._layout, prepared.sources, memory)
        memory[file_bytes:] = np.frombuffer(record, np.uint8)
        version, rank = Version(self._generation, draft.commit), self._backend.rank
        part = Part(version, rank, self._backend.world_size, memory, file_bytes)
        self._vault.keep(part)
        self.made = draft.commit
        self._copy(part, leaving, draft.own, before)

    def _tell(self, own: OwnState, record: bytes) -> None:
        """Tell all ranks how large this rank's part is, and what of the state it holds."""
        holding = np.frombuffer(held_digest(own), np.int64)
        row = np.array([[*self._size_of(record), *holding]], np.int64)
        told = all_gather(row, self._backend, label="commit, sizes")
        self._sizes = [(size, file_bytes) for size, file_bytes, *_ in told.tolist()]
        self._holdings = [holding for _, _, *holding in told.tolist()]
        self._twins.clear()

    def _size_of(self, record: bytes) -> tuple[int, int]:
        """Bytes of this rank's part, and of its file."""
        file_bytes = self._layout.places.size
        return file_bytes + len(record), file_bytes

    def _write(self, layout: FileLayout, sources: Sequence[Array], memory: Bytes) -> None:
        """Copy the arrays to where they are in the file; nobody reads what is beside them."""
        places = layout.places
        ordered = [sources[index] for index in places.order]
        at = places.data_start
        memory[:at] = 0
        for group in fetched(ordered, self._backend.device):
            for chunk in chain.from_iterable(map(chunks, group)):
                memory[at : at + chunk.nbytes] = np.frombuffer(chunk, np.uint8)
                at += chunk.nbytes
        assert at == places.table
        memory[at : places.size] = 0

    def _record(self, prepared: PreparedSave) -> bytes:
        if prepared.pieces is not self._pieces:  # the plan is another one
            self._pieces = prepared.pieces
            save_id = f"elastic-{self._generation}"
            self._layout = lay_out(prepared.pieces, save_id, self._backend.rank)
            self._told = json.dumps([encoded(each) for each in prepared.pieces])
        about: dict[str, Any] = {"state": prepared.rank_state}
        if prepared.plan is not None:  # rank 0 knows of all arrays, those without elements too
            about |= {"info": prepared.info, "arrays": prepared.plan.arrays}
        record = f'{{"about":{json.dumps(about)},"pieces":{self._told}}}'.encode()
        # So that it is mostly as long as that of the version before, and others need not be told.
        return record.ljust(-(-len(record) // _RECORD_STEP) * _RECORD_STEP)

    def _copy(
        self,
        own: Part,
        leaving: Collection[int],
        state: OwnState,
        before: Version | None,
    ) -> None:
        """Begin to send this rank's part, and to receive those that it is to keep for others.

        Of a replica, which holds the same, only the record is sent: the rest is copied here.

        Args:
            own: the part.
            leaving: ranks that keep no copies.
            state: of this rank.
            before: the version before, if it was made by the same plan.
        """
        backend, group = self._backend, self._copies
        keepers = holders(self._hosts, leaving)
        for rank, keeper in enumerate(keepers):
            if keeper != backend.rank:
                continue
            size, file_bytes = self._sizes[rank]
            memory = self._vault.room(size)
            part = own._replace(rank=rank, memory=memory, file_bytes=file_bytes)
            if before is not None and self._are_twins(rank, backend.rank):
                twin = self._twins.get(rank) or self._twin(self._vault.parts[before, rank])
                self._twins[rank] = twin
                self._write(twin.layout, sources_of(state, twin.pieces), memory)
                memory = part.memory[file_bytes:]
            self._under_way.append((group.irecv(memory, rank), part))
        keeper = keepers[backend.rank]
        if keeper is not None:
            twins = before is not None and self._are_twins(keeper, backend.rank)
            sent = own.memory[own.file_bytes :] if twins else own.memory
            self._under_way.append((group.isend(sent, keeper), None))

    def _are_twins(self, one: int, other: int) -> bool:
        """Whether two ranks hold the same of the state: they are replicas of each other."""
        return self._holdings[one] == self._holdings[other]

    def _twin(self, part: Part) -> _Twin:
        """Return how another rank has written its part of the version before."""
        pieces = pieces_of(part.record())
        return _Twin(pieces, lay_out(pieces, f"elastic-{self._generation}", part.rank))

    def spread(self, whole: Whole) -> None:
        """Begin to copy parts that only one host has; all ranks call it with the same version."""
        hosts, rank = self._hosts, self._backend.rank
        load = [0] * len(hosts)
        for number, keepers in enumerate(whole.keepers):
            others = [each for each in range(len(hosts)) if each not in keepers]
            far = [each for each in others if hosts[each] not in {hosts[at] for at in keepers}]
            if not far and (len(keepers) > 1 or not others):
                continue
            taker = min(far or others, key=lambda each: (load[each], each))
            load[taker] += 1
            key, tag = (whole.version, number), number + 1
            if rank == keepers[0]:
                sent = self._copies.isend(self._vault.parts[key].memory, taker, tag=tag)
                self._under_way.append((sent, None))
            elif rank == taker:
                size, file_bytes = whole.sizes[number]
                part = Part(*key, len(whole.keepers), self._vault.room(size), file_bytes)
                received = self._copies.irecv(part.memory, keepers[0], tag=tag)
                self._under_way.append((received, part))

    def wait(self) -> None:
        """Block until nothing is under way to or from this rank."""
        wait_all([work for work, _ in self._under_way], timeout=DISK_TIMEOUT)
        self._take_in()

    def settle(self, commit: int) -> None:
        """Forget what is older than a version that is complete on all ranks, if one is."""
        if commit >= 0:
            self._vault.keep_from(Version(self._generation, commit))
