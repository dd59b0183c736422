"""``Stream``: batches of a dataset, and how far one has come."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.buffers import bounds_of, split_sizes
from fsdpcore.core.checks import as_instance, as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.data.permutation import permuted
from fsdpcore.data.sources import read_rows, row_count

_SEEDS = 2**64


@dataclass(frozen=True)
class Batch:
    """A batch of all ranks together, made by a ``Stream``.

    ``batch[leaf]`` reads the rows of one leaf: of an array a new array, of other sequences a list,
    of a tuple or dict of such each of its parts. Leaves get equally many rows, or one more; some
    get none at the end of an epoch.

    Attributes:
        size: rows of all leaves together. Gradients that are summed over rows are divided by it:
            ``engine.step(divisor=batch.size)``.
        epoch: how often the dataset was gone through before, from 0.
        start: how many rows of the epoch come before this batch.
        last: it is the last one of its epoch.

    Example::

        x, y = batch[leaf]
    """

    size: int
    epoch: int
    start: int
    last: bool
    _stream: Stream

    def __len__(self) -> int:
        return self._stream.leaves

    def __getitem__(self, leaf: int) -> Any:
        return read_rows(self._stream.source, self.indices(leaf))

    def indices(self, leaf: int) -> NDArray[np.int64]:
        """Return the numbers of a leaf's rows in the dataset.

        Args:
            leaf: which share of the batch, from 0.

        Returns:
            A new array (rows of the leaf,), in the order in which ``batch[leaf]`` has them.

        Raises:
            IndexError: the stream has no such leaf.
        """
        leaf = operator.index(leaf)
        if not 0 <= leaf < len(self):
            raise IndexError(f"leaf {leaf} of a stream that has leaves 0 to {len(self) - 1}")
        first, stop = bounds_of(split_sizes(self.size, len(self)))[leaf : leaf + 2]
        places = np.arange(self.start + first, self.start + stop, dtype=np.int64)
        return self._stream.order(places, self.epoch)


class Stream:
    """Batches of a dataset, whose order depends on the seed and the position only.

    All ranks make the same stream, and go through the same batches. Each reads the rows of its own
    leaves. A leaf is a fixed share of every batch: a virtual rank (``engine.leaves``), or simply a
    rank. So every row is used exactly once in an epoch, on any number of ranks, also when that
    changes in the middle. ::

        stream = fc.data.Stream((images, labels), 64, leaves=backend.world_size, seed=7)
        for batch in stream:
            x, y = batch[backend.rank]
            with engine.step(divisor=batch.size) as step:
                ...

    Nothing is sent, and nothing kept but the position: the place of each row is computed. The
    position is part of a checkpoint as ``stream.state_dict()``, equal on all ranks. A batch counts
    as used once the stream has given it, so what is saved behind the step of a batch goes on with
    the next one.

    Args:
        source: an array of which axis 0 are the rows (NumPy's, a memory-mapped one, anything that
            takes an array of indices); or a sequence with ``len()`` and ``[]``; or a tuple or dict
            of such, of equal length. It is kept, and read when rows are asked for. Windows of a
            long array are ``np.lib.stride_tricks.sliding_window_view(tokens, 257)[::256]``.
        batch_size: rows of all leaves together. The last batch of an epoch has what is left.
        leaves: how many shares a batch has.
        seed: of the order, in which every epoch differs; a non-negative integer below 2**64.
        shuffle: False goes through the rows as they lie.
        drop_last: leave out the last batch of an epoch where it is smaller than the others.
        epochs: after how many of them the stream ends; without it, never.

    Attributes:
        source, batch_size, leaves, seed, shuffle, drop_last, epochs: as given.
        rows: of the dataset.
        epoch: of the next batch.
        used: rows of this epoch that were given.

    Raises:
        ArgumentError: of such arguments no stream can be made.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int,
        *,
        leaves: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        epochs: int | None = None,
    ) -> None:
        self.source = source
        self.rows = as_int(row_count(source), "the number of rows", minimum=1)
        self.batch_size = as_int(batch_size, "batch_size", minimum=1)
        self.leaves = as_int(leaves, "leaves", minimum=1)
        self.seed = as_int(seed, "seed", minimum=0, maximum=_SEEDS - 1)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.epochs = None if epochs is None else as_int(epochs, "epochs", minimum=0)
        if self.drop_last and self.batch_size > self.rows:
            raise ArgumentError(
                f"drop_last=True leaves nothing of {self.rows} rows in batches of "
                f"{self.batch_size}; take a smaller batch_size"
            )
        self.epoch = self.used = 0

    def __repr__(self) -> str:
        return (
            f"<Stream of {self.rows} rows in batches of {self.batch_size}, {self.leaves} leaves: "
            f"epoch {self.epoch}, {self.used} rows used>"
        )

    @property
    def batches(self) -> int:
        """How many batches an epoch has."""
        return self._available // self.batch_size + bool(self._available % self.batch_size)

    @property
    def _available(self) -> int:
        """Rows that an epoch uses."""
        return self.rows - (self.rows % self.batch_size if self.drop_last else 0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Give the next batch, which counts as used from now on."""
        if self.epochs is not None and self.epoch >= self.epochs:
            raise StopIteration
        start, stop = self.used, min(self.used + self.batch_size, self._available)
        batch = Batch(stop - start, self.epoch, start, stop == self._available, self)
        if batch.last:
            self.epoch, self.used = self.epoch + 1, 0
        else:
            self.used = stop
        return batch

    def order(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return which rows of the dataset come at some places of an epoch.

        Args:
            places: (n,) int64, from 0: how many rows of the epoch come before each.
            epoch: from 0.

        Returns:
            The numbers of the rows, (n,) int64; ``places`` itself without ``shuffle``.
        """
        return permuted(places, self.rows, (self.seed, epoch)) if self.shuffle else places

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position, as JSON holds it; equal on all ranks that go through one stream."""
        return {
            "rows": self.rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "used": self.used,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` has returned, whatever the batch size and the leaves are.

        Seed and order are those of the state.

        Args:
            state: what ``state_dict`` has returned, of a stream of the same dataset; only read.

        Raises:
            ArgumentError: it is no such state, or that of another dataset; nothing was changed.
        """
        as_instance(state, Mapping, "the state of a stream", "a mapping", "see state_dict()")
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ArgumentError(f"the state of a stream has no {', '.join(sorted(missing))}")
        if state["rows"] != self.rows:
            raise ArgumentError(
                f"the state is that of a dataset of {state['rows']} rows, this one has "
                f"{self.rows}; open the dataset that was trained on"
            )
        epoch = as_int(state["epoch"], "the state's epoch", minimum=0)
        used = as_int(state["used"], "the state's used rows", minimum=0, maximum=self.rows - 1)
        seed = as_int(state["seed"], "the state's seed", minimum=0, maximum=_SEEDS - 1)
        if used >= self._available:  # what is left are rows that this stream drops
            epoch, used = epoch + 1, 0
        self.epoch, self.used, self.seed = epoch, used, seed
        self.shuffle = bool(state["shuffle"])
