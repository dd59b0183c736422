"""``nccl``: a job of the ``zmq`` transport whose ranks have a GPU each, with CuPy and NCCL.

NumPy arrays go the way that they go there. CuPy arrays go from GPU to GPU: collectives by NCCL,
messages between two ranks (which have tags, and may be received in any order) through memory of
the host.

A blocking collective of CuPy arrays is ordered by the stream: it is enqueued on the caller's
current stream and returns at once. See ``collectives/on_device.py`` for that, and ``supervisor.py``
for who sees to it that it ends. All ranks call the collectives of CuPy arrays in the same order,
those of different groups, too: what has begun on a GPU waits there for the others, and may keep
what they call first from beginning.
"""

from __future__ import annotations

import atexit
import functools
import time
import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fsdpcore.collectives.on_device import device_twin
from fsdpcore.collectives.operations.broadcast import broadcast
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.transport import Transport
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.device import Ticket
from fsdpcore.core.errors import (
    ClosedError,
    CommTimeoutError,
    CommunicationError,
    ConfigError,
    RendezvousError,
    in_words,
)
from fsdpcore.core.work import Deadline, fresh

from .missing import in_numbers, no_cupy, no_nccl, tells_nothing_more

try:
    import cupy
    from cupy.cuda import runtime
except ImportError as error:
    raise no_cupy(error) from (None if tells_nothing_more(error) else error)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # CuPy warns where it finds none; the error says what to do
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise no_nccl(runtime.runtimeGetVersion()) from error
if not nccl.available:
    raise no_nccl(runtime.runtimeGetVersion())

from ..zmq.backend import ZmqBackend
from ..zmq.options import ZmqOptions
from . import gpus
from .agree import Agreement
from .calls import NativeCollectives, reduces
from .closing import ENDED, ENDING, ClosingHandshake
from .communicators import (
    BOUND,
    ERRORS,
    ID_BYTES,
    Communicators,
    translated,
)
from .cuda_device import CudaDevice, CudaTicket
from .direct import DirectCollectives
from .fast_path import NATIVE, fast_path_for
from .groups import GroupCommunicators
from .supervisor import Flight, Supervisor, key_of
from .transport import NcclTransport

if TYPE_CHECKING:
    from fsdpcore.collectives.spec import CallSpec
    from fsdpcore.comm.config import TransportConfig
    from fsdpcore.comm.place import RankPlace


@dataclass(frozen=True)
class NcclOptions(ZmqOptions):
    """Options of ``nccl://HOST:PORT`` URLs: those of ``zmq``, and these.

    Attributes:
        device: number of the GPU among those that the process sees; by default that of the rank
            among those of its host.
        share_gpu: let ranks have the same GPU, as far as NCCL lets them: for tests, on one GPU.
    """

    device: int = field(default=-1, metadata={"default": "by local rank"})
    share_gpu: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device < -1:
            raise ConfigError(f"device must not be negative, got {self.device}")


