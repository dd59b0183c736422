"""``Offload``: what a rank holds all the time is out of memory while nobody uses it.

An ``OffloadStore`` is where the engine puts the arrays of one unit, and what it tells before and
after it uses them. The plain one does nothing: arrays are in memory. A ``HostOffloadStore`` has
those of a GPU in the memory of the host. A ``FileOffloadStore`` has them in the rank's
``MappedFile``, from which they are read before they are used, and to which they go back::

    forward, backward    ahead(next unit)  begin(parameters)  gather   ...  reshard  end
    reduction            begin(gradients)  add  end
    norm of gradients    ahead(next unit)  begin(gradients)  read  end
    update               ahead(next unit)  begin(all)  update  end, gradients are discarded

The arrays are valid at any time: whatever uses one that no ``begin`` has announced gets it from the
disk page by page, and at the end of the step it goes back.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ConfigError
from fsdpcore.fsdp.offload.mapped_file import FileSpan, MappedFile, joined, pages
from fsdpcore.fsdp.units.buffer_pool import Allocate

if TYPE_CHECKING:
    from fsdpcore.fsdp.units.unit import Unit


class ArrayKind(enum.Enum):
    """What an array of a unit is for.

    ``OWN`` is the part of ``TRAINED`` that this rank writes: all of it, or a slice where the rank
    keeps everybody's.
    """

    FROZEN = "frozen parameters"
    TRAINED = "trained parameters"
    OWN = "own trained parameters"
    MASTER = "trained parameters at full precision"
    STATE = "optimizer state"
    GRADIENT = "gradients"


GATHERED = (ArrayKind.FROZEN, ArrayKind.TRAINED)
WRITTEN = (ArrayKind.FROZEN, ArrayKind.OWN, ArrayKind.MASTER)
UPDATED = (ArrayKind.OWN, ArrayKind.MASTER, ArrayKind.STATE)
GRADIENTS = (ArrayKind.GRADIENT,)
INITIAL = (ArrayKind.FROZEN, ArrayKind.TRAINED, ArrayKind.MASTER, ArrayKind.STATE)

Needs = Mapping[ArrayKind, Sequence[int]]
"""Sizes in bytes of a unit's arrays, by kind, in the order in which they are allocated."""


@dataclass(frozen=True)
class Offload:
    """What is kept out of memory while it is not in use; the same on all ranks.

    On the host: in files that are mapped into memory. Each rank has one, without a name, so that
    nothing is left of it when the process ends. Its place on the disk is reserved when the engine
    is made. Parameters are not in a window of the host then. Gathered parameters, full gradients
    and what ``no_sync`` keeps stay in memory, for as long as the strategy says.

    On a GPU: in memory of the host that the GPU reads and writes from where it is, so that nothing
    has to be loaded. Gathered parameters and full gradients are in the GPU's own memory.

    Args:
        directory: where the files are, on a disk: not on a file system in memory, such as tmpfs,
            where nothing would be gained. An engine on the host needs one; there is no default,
            since the system's directory for temporary files often is in memory. None on a GPU.
        what: "parameters": shards of parameters, and where all ranks keep all parameters, these;
            with mixed precision the master shards too. "all": also shards of gradients, and the
            optimizer's state.
        ahead: so many units that come next are read from files ahead of their use; 0 for none.
        evict: have pages of files written and freed as soon as they are not in use. With False they
            leave the process, but stay in the system's cache until it needs the memory for
            something else: faster while there is enough.

    Raises:
        ConfigError: something of this makes no sense.
    """

    directory: str | os.PathLike[str] | None = None
    what: Literal["parameters", "all"] = "parameters"
    ahead: int = 1
    evict: bool = True

    def __post_init__(self) -> None:
        if self.directory is not None:
            given = self.directory
            path: Any = os.fspath(given) if isinstance(given, os.PathLike) else given
            if not path or not isinstance(path, str):
                raise ConfigError(
                    f"directory of Offload must be a path such as '/scratch', got {given!r}"
                )
            object.__setattr__(self, "directory", path)
        if self.what not in ("parameters", "all"):
            raise ConfigError(f"Offload: what must be 'parameters' or 'all', got {self.what!r}")
        as_int(self.ahead, "ahead of Offload (in units)", minimum=0, error=ConfigError)
        if not isinstance(self.evict, bool):
            raise ConfigError(f"evict of Offload must be True or False, got {self.evict!r}")

    @property
    def kinds(self) -> tuple[ArrayKind, ...]:
        """What is offloaded."""
        if self.what == "all":
            return tuple(ArrayKind)
        return (*GATHERED, *WRITTEN)


