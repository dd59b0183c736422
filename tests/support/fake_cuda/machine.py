"""``Machine``: the GPUs that are not there, what they were asked to do, and what can go wrong."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from support.fake_cuda.errors import CUDARuntimeError
from support.fake_cuda.faults import Faults
from support.fake_cuda.memory import Memories
from support.fake_cuda.order import Order, Race
from support.fake_cuda.place import Place
from support.fake_cuda.queues import Queue

if TYPE_CHECKING:
    from support.fake_cuda.nccl import NcclCommunicator
    from support.fake_cuda.nccl_match import Cliques
    from support.fake_cuda.streams import Event

_FIRST_HANDLE = 0x5EED0000


@dataclass(frozen=True)
class Entry:
    """One call that was made.

    Attributes:
        name: for instance "nccl.allReduce", "kernel adam", "event.record".
        thread: name of the thread that called.
        device: the current device of the call.
        stream: handle of the stream that it was enqueued on.
        args: further ones by name; of a call of NCCL ``comm`` (number of the clique), ``rank``,
            ``count``, ``datatype``, ``op``, ``root``, ``peer``, ``depth`` (of groups).
    """

    name: str
    thread: str
    device: int
    stream: int
    args: dict[str, Any] = field(default_factory=dict)


class Machine:
    """What a test sees of the stand-in, beside ``cupy``.

    Attributes:
        log: every call, in order.
        errors: what work on the devices raised, with the name of the work. A test that expects
            some empties it; otherwise ``installed()`` raises at its end.
        races: pairs of work on the same memory that nothing orders; see ``order``. A test that
            expects some empties it, too.
        mismatches: calls of NCCL that do not fit, which hang.
        misuses: what the documentation of NCCL forbids, and may work nevertheless.
        leaks: communicators that were neither destroyed nor aborted when they were collected.
        faults: what is to go wrong.
        delays: whether work on streams is late, now and then.
    """

    def __init__(self, devices: int, seed: int, delays: bool) -> None:
        from support.fake_cuda.nccl_match import Cliques

        self.seed = seed
        self.delays = delays
        self.closing = False
        self.log: list[Entry] = []
        self.errors: list[tuple[str, BaseException]] = []
        self.mismatches: list[str] = []
        self.misuses: list[str] = []
        self.leaks: list[str] = []
        self.communicators: list[weakref.ref[NcclCommunicator]] = []
        self.events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
        self._handles = itertools.count(_FIRST_HANDLE, 64)
        self.faults = Faults(devices)
        self.place = Place(self)
        self.memories = Memories(self)
        self.order = Order()
        self.cliques: Cliques = Cliques(self)
        self._lock = threading.Lock()
        self._sticky: dict[int, int] = {}
        self._nulls: dict[int, Queue] = {}
        self._queues: dict[int, Queue] = {}

    @property
    def races(self) -> list[Race]:
        return self.order.races

    @property
    def devices(self) -> int:
        """How many GPUs there are."""
        return self.faults.devices

    # What was called.

    def note(self, name: str, queue: Queue, **args: Any) -> None:
        """Append to the log."""
        thread = threading.current_thread().name
        self.log.append(Entry(name, thread, queue.device, queue.handle, args))

    def calls(self, name: str, **args: Any) -> list[Entry]:
        """The entries of the log with a name, for instance "nccl.allReduce", and arguments."""
        return [e for e in list(self.log) if e.name == name and args.items() <= e.args.items()]

    def host_waits(self) -> list[Entry]:
        """The calls in which the host waited for a device, in order; queries are none."""
        return [
            entry
            for entry in list(self.log)
            if entry.name.endswith(".synchronize") or entry.args.get("blocks")
        ]

    # Streams.

    def new_handle(self) -> int:
        """A number that nothing else has."""
        return next(self._handles)

    def new_queue(self, device: int, blocking: bool) -> Queue:
        """A new stream."""
        queue = Queue(self, device, self.new_handle(), blocking)
        with self._lock:
            self._queues[queue.handle] = queue
        return queue

    def queue(self, stream: Any) -> Queue:
        """What is behind a stream, its handle, or None for the current one."""
        if stream is None:
            stream = self.place.stream(self.place.device)
        handle = stream if isinstance(stream, int) else stream.ptr
        if handle in (0, 1):
            return self.null(self.place.device)
        if handle not in self._queues:
            raise CUDARuntimeError(400)
        return self._queues[handle]

    def null(self, device: int) -> Queue:
        """The null stream of a device."""
        with self._lock:
            if device not in self._nulls:
                self._nulls[device] = Queue(self, device, 0, blocking=True)
            return self._nulls[device]

    def queues(self, device: int | None = None) -> list[Queue]:
        """All streams, or those of a device."""
        with self._lock:
            every = [*self._nulls.values(), *self._queues.values()]
        return [queue for queue in every if device in (None, queue.device)]

    def legacy_peers(self, queue: Queue) -> list[Queue]:
        """The streams that work on a stream comes after by CUDA's rules for the null stream."""
        if not queue.blocking:
            return []
        others = self.queues(queue.device) if queue.handle == 0 else [self.null(queue.device)]
        return [other for other in others if other is not queue and other.blocking]

    def synchronize(self, device: int) -> None:
        """Block the host until a device is through."""
        self.note("device.synchronize", self.null(device))
        for queue in self.queues(device):
            clock = self.order.clock_of(queue)
            queue.wait()
            self.order.host_saw(clock)

    def broke(self, device: int, name: str, error: BaseException) -> None:
        """Note that work on a device raised: it is broken from now on, as a GPU is."""
        self.errors.append((name, error))
        self._sticky[device] = 719

    def raise_sticky(self, device: int) -> None:
        """Raise if work on the device has failed before."""
        if self.sticky(device):
            raise CUDARuntimeError(self.sticky(device))

    def sticky(self, device: int) -> int:
        """The status that work on the device has failed with, or 0."""
        return self._sticky.get(device, 0)

    # Knobs.

    def freeze(self, stream: Any) -> None:
        """Let a stream do nothing more, until ``thaw``."""
        self.queue(stream).set(frozen=True)

    def thaw(self, stream: Any) -> None:
        """Let it go on."""
        self.queue(stream).set(frozen=False)

    @contextlib.contextmanager
    def frozen(self, stream: Any) -> Iterator[None]:
        """Freeze a stream for a while."""
        self.freeze(stream)
        try:
            yield
        finally:
            self.thaw(stream)

    def slow(self, stream: Any, seconds: float) -> None:
        """Have every piece of work on a stream take so much longer."""
        self.queue(stream).set(slowness=seconds)

    def fail_async(self, device: int, status: int = 6, comm: int | None = None) -> None:
        """Have ``check_async_error`` raise on the communicators of a GPU, or on one of them."""
        for made in self.open_communicators():
            clique, member = made._live()
            if member.device == device and comm in (None, clique.number):
                member.async_error = status

    def open_communicators(self) -> list[NcclCommunicator]:
        """Those that are neither destroyed nor aborted."""
        found = [reference() for reference in self.communicators]
        return [made for made in found if made is not None and made.comm]

    # The end.

    def check(self) -> None:
        """Raise ``AssertionError`` for what must not be left at the end."""
        gc.collect()
        wrong = {
            "work on a device failed": [f"{n}: {error!r}" for n, error in self.errors],
            "work on the same memory is not ordered": [str(race) for race in self.races],
            "NCCL was misused": self.misuses,
            "collectives of several communicators crossed": self.cliques.crossed(),
            "communicators were collected before they were ended": self.leaks,
            "communicators are still open": [repr(made) for made in self.open_communicators()],
        }
        told = [f"{what}: {which}" for what, which in wrong.items() if which]
        if told:
            raise AssertionError("; ".join(told))

    def check_threads(self) -> None:
        """Raise if a stream's thread is left."""
        left = [q.thread.name for q in self.queues() if q.thread and q.thread.is_alive()]
        assert not left, f"threads of streams are left: {left}"

    def close(self) -> None:
        """End all threads; whoever waits for something gets ``SwitchedOff``."""
        self.closing = True
        self.cliques.wake()
        self.faults.wake()
        for queue in self.queues():
            queue.wake()
        for queue in self.queues():
            if queue.thread is not None:
                queue.thread.join(10)