class NcclBackend(ZmqBackend, NcclTransport):
    """One rank and its GPU; made by ``join``."""

    options: ClassVar[type[NcclOptions]] = NcclOptions
    transport_capabilities = Capabilities("nccl", alpha=60e-6, beta=0.5e-9, gamma=0.1e-9)
    not_elastic = "NCCL holds a rank's GPU until all ranks have ended, or one was lost for good"
    _has_gpu = False

    # Joining.

    @classmethod
    def versions(cls) -> str:
        names = [gpus.name_of(ordinal) for ordinal in range(gpus.count_gpus())]
        found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        version = nccl.get_version()
        return (
            f"CuPy {cupy.__version__}, "
            f"NCCL {version // 10000}.{version // 100 % 100}.{version % 100}, "
            f"CUDA {in_numbers(runtime.runtimeGetVersion())} "
            f"(the driver: {in_numbers(runtime.driverGetVersion())}), {found}"
        )

    @classmethod
    def join(cls, place: RankPlace, config: TransportConfig) -> Transport:
        deadline = Deadline(config.rendezvous_timeout)
        backend = super().join(place, config)
        assert isinstance(backend, NcclBackend)
        try:
            backend._take_gpu(place, deadline)
        except BaseException as error:
            why = f"rank {place.rank} did not join: {in_words(error)}"
            backend.fail(CommunicationError(why), tell=True)
            backend._end_device()
            backend._release(flush=False)
            raise
        return backend

    def _take_gpu(self, place: RankPlace, deadline: Deadline) -> None:
        """Choose the GPU, make sure that nobody else has it, and connect to the others'."""
        options = self._options
        assert isinstance(options, NcclOptions)
        ordinal = gpus.choose(place, self.hosts, options.device)
        self.device = self.gpu = device = CudaDevice(ordinal, self._check_device)
        device.use()
        self.communicators = Communicators(device, lambda: self.failure, self.rank)
        self.groups = GroupCommunicators(self.communicators)
        self._agreement = Agreement(self.rank, self._note)
        self._ending = ending = ClosingHandshake(self, self._note)
        self.supervisor = Supervisor(
            self, device, self.communicators, self._agreement, ending.answer
        )
        self._at_exit = functools.partial(_abort_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        with self.lock:
            self.control.heard = self._heard
        self._has_gpu = True
        if self.world_size > 1:
            self._meet(ordinal, options, deadline)

    def _meet(self, ordinal: int, options: NcclOptions, deadline: Deadline) -> None:
        group = self.sub(range(self.world_size), name="nccl")
        mine = gpus.identify(ordinal)
        gpus.check_distinct(group, mine, options.share_gpu, deadline.remaining())
        if options.share_gpu:
            gpus.let_share(self.rank)
        told = self.communicators.new_id() if self.rank == 0 else np.zeros(ID_BYTES, np.uint8)
        told = broadcast(told, group, timeout=deadline.remaining())
        group.close()
        what = "making the NCCL communicator of all ranks"
        try:
            made = self.communicators.make(
                told, self.rank, self.world_size, deadline.remaining(), what
            )
        except CommTimeoutError as error:
            raise RendezvousError(f"rank {self.rank}: {error}") from error
        self.groups.add(device_twin(self).channel, made)

    # What the ranks tell each other.

    def _note(self, rank: int, content: dict[str, Any]) -> None:
        with self.lock:
            self.control.say(rank, content)

    def _heard(self, rank: int, content: Mapping[str, Any]) -> None:
        if content.get("what") in (ENDING, ENDED):
            self._ending.heard(rank, content)
        else:
            self._agreement.heard(rank, content)
        self.supervisor.wake()

    # Collectives.

    def device_algorithms(self, group: Backend) -> Mapping[str, Mapping[str, Algorithm]]:
        native, direct = NativeCollectives(self, group), DirectCollectives(self, group)
        table: dict[str, dict[str, Algorithm]] = {}
        for name in ("all_reduce", "reduce_scatter", "reduce"):
            table[name] = {
                NATIVE: Algorithm(native, _cost, False, reduces),
                "direct": Algorithm(direct, _cost),
            }
        for name in ("broadcast", "all_gather", "gather", "scatter", "all_to_all"):
            # They compute nothing, so that this is what "direct" stands for, too: the same bits.
            table[name] = {NATIVE: Algorithm(native, _cost), "direct": Algorithm(native, _cost)}
        return table

    def device_group(self) -> AbstractContextManager[None]:
        return self.communicators.launches.group()

    def enqueued(
        self,
        group: Backend,
        spec: CallSpec,
        sequence: int,
        limit: float,
        ticket: Ticket | None,
        held: object,
    ) -> None:
        end = time.monotonic() + limit
        self.supervisor.leave(state_of(group).context)
        if isinstance(ticket, CudaTicket):
            flight = Flight(ticket.event, False, group, spec, sequence, limit, end, held)
            self.supervisor.add(self.gpu.stream.ptr, flight)
            return
        stream, event = cupy.cuda.get_current_stream(), self.gpu.take_event()
        try:
            event.record(stream)
        except ERRORS as error:
            raise translated(error, f"{spec.operation} #{sequence}") from error
        flight = Flight(event, True, group, spec, sequence, limit, end, None)
        self.supervisor.add(key_of(stream.ptr), flight)
        communicator = self.groups.find(group.channel)
        if spec.fast_path is None and communicator is not None:
            spec.fast_path = fast_path_for(self, group, spec, communicator)

    def keep(self, ticket: Ticket, held: object) -> None:
        assert isinstance(ticket, CudaTicket)
        self.supervisor.keep(ticket.event, held)

    def was_split(self, group: Backend, made: Backend | None) -> None:
        if not self.groups.can_split(group):
            return
        deadline = Deadline(self.default_timeout)
        try:
            # NCCL divides communicators that are at rest.
            if not self.supervisor.finish(deadline.remaining(), device_twin(group).channel):
                self.check_usable()
                raise self.supervisor.overdue(f"after {self.default_timeout:g} s of split()")
            self.groups.split(group, made, deadline.remaining())
        except CommunicationError as error:
            self.fail(error, tell=True)
            raise

    def group_closed(self, group: Backend) -> None:
        if self.failure is None and self.supervisor.finish(self.default_timeout, group.channel):
            self.supervisor.forget(group.channel)
            self.groups.release(group)

    # Ending.

    def _check_device(self) -> None:
        """Raise if what is on the GPU may be the remains of collectives that were given up."""
        if self._failure is not None and not isinstance(self._failure, ClosedError):
            raise fresh(self._failure)

    def _fail_pending(self, error: CommunicationError) -> None:
        super()._fail_pending(error)
        if self._has_gpu and not isinstance(error, ClosedError):
            self.communicators.abort()

    def close(self) -> None:
        """Do as any transport, once what was enqueued has ended here and on the other ranks.

        Raises:
            CommunicationError: what was enqueued did not end, and nobody else has been told. All
                has been released nonetheless.
        """
        if self.forked:
            return
        lost = None
        if self._has_gpu and self._failure is None and not self.control.leaving:
            lost = self._finish_device()
        self._end_device()
        super().close()
        if lost is not None:
            raise fresh(lost)

    def _finish_device(self) -> CommunicationError | None:
        """Let what was enqueued end; return why it did not."""
        seconds = self.default_timeout
        if not self.supervisor.finish(seconds):
            if self._failure is None:
                self.fail(self.supervisor.overdue(f"after {seconds:g} s of close()"), tell=True)
            return self.failure
        if self._ending.meet(self.supervisor, seconds):
            self.communicators.destroy()
        elif self._failure is None:
            self.communicators.abandon()
        return None

    def _end_device(self) -> None:
        if not self._has_gpu:
            return
        self.communicators.join(BOUND)
        self.supervisor.stop()
        atexit.unregister(self._at_exit)


def _cost(p: int) -> CostTerms:
    """NCCL chooses by itself, and nothing else moves such arrays: the table needs some number."""
    return CostTerms(1, (p - 1) / p, 0)


def _abort_at_exit(reference: weakref.ReferenceType[NcclBackend]) -> None:
    """At the end of a program that has not closed its backend: CuPy would destroy, and may wait."""
    backend = reference()
    if backend is not None and not backend.forked:
        backend.communicators.abort()
        backend.communicators.join(BOUND)
