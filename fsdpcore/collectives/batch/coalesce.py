"""``coalesce``: many small collectives in few messages.

A message costs alpha + n beta; of small arrays, nearly all is alpha. The calls of a batch are put
together where they can share messages: reductions of equal op, dtype and root, movements of equal
kind and root, whatever their dtypes. Each such pack travels as one collective of one flat buffer,
and one exchange of fingerprints covers the whole batch. What each call returns has the bits that it
would have by itself where the algorithm is canonical: reductions combine each element on its own,
in an order that depends on nothing but the number of ranks.

It pays where messages are dear, that is between hosts. Among ranks of one host that share memory, a
small collective by itself costs no more than the bookkeeping of a batch does for it.

Arrays of a GPU are not packed: their calls are given to the device as one group, which it launches
together. Where a batch has arrays of both kinds, it is one collective of each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any

from numpy.typing import ArrayLike

from fsdpcore.collectives.arguments import check_backend, operand
from fsdpcore.collectives.batch.device_batch import DeviceItem, carry_out_on_device
from fsdpcore.collectives.batch.packs import CARRIERS, Item, Key, Pack
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.fingerprint import Fingerprint, exchange_texts
from fsdpcore.collectives.on_device import device_twin
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.run import run
from fsdpcore.collectives.selection.choose import choose
from fsdpcore.collectives.spec import CallSpec
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, bounds_of, byte_view, dtype_code, row_size, split_sizes
from fsdpcore.core.checks import as_rank
from fsdpcore.core.device import Device
from fsdpcore.core.disagreement import check_same
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.core.reductions import ReduceOp, Reduction
from fsdpcore.core.work import Deadline, Work, fresh


def coalesce(
    backend: Backend, *, timeout: float | None = None, async_op: bool = False, label: str = ""
) -> Batch:
    """Collect collectives in a ``with`` block, and carry them out together at its end.

    ::

        with fc.coalesce(backend) as batch:
            loss = batch.all_reduce(loss, op="mean")
            norms = batch.all_gather(norms)
        print(loss.result(), norms.result())

    All ranks of the group make a batch with the same calls in the same order, which counts as one
    collective. The calls are independent of each other: all inputs are read before any result is
    written, at some time between the call and the end of the batch, until which they must not
    change. Where the block is left by an exception, nothing is sent.

    Args:
        backend: the group.
        timeout: seconds for the whole batch; by default ``backend.timeout``.
        async_op: leave the block without waiting; ``wait()`` for the calls' works instead.
        label: what the batch is for; compared between the ranks and named in errors.

    Raises:
        MismatchError: at the end of the block: the ranks' batches differ; names the first call
            in which they do.
        CommTimeoutError, PeerFailedError: at the end of the block, as of any collective.
    """
    return Batch(backend, timeout=timeout, async_op=async_op, label=label)


class BatchedWork(Work):
    """One call of a batch; can be waited for once the batch's block has ended."""

    def __init__(self, batch: Batch, number: int) -> None:
        self._batch = batch
        self._number = number

    def done(self) -> bool:
        return self._batch._ended()

    def _words(self) -> str:
        return f"call {self._number} of {self._batch!r}"

    def wait(self, timeout: float | None = None) -> Any:
        """Return the call's result; raises ``StateError`` while the batch's block is open."""
        return self._batch._results(timeout)[self._number]


