"""NCCL communicators: made within a deadline, used by one thread at a time, ended by force or not.

What NCCL and CUDA raise becomes a ``CommunicationError`` here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from cupy.cuda import nccl, runtime

from fsdpcore.collectives.algorithms import tree
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ClosedError, CommTimeoutError, CommunicationError
from fsdpcore.core.work import Deadline, fresh

from .cuda_device import CudaDevice

_LOG = logging.getLogger("fsdpcore")

ID_BYTES = 128
# How long the end of communicators is waited for.
BOUND = 10.0
# How long a failure waits for a thread that is inside of NCCL, before the communicators are
# aborted under it. A call takes microseconds; one that takes longer will not come back by itself.
_CALL_SECONDS = 1.0
_SLICE = 0.05
# ``ncclInProgress``, which CuPy's NcclError does not know.
_IN_PROGRESS = 7

ERRORS = (nccl.NcclError, runtime.CUDARuntimeError)


def translated(error: Exception, what: str) -> CommunicationError:
    """The error of this package for one of NCCL or CUDA, raised by ``what``."""
    return CommunicationError(
        f"{what} failed: {error} (NCCL says more with the environment variable NCCL_DEBUG=INFO)"
    )


class Communicator:
    """One NCCL communicator of this rank.

    Args:
        nccl_communicator: CuPy's.
        lock: held around every call of NCCL: it takes one at a time for a GPU.
        failure: returns what the rank is broken by.

    Attributes:
        handle: CuPy's communicator. With ``lock`` held, and not once it is ``over``.
        over: it has been, or is being, destroyed or aborted.
    """

    def __init__(
        self,
        nccl_communicator: Any,
        lock: threading.RLock,
        failure: Callable[[], CommunicationError | None],
    ) -> None:
        self.handle = nccl_communicator
        self.lock = lock
        self.over = False
        self._failure = failure

    def call(self, name: str, *args: int) -> None:
        """Make one call. It returns when it is enqueued, or noted in an open group.

        Raises:
            CommunicationError: NCCL refuses, or the communicator is over.
        """
        with self.lock:
            self.check_open()
            try:
                getattr(self.handle, name)(*args)
            except ERRORS as error:
                raise self.refused(error, f"nccl.{name}") from error

    def check_open(self) -> None:
        """Raise if it is over; with the lock held."""
        if self.over:
            failure = self._failure()
            raise fresh(failure) if failure else ClosedError("the communicator has been ended")

    def refused(self, error: Exception, what: str) -> CommunicationError:
        """The error of a call that NCCL has not taken, or has left because of a failure."""
        failure = self._failure()
        return translated(error, what) if failure is None else fresh(failure)

    def check(self) -> None:
        """Raise if NCCL has met an error since; not now, if another thread is inside of NCCL.

        A call may wait there for other ranks, which is not to keep deadlines from being seen.

        Raises:
            CommunicationError: it has.
        """
        if not self.lock.acquire(timeout=_SLICE):
            return
        try:
            if self.over:
                return
            try:
                self.handle.check_async_error()
            except KeyError as error:  # a status that CuPy has no name for
                if error.args != (_IN_PROGRESS,):
                    raise CommunicationError(f"NCCL reports the status {error}") from error
            except ERRORS as error:
                raise translated(error, "a collective that was enqueued") from error
        finally:
            self.lock.release()

    def end(self, how: str) -> None:
        """Call ``abort`` or ``destroy``; may block for as long as NCCL likes."""
        getattr(self.handle, how)()


class Launches:
    """The calls of NCCL by this rank: by one thread at a time, and several as one group."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Launch the calls of a ``with`` block together, at its end; may be nested.

        Raises:
            CommunicationError: at the end: NCCL could not.
        """
        with self.lock:
            try:
                nccl.groupStart()
            except ERRORS as error:
                raise translated(error, "nccl.groupStart") from error
            try:
                yield
            except BaseException:
                # NCCL collects calls until told otherwise. What they would do is of no use.
                with contextlib.suppress(*ERRORS):
                    nccl.groupEnd()
                raise
            try:
                nccl.groupEnd()
            except ERRORS as error:
                raise translated(error, "nccl.groupEnd") from error


class Communicators:
    """All communicators of one rank.

    Args:
        device: its GPU.
        failure: returns what the rank is broken by.
        rank: for the names of threads and for messages.
    """

    def __init__(
        self, device: CudaDevice, failure: Callable[[], CommunicationError | None], rank: int
    ) -> None:
        self.launches = Launches()
        self._device = device
        self._failure = failure
        self._rank = rank
        self._made: list[Communicator] = []
        self._changing = threading.Lock()
        self._aborting: list[threading.Thread] = []
        self._aborted = False

    # Making.

    def new_id(self) -> Array:
        """A new unique id, as bytes to be told to all ranks of a communicator."""
        try:
            return np.frombuffer(bytes(nccl.get_unique_id()), np.uint8).copy()
        except ERRORS as error:
            raise translated(error, "nccl.get_unique_id") from error

    def meet(self, context: CollectiveContext) -> Communicator:
        """Make a communicator of a group, whose ranks all call this. Blocks until they have.

        Args:
            context: of a collective that runs; rank 0 tells the id by it, and its deadline counts.
        """
        told = self.new_id() if context.rank == 0 else np.empty(ID_BYTES, np.uint8)
        tree.broadcast(context, told, 0)
        what = f"making the NCCL communicator for {context.name}"
        return self.make(told, context.rank, context.size, context.remaining(), what)

    def make(self, told: Array, rank: int, size: int, seconds: float, what: str) -> Communicator:
        """Make a communicator; all its ranks do so with the same id.

        Args:
            told: the id.
            rank, size: in the communicator.
            seconds: how long that may take.
            what: in words, for errors.

        Raises:
            CommTimeoutError: the others have not come in time.
            CommunicationError: NCCL refuses, or the backend broke meanwhile.
        """
        made = self._within(
            lambda: nccl.NcclCommunicator(size, told.tobytes(), rank), seconds, what
        )
        return self._note(made)

    def split(
        self, parent: Communicator, color: int, key: int, seconds: float
    ) -> Communicator | None:
        """Divide a communicator whose calls have all ended; all its ranks do so.

        Args:
            parent: which one.
            color: of the part that this rank is in; -1 for none.
            key: the ranks of a part are in this order.
            seconds: how long that may take.

        Raises:
            The same errors as ``make``.
        """
        made = self._within(lambda: parent.handle.commSplit(color, key), seconds, "commSplit")
        return self._note(made) if made is not None else None

    def _within(self, make: Callable[[], Any], seconds: float, what: str) -> Any:
        """Return ``make()``, called by a thread of its own: NCCL itself may wait for ever."""
        attempt = _CommunicatorAttempt(self._device, make)
        threading.Thread(
            target=attempt.run, name=f"fsdpcore-nccl-init-rank{self._rank}", daemon=True
        ).start()
        deadline = Deadline(seconds)
        while not attempt.ended.wait(min(_SLICE, deadline.remaining())):
            failure = self._failure()
            if failure is not None or not deadline.remaining():
                if not attempt.give_up():
                    self._thread(attempt.made.abort)
                raise fresh(failure) if failure is not None else _not_made(what, seconds)
        if isinstance(attempt.error, ERRORS):
            raise translated(attempt.error, what) from attempt.error
        if attempt.error is not None:
            raise attempt.error
        return attempt.made

    def _note(self, made: Any) -> Communicator:
        with self._changing:
            communicator = Communicator(made, self.launches.lock, self._failure)
            self._made.append(communicator)
            late = self._aborted
        if late:
            self.abort()
        return communicator

    # Looking after them.

    def check(self) -> None:
        """Raise what NCCL has met since, in any of them."""
        for communicator in list(self._made):
            communicator.check()

    # Ending.

    def abort(self) -> None:
        """End all of them at once, so that streams go on; returns at once.

        Each by a thread of its own: freeing what one has waits for what the others have running.
        """
        with self._changing:
            self._aborted = True
            ending = [each for each in self._made if not each.over]
            if not ending:
                return
            self._aborting.append(self._thread(self._abort, ending))

    def _abort(self, ending: list[Communicator]) -> None:
        # Not while a thread is inside of a call, unless it does not come out.
        held = self.launches.lock.acquire(timeout=_CALL_SECONDS)
        ending = [each for each in ending if not each.over]
        for each in ending:
            each.over = True
        if held:
            self.launches.lock.release()
        threads = [self._thread(self._end, each, "abort") for each in ending]
        _join(threads, BOUND)

    def destroy(self, seconds: float = BOUND) -> None:
        """End all of them, whose calls have ended; those of groups first, the oldest last.

        Every rank of a communicator does so at about the same time: NCCL may wait for that. Those
        that are not done in time are left to themselves.
        """
        end = time.monotonic() + seconds
        for communicator in reversed(self._ending()):
            threads = [self._thread(self._end, communicator, "destroy")]
            if not _join(threads, end - time.monotonic()):
                _LOG.warning(
                    "rank %d: an NCCL communicator was not destroyed within %g s; it goes with "
                    "the process",
                    self._rank,
                    seconds,
                )

    def abandon(self, seconds: float = BOUND) -> None:
        """End all of them, though other ranks may not yet; nothing is under way on any."""
        _join([self._thread(self._end, each, "abort") for each in self._ending()], seconds)

    def _ending(self) -> list[Communicator]:
        with self._changing:
            self._aborted = True
            ending = [each for each in self._made if not each.over]
        with self.launches.lock:
            for each in ending:
                each.over = True
        return ending

    def join(self, seconds: float) -> bool:
        """Wait for what ``abort`` has begun; return whether it is done."""
        with self._changing:
            threads = list(self._aborting)
        return _join(threads, seconds)

    def _end(self, communicator: Communicator, how: str) -> None:
        try:
            communicator.end(how)
        except ERRORS as error:  # it goes with the process
            _LOG.warning("rank %d: nccl.%s failed: %s", self._rank, how, error)

    def _thread(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        def run() -> None:
            self._device.use()
            target(*args)

        name = f"fsdpcore-nccl-end-rank{self._rank}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread


def _not_made(what: str, seconds: float) -> CommTimeoutError:
    return CommTimeoutError(
        f"{what} was not done after {seconds:g} s: another rank has not come, or NCCL cannot "
        "connect them (NCCL_DEBUG=INFO says more, NCCL_SOCKET_IFNAME chooses the network)"
    )


class _CommunicatorAttempt:
    """A communicator that is being made. If nobody wants it any more, it is aborted at once."""

    def __init__(self, device: CudaDevice, make: Callable[[], Any]) -> None:
        self.ended = threading.Event()
        self.made: Any = None
        self.error: Exception | None = None
        self._device = device
        self._make = make
        self._lock = threading.Lock()
        self._given_up = False

    def run(self) -> None:
        try:
            self._device.use()
            made = self._make()
        except Exception as error:  # raised again by the thread that waits
            self.error = error
        else:
            with self._lock:
                self.made = made
                unwanted = self._given_up
            if unwanted and made is not None:
                made.abort()
        self.ended.set()

    def give_up(self) -> bool:
        """Have what is made be aborted; false if it is there already."""
        with self._lock:
            self._given_up = True
            return self.made is None


def _join(threads: list[threading.Thread], seconds: float) -> bool:
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
