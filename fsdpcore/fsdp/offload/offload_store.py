"""``OffloadStore``: where the engine puts the arrays of one unit that a rank holds all the time.

The engine tells a store before and after it uses them. The plain one does nothing: arrays are in
memory. A ``HostOffloadStore`` has those of a GPU in the memory of the host. A ``FileOffloadStore``
has them in the rank's ``MappedFile``, from which they are read before they are used, and to which
they go back::

    forward, backward    ahead(next unit)  begin(parameters)  gather   ...  reshard  end
    reduction            begin(gradients)  add  end
    norm of gradients    ahead(next unit)  begin(gradients)  read  end
    update               ahead(next unit)  begin(all)  update  end, gradients are discarded

The arrays are valid at any time: whatever uses one that no ``begin`` has announced gets it from the
disk page by page, and at the end of the step it goes back.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from fsdpcore.core.buffers import Allocate, Array
from fsdpcore.fsdp.offload.arrays import ArrayKind, PersistentArray
from fsdpcore.fsdp.offload.mapped_file import FileSpan, MappedFile, joined, pages
from fsdpcore.fsdp.offload.offload import Offload, OffloadStats


class OffloadStore:
    """Arrays of one unit that its rank holds all the time, here in memory.

    Args:
        empty: makes them, in memory that other ranks can be shown.
        private: makes those that no other rank is shown, an optimizer's state, as zeros; or it is
            ``empty`` again.
        persistent: what is planned, each kind in the order in which it is allocated. Parameters in
            a window are among them, but are not allocated here.

    Attributes:
        persistent: as given.
        held: bytes that were made, by kind; an optimizer may make more than was planned.
        depth: how many units are to be announced ahead of their use.
        away: kinds whose arrays are in the memory of the host, while a GPU computes.
    """

    depth = 0
    away: Collection[ArrayKind] = ()

    def __init__(
        self, empty: Allocate, private: Allocate, persistent: Sequence[PersistentArray]
    ) -> None:
        self.persistent = persistent
        self.held = dict.fromkeys(ArrayKind, 0)
        self._empty = empty
        self._private = private

    def allocate(self, kind: ArrayKind) -> Allocate:
        """Return what makes arrays of a kind."""
        make = self._memory(kind)

        def allocated(size: int, dtype: np.dtype[Any]) -> Array:
            array = make(size, dtype)
            self.note(kind, array)
            return array

        return allocated

    def zeros(self, kind: ArrayKind) -> Allocate:
        """Return what makes arrays of a kind that are zeros."""
        private = self._memory(kind) is self._private
        make, blank = self.allocate(kind), private and self._private is not self._empty

        def made(size: int, dtype: np.dtype[Any]) -> Array:
            array = make(size, dtype)
            if not blank:
                array.fill(0)
            return array

        return made

    def note(self, kind: ArrayKind, array: Array) -> None:
        """Count an array; for one that was made elsewhere, in a window."""
        self.held[kind] += array.nbytes

    def room(self, kind: ArrayKind) -> int | None:
        """Return the bytes for all arrays of a kind; None if any number can be made."""
        return None

    def _memory(self, kind: ArrayKind) -> Allocate:
        """Return what makes arrays of a kind where they are to be."""
        return self._private if kind is ArrayKind.STATE else self._empty

    def mark(self, kind: ArrayKind, array: Array) -> None:
        """Let a part of an array that was allocated here be of a kind, too."""

    def ahead(self, kinds: Sequence[ArrayKind]) -> None:
        """Begin to load arrays; does not block."""

    def forget(self) -> None:
        """Take note that what was announced by ``ahead`` is not used any more."""

    def begin(self, kinds: Sequence[ArrayKind], *, write: bool = False) -> None:
        """Have arrays loaded, to be read, or written as well; blocks until they are."""

    def end(self, kinds: Sequence[ArrayKind], *, written: bool = False) -> None:
        """Put arrays away, which were changed or not."""

    def discard(self, kinds: Sequence[ArrayKind]) -> None:
        """Forget what arrays hold: nobody reads them before they are written anew."""


class HostOffloadStore(OffloadStore):
    """Arrays of a GPU, of which some are in the memory of the host."""

    def __init__(
        self,
        policy: Offload,
        empty: Allocate,
        private: Allocate,
        pinned: Allocate,
        persistent: Sequence[PersistentArray],
    ) -> None:
        super().__init__(empty, private, persistent)
        self.away = frozenset(policy.kinds)
        self._pinned = pinned

    def _memory(self, kind: ArrayKind) -> Allocate:
        return self._pinned if kind in self.away else super()._memory(kind)


class FileOffloadStore(OffloadStore):
    """Arrays in a file, or some of them; made by ``OffloadFile``."""

    def __init__(
        self,
        files: OffloadFile,
        policy: Offload,
        empty: Allocate,
        private: Allocate,
        start: int,
        persistent: Sequence[PersistentArray],
    ) -> None:
        super().__init__(empty, private, persistent)
        self.depth = policy.ahead
        self._files = files
        self._kinds = policy.kinds
        self._spans: dict[ArrayKind, list[FileSpan]] = {kind: [] for kind in ArrayKind}
        self._free: dict[ArrayKind, list[FileSpan]] = {kind: [] for kind in ArrayKind}
        for each in persistent:
            if each.kind in policy.kinds:
                self._free[each.kind].append(FileSpan(start, start + pages(each.nbytes)))
                start += pages(each.nbytes)
        self._asked: set[FileSpan] = set()
        self._blank = set(ArrayKind)  # zeros, of which nothing is on the disk

    def _memory(self, kind: ArrayKind) -> Allocate:
        def mapped(size: int, dtype: np.dtype[Any]) -> Array:
            span = self._free[kind].pop(0)
            assert size * dtype.itemsize <= span.nbytes, f"too little room for {kind.value}"
            self._spans[kind].append(span)
            return self._files.file.array(span.start, size, dtype)

        return mapped if kind in self._kinds else OffloadStore._memory(self, kind)

    def room(self, kind: ArrayKind) -> int | None:
        if kind not in self._kinds:
            return None
        return sum(each.nbytes for each in self.persistent if each.kind is kind)

    def mark(self, kind: ArrayKind, array: Array) -> None:
        if kind in self._kinds:
            self._spans[kind].append(self._files.file.span(array))

    def _of(self, kinds: Iterable[ArrayKind]) -> list[FileSpan]:
        return joined([span for kind in kinds for span in self._spans[kind]])

    def ahead(self, kinds: Sequence[ArrayKind]) -> None:
        blank = self._blank.issuperset(kinds)
        for span in self._of(kinds):
            if span not in self._asked:
                self._asked.add(span)
                self._files.ahead(span, blank=blank)

    def forget(self) -> None:
        self._asked.clear()

    def begin(self, kinds: Sequence[ArrayKind], *, write: bool = False) -> None:
        spans = self._of(kinds)
        for span in spans:
            self._files.note(span)
        began = time.perf_counter()
        self.ahead(kinds)
        for span in spans:
            self._files.begin(span, write=write)
            self._asked.discard(span)
        self._files.stats.waited += time.perf_counter() - began

    def end(self, kinds: Sequence[ArrayKind], *, written: bool = False) -> None:
        if written:
            self._blank.difference_update(kinds)
        for span in self._of(kinds):
            self._asked.discard(span)
            self._files.end(span, written=written)

    def discard(self, kinds: Sequence[ArrayKind]) -> None:
        discarded = True
        for span in self._of(kinds):
            self._asked.discard(span)
            discarded &= self._files.discard(span)
        if discarded:
            self._blank.update(kinds)


class OffloadFile:
    """The file of one rank, in which the units have their stores.

    A unit's pages leave the process as soon as they are put away. Those that were changed are
    written meanwhile, and freed when the next ones are put away, so that nobody waits for the disk
    as long as it keeps pace.

    Attributes:
        file: on which the arrays are.
        stats: since the last ``restart``.
    """

    def __init__(self, policy: Offload, file: MappedFile) -> None:
        self.file = file
        self._evict = policy.evict
        self._writing: list[FileSpan] = []
        self.stats = OffloadStats(held=file.nbytes)

    def restart(self) -> None:
        """Begin new statistics, with everything put away."""
        self.settle()
        self.stats = OffloadStats(held=self.file.nbytes)

    def settle(self) -> None:
        """Put everything away, also what nobody has announced."""
        whole = FileSpan(0, self.file.nbytes)
        self.file.release(whole)
        self._writing.clear()
        if self._evict:
            self._free(whole)

    def ahead(self, span: FileSpan, *, blank: bool) -> None:
        """See ``OffloadStore.ahead``.

        What is ``blank`` needs pages, which a page fault would read.
        """
        self._keep(span)
        missing = span.nbytes - self.file.resident(span)
        if missing:
            self.stats.read += 0 if blank else missing
            self.file.ahead(span)

    def note(self, span: FileSpan) -> None:
        """Count what is needed now, and what of it is here."""
        self.stats.used += span.nbytes
        self.stats.ready += self.file.resident(span)

    def begin(self, span: FileSpan, *, write: bool) -> None:
        """See ``OffloadStore.begin``; after ``ahead``."""
        self._keep(span)
        self.file.load(span, write=write)

    def end(self, span: FileSpan, *, written: bool) -> None:
        """See ``OffloadStore.end``."""
        self.file.release(span)
        if written:
            self.stats.written += span.nbytes
        if not self._evict:
            return
        self._keep(span)
        if written:
            self.file.write(span)
        for earlier in self._writing:
            self._free(earlier)
        self._writing.clear()
        if written:
            self._writing.append(span)
        else:
            self._free(span)

    def discard(self, span: FileSpan) -> bool:
        """See ``OffloadStore.discard``; returns whether the span is blank now."""
        self._keep(span)
        if self.file.discard(span):
            return True
        self.end(span, written=True)
        return False

    def _keep(self, span: FileSpan) -> None:
        """Do not free what is used again."""
        self._writing = [
            each for each in self._writing if each.stop <= span.start or span.stop <= each.start
        ]

    def _free(self, span: FileSpan) -> None:
        began = time.perf_counter()
        self.file.evict(span)
        self.stats.flushed += time.perf_counter() - began
