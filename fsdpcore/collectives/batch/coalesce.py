"""``coalesce``: many small collectives in few messages.

A message costs alpha + n beta; of small arrays, nearly all is alpha. The calls of a batch are put
together where they can share messages: reductions of equal op, dtype and root, movements of equal
kind and root, whatever their dtypes. Each such pack travels as one collective of one flat buffer,
and one exchange of digests covers the whole batch. What each call returns has the bits that it
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
from fsdpcore.collectives.batch.device_batch import carry_out_on_device
from fsdpcore.collectives.batch.packs import BatchedCall, LoadedPack, Pack, PackKey
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.dissemination import exchange_texts
from fsdpcore.collectives.fingerprint import Fingerprint
from fsdpcore.collectives.on_device import device_twin
from fsdpcore.collectives.operations.all_gather import ALL_GATHER
from fsdpcore.collectives.operations.all_reduce import ALL_REDUCE
from fsdpcore.collectives.operations.all_to_all import ALL_TO_ALL
from fsdpcore.collectives.operations.broadcast import BROADCAST
from fsdpcore.collectives.operations.gather import GATHER
from fsdpcore.collectives.operations.perform import spec_of
from fsdpcore.collectives.operations.reduce import REDUCE
from fsdpcore.collectives.operations.reduce_scatter import REDUCE_SCATTER
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.run import run
from fsdpcore.collectives.selection.choose import choose
from fsdpcore.collectives.spec import CallSpec, Choice, Operation
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.disagreement import check_same
from fsdpcore.core.errors import StateError
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

    Returns:
        The batch, to be used in a ``with`` statement.

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
    """Collectives that are carried out together; ``coalesce`` makes it.

    Those with a method here can be batched: not scan, exscan, scatter and the ragged ones. No
    method blocks: each returns a ``Work`` at once, which has its result when the batch has ended.
    Until then ``array`` must not change, and ``out`` must not be read. A method raises
    ``ArgumentError`` at once if an argument is wrong, and ``StateError`` outside of the block.
    """

    def __init__(
        self, backend: Backend, *, timeout: float | None, async_op: bool, label: str
    ) -> None:
        check_backend(backend)
        self._backend = backend
        self._timeout = Deadline(backend.timeout if timeout is None else timeout).seconds
        self._async_op = async_op
        self._label = label
        self._packs: dict[PackKey, Pack] = {}
        self._device_calls: list[BatchedCall] = []
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
        device_calls, self._device_calls = self._device_calls, []
        if error is not None:
            text = f"its batch was left by an exception, nothing was sent: {error!r}"
            self._failure = StateError(text)
            return
        try:
            self._run(packs, device_calls)
        except BaseException as failure:
            self._failure = failure
            raise

    def _run(self, packs: list[Pack], device_calls: list[BatchedCall]) -> None:
        """Carry out what there is of each kind; a batch of nothing is one of the host."""
        backend, found = self._backend, []
        if packs or not device_calls:
            found.append(self._start(backend, lambda context: _carry_out(context, backend, packs)))
        if device_calls:
            group = device_twin(backend)
            found.append(
                self._start(
                    group, lambda context: carry_out_on_device(context, group, device_calls)
                )
            )
        self._parts = found

    def _start(
        self, group: Backend, carry_out: Callable[[CollectiveContext], dict[int, Array | None]]
    ) -> Any:
        calls = [*self._calls, f"label {self._label!r}"]
        digest = hashlib.blake2b("\n".join(calls).encode(errors="backslashreplace"), digest_size=8)
        # Every rank learns every other's number of rows: here, the digest of its calls.
        rows = int.from_bytes(digest.digest(), "little")
        fingerprint = Fingerprint("coalesce", shape=(rows,), ragged=True)

        def body(context: CollectiveContext) -> dict[int, Array | None]:
            if any(other != rows for other in context.rows):
                _refuse(context, self._calls, self._label)
            return carry_out(context)

        return run(
            group, CallSpec(fingerprint), body, timeout=self._timeout, async_op=self._async_op
        )

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
        """Combine the arrays of all ranks elementwise; every rank gets the result.

        Args:
            array: of any shape; of equal shape and dtype on all ranks.
            op: how values are combined: a ``ReduceOp`` or the name of one.
            out: array of the result's shape and dtype to write to, which may be the input; None
                makes a new one.

        Returns:
            A ``Work``, whose result has the shape and dtype of ``array``.
        """
        return self._add(ALL_REDUCE, array, out, op=op)

    def reduce(
        self,
        array: ArrayLike,
        *,
        root: int = 0,
        op: ReduceOp | str = "sum",
        out: Array | None = None,
    ) -> Work:
        """Combine the arrays of all ranks elementwise; the root gets the result.

        Args:
            array: of any shape; of equal shape and dtype on all ranks.
            root: the rank that gets the result; the same on all ranks.
            op: how values are combined: a ``ReduceOp`` or the name of one.
            out: array of the result's shape and dtype to write to, which may be the input; None
                makes a new one. Ignored but on the root.

        Returns:
            A ``Work``, whose result has the shape and dtype of ``array``; None but on the root.
        """
        return self._add(REDUCE, array, out, op=op, root=root)

    def reduce_scatter(
        self, array: ArrayLike, *, op: ReduceOp | str = "sum", out: Array | None = None
    ) -> Work:
        """Combine the arrays of all ranks elementwise; each rank gets its part of axis 0.

        Args:
            array: of at least one axis; of equal shape and dtype on all ranks. The first ranks get
                one row more where axis 0 does not divide evenly.
            op: how values are combined: a ``ReduceOp`` or the name of one.
            out: array of the result's shape and dtype to write to, which may be this rank's part of
                the input; None makes a new one.

        Returns:
            A ``Work``, whose result is an array ``(rows of this rank, *array.shape[1:])``.
        """
        return self._add(REDUCE_SCATTER, array, out, op=op)

    def broadcast(self, array: ArrayLike, *, root: int = 0, out: Array | None = None) -> Work:
        """Copy the root's array to all ranks; the others pass one of equal shape and dtype.

        Args:
            array: of any shape; what it holds is read on the root only.
            root: the rank that sends its array; the same on all ranks.
            out: array of that shape and dtype to write to, which may be the input; None makes a
                new one.

        Returns:
            A ``Work``, whose result is the root's array.
        """
        return self._add(BROADCAST, array, out, root=root)

    def all_gather(self, array: ArrayLike, *, out: Array | None = None) -> Work:
        """Join the arrays of all ranks, which have equal shapes, along axis 0.

        Args:
            array: of any shape; of equal shape and dtype on all ranks.
            out: array of the result's shape and dtype to write to, of which the input may be this
                rank's part; None makes a new one.

        Returns:
            A ``Work``, whose result is an array ``(world_size * rows, *array.shape[1:])``, in rank
            order, the same on every rank; of 0-d arrays ``(world_size,)``.
        """
        return self._add(ALL_GATHER, array, out)

    def gather(self, array: ArrayLike, *, root: int = 0, out: Array | None = None) -> Work:
        """Join the arrays of all ranks, which have equal shapes, along axis 0; the root gets it.

        Args:
            array: of any shape; of equal shape and dtype on all ranks.
            root: the rank that gets the result; the same on all ranks.
            out: array of the result's shape and dtype to write to, of which the input may be this
                rank's part; None makes a new one. Ignored but on the root.

        Returns:
            A ``Work``, whose result is as of ``all_gather``; None but on the root.
        """
        return self._add(GATHER, array, out, root=root)

    def all_to_all(self, array: ArrayLike, *, out: Array | None = None) -> Work:
        """Send part r of axis 0 to each rank r; join what arrives, in rank order.

        Args:
            array: of at least one axis; of equal shape and dtype on all ranks.
            out: array of the result's shape and dtype to write to, which may be the input; None
                makes a new one.

        Returns:
            A ``Work``, whose result has a row for each that arrived here.
        """
        return self._add(ALL_TO_ALL, array, out)

    def _add(
        self,
        definition: Operation,
        array: ArrayLike,
        out: Array | None,
        *,
        op: ReduceOp | str = "",
        root: int = -1,
    ) -> Work:
        source, group = operand(array, self._backend)
        if definition.reduces:
            Reduction.of(op, source.dtype)  # refuses what a call by itself would convert
        spec = spec_of(group, definition, source.dtype, source.shape, op=op, root=root)
        gives = definition.gives(group.rank, spec.layout)
        output = Output(out, spec.out_shape, source.dtype, group.moves) if gives else None
        if self._state != "open":
            raise StateError("a batch takes calls inside its with block only")
        call = BatchedCall(len(self._calls), spec, source.reshape(-1), output)
        on_host = group.moves.on_host
        self._calls.append(f"{spec.fingerprint}{'' if on_host else ' on the device'}")
        if on_host:
            key = PackKey.of(spec)
            self._packs.setdefault(key, Pack(key)).calls.append(call)
        else:
            self._device_calls.append(call)
        return BatchedWork(self, call.number)

    def __repr__(self) -> str:
        label = f" {self._label!r}" if self._label else ""
        state = "under way" if self._state == "ended" and not self._ended() else self._state
        return f"<Batch{label} of {len(self._calls)} calls, {state}>"


def _carry_out(
    context: CollectiveContext, backend: Backend, packs: list[Pack]
) -> dict[int, Array | None]:
    """Run the packs' collectives; return the results by the numbers of the calls."""
    loaded: list[tuple[LoadedPack, Choice]] = []
    for pack in packs:  # all of them first: a result may be written to another call's input
        one = pack.load(context.rank, context.size)
        definition, dtype, op, _ = pack.key
        nbytes = definition.size(one.data.nbytes, context.size)
        choice = choose(definition.name, "auto", nbytes, backend, dtype, op.value if op else "")
        loaded.append((one, choice.fallback or choice))  # what is packed is not published
    for one, choice in loaded:
        one.move(context, choice)
    return {
        call.number: None if call.output is None else call.output.deliver()
        for pack in packs
        for call in pack.calls
    }


def _refuse(context: CollectiveContext, calls: list[str], label: str) -> None:
    """Exchange the calls in full, and raise where they first differ; the same on every rank."""
    texts = exchange_texts(context, json.dumps([label, *calls]))
    title = f"collective #{context.sequence}, coalesce"
    labels, batches = [], []
    for text in texts:
        theirs, *batch = json.loads(text)
        labels.append([f"label {theirs!r}"])
        batches.append(batch)
    check_same(
        batches,
        context.ranks,
        lambda found: found.lines(f"{title}: call {found.position + 1} of the batch"),
    )
    check_same(labels, context.ranks, lambda found: found.lines(f"{title}: the batch"))