class Batch:
    """Collectives that are carried out together; made by ``coalesce``.

    The methods take what the functions of the same names take: ``array``, which is not to change
    until the batch has ended, and ``op``, ``root`` and ``out``; but no ``algorithm``, ``timeout``
    or ``async_op``. Each returns a ``Work`` at once, which has its result when the batch has ended,
    and raises ``ArgumentError`` at once.
    """

    def __init__(
        self, backend: Backend, *, timeout: float | None, async_op: bool, label: str
    ) -> None:
        check_backend(backend)
        self._backend = backend
        self._timeout = Deadline(backend.timeout if timeout is None else timeout).seconds
        self._async_op = async_op
        self._label = label
        self._packs: dict[Key, Pack] = {}
        self._device_items: list[DeviceItem] = []
        self._calls: list[str] = []
        self._state = "new"
        self._parts: list[Any] = []  # results, or works that give them
        self._failure: BaseException | None = None

    # The block.

    def __enter__(self) -> Batch:
        if self._state != "new":
            raise StateError("a batch is for one block; make another one with coalesce()")
        self._state = "open"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._state = "ended"
        packs, self._packs = list(self._packs.values()), {}
        items, self._device_items = self._device_items, []
        if error is not None:
            text = f"its batch was left by an exception, nothing was sent: {error!r}"
            self._failure = StateError(text)
            return
        try:
            self._run(packs, items)
        except BaseException as failure:
            self._failure = failure
            raise

    def _run(self, packs: list[Pack], items: list[DeviceItem]) -> None:
        """Carry out what there is of each kind; a batch of nothing is one of the host."""
        backend, found = self._backend, []
        if packs or not items:
            found.append(self._start(backend, lambda link: _carry_out(link, backend, packs)))
        if items:
            group = device_twin(backend)
            found.append(self._start(group, lambda link: carry_out_on_device(link, group, items)))
        self._parts = found

    def _start(
        self, group: Backend, carry_out: Callable[[CollectiveContext], dict[int, Array | None]]
    ) -> Any:
        calls = [*self._calls, f"label {self._label!r}"]
        digest = hashlib.blake2b("\n".join(calls).encode(errors="backslashreplace"), digest_size=8)
        # Every rank learns every other's number of rows: here, the digest of its calls.
        rows = int.from_bytes(digest.digest(), "little")
        fingerprint = Fingerprint("coalesce", shape=(rows,), ragged=True)

        def body(link: CollectiveContext) -> dict[int, Array | None]:
            if any(other != rows for other in link.rows):
                _refuse(link, self._calls, self._label)
            return carry_out(link)

        call = CallSpec(fingerprint)
        return run(group, call, body, timeout=self._timeout, async_op=self._async_op)

    def _ended(self) -> bool:
        """Return whether the results are there, or will never be."""
        if self._state != "ended":
            return False
        return not self._async_op or all(work.done() for work in self._parts)

    def _results(self, timeout: float | None) -> dict[int, Array | None]:
        """Block until the batch has ended; return the results of its calls by their numbers.

        Raises:
            StateError: the block has not ended, or was left by an exception.
            The errors of ``Work.wait``.
        """
        if self._state != "ended":
            raise StateError("the batch has not been sent; its results are there after the block")
        if self._failure is not None:
            raise fresh(self._failure)
        results: dict[int, Array | None] = {}
        for part in self._parts:
            results.update(part.wait(timeout) if self._async_op else part)
        return results

    # The calls.

    def all_reduce(
        self, array: ArrayLike, *, op: ReduceOp | str = "sum", out: Array | None = None
    ) -> Work:
        """Combine the arrays of all ranks elementwise; every rank gets the result."""
        source, device, reduction = self._reducible(array, op)
        output = Output(out, source.shape, source.dtype, device)
        return self._add("all_reduce", source, device, output, reduction=reduction)

    def reduce(
        self,
        array: ArrayLike,
        *,
        root: int = 0,
        op: ReduceOp | str = "sum",
        out: Array | None = None,
    ) -> Work:
        """Combine the arrays of all ranks elementwise; the root gets the result."""
        source, device, reduction = self._reducible(array, op)
        root = as_rank(root, self._backend.world_size, "reduce: root")
        mine = self._backend.rank == root
        output = Output(out, source.shape, source.dtype, device) if mine else None
        return self._add("reduce", source, device, output, root=root, reduction=reduction)

    def reduce_scatter(
        self, array: ArrayLike, *, op: ReduceOp | str = "sum", out: Array | None = None
    ) -> Work:
        """Combine the arrays of all ranks elementwise; each rank gets its part of axis 0."""
        source, device, reduction = self._reducible(array, op)
        counts = self._pieces(source, "reduce_scatter")
        rows = counts[self._backend.rank]
        output = Output(out, (rows, *source.shape[1:]), source.dtype, device)
        return self._add(
            "reduce_scatter", source, device, output, reduction=reduction, counts=counts
        )

    def broadcast(self, array: ArrayLike, *, root: int = 0, out: Array | None = None) -> Work:
        """Copy the root's array to all ranks; the others pass one of equal shape and dtype."""
        source, device = self._operand(array)
        root = as_rank(root, self._backend.world_size, "broadcast: root")
        output = Output(out, source.shape, source.dtype, device)
        return self._add("broadcast", source, device, output, root=root)

    def all_gather(self, array: ArrayLike, *, out: Array | None = None) -> Work:
        """Join the arrays of all ranks, which have equal shapes, along axis 0."""
        source, device = self._operand(array)
        return self._add("all_gather", source, device, self._joined(source, out, device))

    def gather(self, array: ArrayLike, *, root: int = 0, out: Array | None = None) -> Work:
        """Join the arrays of all ranks, which have equal shapes, along axis 0; the root gets it."""
        source, device = self._operand(array)
        root = as_rank(root, self._backend.world_size, "gather: root")
        output = self._joined(source, out, device) if self._backend.rank == root else None
        return self._add("gather", source, device, output, root=root)

    def all_to_all(self, array: ArrayLike, *, out: Array | None = None) -> Work:
        """Send part r of axis 0 to each rank r; join what arrives, in rank order."""
        source, device = self._operand(array)
        counts = self._pieces(source, "all_to_all")
        rows = self._backend.world_size * counts[self._backend.rank]
        output = Output(out, (rows, *source.shape[1:]), source.dtype, device)
        return self._add("all_to_all", source, device, output, counts=counts)

    def _operand(self, array: ArrayLike) -> tuple[Array, Device]:
        source, group = operand(array, self._backend)
        dtype_code(source.dtype)
        return source, group.moves

    def _reducible(self, array: ArrayLike, op: ReduceOp | str) -> tuple[Array, Device, Reduction]:
        source, device = self._operand(array)
        return source, device, Reduction.of(op, source.dtype)

    def _pieces(self, source: Array, operation: str) -> list[int]:
        if source.ndim == 0:
            raise ArgumentError(f"{operation} splits axis 0, which a 0-d array does not have")
        return split_sizes(source.shape[0], self._backend.world_size)

    def _joined(self, source: Array, out: Array | None, device: Device) -> Output:
        rows, rest = (source.shape[0], source.shape[1:]) if source.ndim else (1, ())
        return Output(out, (self._backend.world_size * rows, *rest), source.dtype, device)

    def __repr__(self) -> str:
        label = f" {self._label!r}" if self._label else ""
        state = "under way" if self._state == "ended" and not self._ended() else self._state
        return f"<Batch{label} of {len(self._calls)} calls, {state}>"

    def _add(
        self,
        collective: str,
        source: Array,
        device: Device,
        output: Output | None,
        *,
        root: int = -1,
        reduction: Reduction | None = None,
        counts: list[int] | None = None,
    ) -> Work:
        if self._state != "open":
            raise StateError("a batch takes calls inside its with block only")
        name = reduction.name if reduction is not None else ""
        where = "" if device.on_host else " on the device"
        words = str(Fingerprint(collective, source.dtype, source.shape, name, root))
        self._calls.append(words + where)
        number = len(self._calls) - 1
        if not device.on_host:
            bounds = bounds_of(counts, row_size(source.shape)) if counts is not None else []
            item = Item(number, source.reshape(-1), output, bounds)
            self._device_items.append(DeviceItem(collective, item, root, reduction))
            return BatchedWork(self, number)
        scale = 1 if reduction is not None else source.dtype.itemsize
        flat = source.reshape(-1) if reduction is not None else byte_view(source)
        bounds = bounds_of(counts, row_size(source.shape) * scale) if counts is not None else []
        key = Key(collective, flat.dtype, name, root)
        pack = self._packs.setdefault(key, Pack(key, reduction))
        pack.items.append(Item(number, flat, output, bounds))
        return BatchedWork(self, number)