@dataclass
class OffloadStats:
    """What one rank moved between memory and disk since its last step began.

    Attributes:
        held: bytes of its file.
        used: bytes that were announced to be used.
        ready: of these, those that were in memory when they were needed.
        read: bytes that were not in memory when they were asked for.
        written: bytes that were changed, and are on their way to the disk or there.
        waited: seconds in which the rank waited until what it needed was in memory.
        flushed: seconds in which it waited until what it had changed was on the disk.
    """

    held: int = 0
    used: int = 0
    ready: int = 0
    read: int = 0
    written: int = 0
    waited: float = 0.0
    flushed: float = 0.0


class OffloadStore:
    """Arrays of one unit that its rank holds all the time, here in memory.

    Attributes:
        depth: how many units are to be announced ahead of their use.
        away: kinds whose arrays are in the memory of the host, while a GPU computes.
    """

    depth = 0
    away: Collection[ArrayKind] = ()

    def __init__(self, empty: Allocate) -> None:
        self._empty = empty

    def allocate(self, kind: ArrayKind) -> Allocate:
        """Return what makes arrays of a kind."""
        return self._empty

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

    def __init__(self, policy: Offload, empty: Allocate, pinned: Allocate) -> None:
        super().__init__(empty)
        self.away = frozenset(policy.kinds)
        self._pinned = pinned

    def allocate(self, kind: ArrayKind) -> Allocate:
        return self._pinned if kind in self.away else self._empty


def in_turn(units: Iterable[Unit], *uses: Sequence[ArrayKind]) -> Iterator[Unit]:
    """Go through units while arrays of those that come next are loaded, for one ``begin`` each."""
    queue = tuple(units)
    for number, unit in enumerate(queue):
        for each in queue[number : number + 1 + unit.store.depth]:
            for kinds in uses:
                each.store.ahead(kinds)
        yield unit


class FileOffloadStore(OffloadStore):
    """Arrays in a file, or some of them; made by ``OffloadFile``."""

    def __init__(
        self, files: OffloadFile, policy: Offload, empty: Allocate, start: int, needs: Needs
    ) -> None:
        super().__init__(empty)
        self.depth = policy.ahead
        self._files = files
        self._kinds = policy.kinds
        self._spans: dict[ArrayKind, list[FileSpan]] = {kind: [] for kind in ArrayKind}
        self._free: dict[ArrayKind, list[FileSpan]] = {}
        for kind, sizes in needs.items():
            self._free[kind] = []
            for size in sizes:
                self._free[kind].append(FileSpan(start, start + pages(size)))
                start += pages(size)
        self._asked: set[FileSpan] = set()
        self._blank = set(ArrayKind)  # zeros, of which nothing is on the disk

    def allocate(self, kind: ArrayKind) -> Allocate:
        def mapped(size: int, dtype: np.dtype[Any]) -> Array:
            span = self._free[kind].pop(0)
            assert pages(size * dtype.itemsize) == span.nbytes, f"{kind.value} were planned wrongly"
            self._spans[kind].append(span)
            return self._files.file.array(span.start, size, dtype)

        return mapped if kind in self._kinds else self._empty

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