def _carry_out(
    link: CollectiveContext, backend: Backend, packs: list[Pack]
) -> dict[int, Array | None]:
    """Run the packs' collectives; return the results by the numbers of the calls."""
    loaded: list[tuple[Callable[[Any], None], Any]] = []
    for pack in packs:  # all of them first: a result may be written to another call's input
        carrier = CARRIERS[pack.key.collective](link, pack)
        collective, dtype, op, _ = pack.key
        nbytes = carrier.elements * dtype.itemsize
        choice = choose(collective, "auto", nbytes, backend, dtype, op)
        # What is packed is not lent.
        loaded.append((carrier.move, (choice.staged or choice).function))
    for move, function in loaded:
        move(function)
    return {
        item.number: None if item.output is None else item.output.deliver()
        for pack in packs
        for item in pack.items
    }


def _refuse(link: CollectiveContext, calls: list[str], label: str) -> None:
    """Exchange the calls in full, and raise where they first differ; the same on every rank."""
    texts = exchange_texts(link, json.dumps([label, *calls]))
    title = f"collective #{link.sequence}, coalesce"
    labels, batches = [], []
    for text in texts:
        theirs, *batch = json.loads(text)
        labels.append([f"label {theirs!r}"])
        batches.append(batch)
    check_same(
        batches,
        link.ranks,
        lambda found: found.lines(f"{title}: call {found.position + 1} of the batch"),
    )
    check_same(labels, link.ranks, lambda found: found.lines(f"{title}: the batch"))
