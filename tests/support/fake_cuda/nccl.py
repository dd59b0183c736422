"""``cupy.cuda.nccl``: communicators and their calls, with the signatures of CuPy 14.2."""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np
from support.fake_cuda import current
from support.fake_cuda.copies import enqueue
from support.fake_cuda.errors import CUDARuntimeError, NcclError
from support.fake_cuda.nccl_group import GROUP
from support.fake_cuda.nccl_match import Call, Clique, Member
from support.fake_cuda.nccl_moves import AVG, DTYPES, Host

ID_BYTES = 128
VERSION = 23203
BUILD_VERSION = 22501


def get_unique_id() -> bytes:
    """A new id, for rank 0 to tell the others. It needs no GPU."""
    return os.urandom(ID_BYTES)


def get_version() -> int:
    """Of NCCL."""
    return VERSION


def get_build_version() -> int:
    """Of the NCCL that CuPy was built with."""
    return BUILD_VERSION


def groupStart() -> None:
    """Collect calls of this thread."""
    GROUP.start()


def groupEnd() -> None:
    """Launch them, if it is the outermost group."""
    GROUP.end()


class NcclConfig:
    """Configuration of a communicator."""

    def __init__(self, split_share: int = 0) -> None:
        self.split_share = split_share


class NcclCommunicator:
    """A rank's end of a clique; blocks until all ranks have come, for ever if need be."""

    def __init__(
        self, ndev: int, commId: bytes, rank: int, config: NcclConfig | None = None
    ) -> None:
        self._clique: Clique | None = None
        if not isinstance(commId, bytes):
            raise TypeError(
                "Argument 'commId' has incorrect type (expected bytes, "
                f"got {type(commId).__name__})"
            )
        if len(commId) != ID_BYTES:
            raise ValueError(f"commId length {len(commId)} != {ID_BYTES}.")
        machine = current.machine()
        try:
            machine.faults.check_driver()
        except CUDARuntimeError as error:
            raise NcclError(1) from error
        machine.note("nccl.init", machine.queue(None), ndev=ndev, rank=rank)
        if GROUP.depth:
            raise NotImplementedError("the stand-in makes no communicators within groups")
        if machine.faults.refused(rank):
            raise NcclError(machine.faults.refused(rank))
        machine.faults.pass_init(rank)
        device = machine.place.device
        clique = machine.cliques.named(commId, ndev)
        self._enter(clique, clique.join(rank, device, ndev))

    def _enter(self, clique: Clique, member: Member) -> None:
        machine = current.machine()
        self._clique, self._member = clique, member
        self._machine = machine
        self._handle = machine.new_handle()
        machine.communicators.append(weakref.ref(self))

    @staticmethod
    def initAll(devices: Any) -> list[NcclCommunicator]:
        """Communicators of one thread for several GPUs."""
        if not isinstance(devices, (int, list)):
            raise ValueError('"devices" should be an int or a list of int.')
        ordinals = list(range(devices)) if isinstance(devices, int) else devices
        made = [NcclCommunicator.__new__(NcclCommunicator) for _ in ordinals]
        clique = current.machine().cliques.new(len(ordinals))
        for rank, (one, device) in enumerate(zip(made, ordinals, strict=True)):
            clique.members[rank] = Member(rank, device)
            one._enter(clique, clique.members[rank])
        return made

    def __del__(self) -> None:
        if getattr(self, "_clique", None) is not None:
            # The real one is destroyed here, which can block wherever the last reference goes.
            self._machine.leaks.append(repr(self))

    def __repr__(self) -> str:
        if self._clique is None:
            return "<NcclCommunicator, ended>"
        return f"<NcclCommunicator of clique {self._clique.number}, rank {self._member.rank}>"

    @property
    def comm(self) -> int:
        """The handle; 0 once it is destroyed or aborted."""
        return 0 if self._clique is None else self._handle

    def _live(self) -> tuple[Clique, Member]:
        if self._clique is None:
            raise NcclError(4)
        return self._clique, self._member

    def rank_id(self) -> int:
        """The rank."""
        return self._live()[1].rank

    def size(self) -> int:
        """How many ranks there are."""
        return self._live()[0].size

    def device_id(self) -> int:
        """The ordinal of its GPU."""
        return self._live()[1].device

    def check_async_error(self) -> None:
        """Raise what has gone wrong since."""
        status = self._live()[1].async_error
        if status:
            raise NcclError(status)

    def destroy(self) -> None:
        """Wait for what is under way, which NCCL does not promise, and end it. Once is enough."""
        if self._clique is not None:
            if self._member.issued > self._member.finished:
                self._machine.misuses.append(f"{self!r} is destroyed while calls are under way")
            self._note("nccl.destroy")
            self._clique.drain(self._member)
            self._clique = None

    def abort(self) -> None:
        """End it at once, and let its streams go on. What is under way is lost."""
        clique = self._clique
        if clique is not None:
            self._note("nccl.abort")
            self._machine.faults.pass_abort(self._member.rank)
            clique.leave(self._member)
            self._clique = None

    def commSplit(
        self, color: int, key: int, config: NcclConfig | None = None
    ) -> NcclCommunicator | None:
        """A communicator of the ranks with the same color, in the order of their keys."""
        clique, member = self._live()
        if member.issued > member.finished:
            self._machine.misuses.append(f"{self!r} is split while calls are under way")
        self._note("nccl.commSplit", color=color, key=key)
        if self._machine.faults.refused(member.rank):
            raise NcclError(self._machine.faults.refused(member.rank))
        self._machine.faults.pass_init(member.rank)
        found = clique.split(member, color, key)
        if found is None:
            return None
        made = NcclCommunicator.__new__(NcclCommunicator)
        made._enter(found[0], found[0].members[found[1]])
        return made

    # The calls. Pointers and streams are integers; they return once enqueued.

    def allReduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        """Combine the arrays of all ranks, on all."""
        self._call("allReduce", sendbuf, recvbuf, count, count, datatype, stream, op=op)

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        """Combine the arrays of all ranks, on one, which alone needs ``recvbuf``."""
        receives = count if self._is(root) else None
        self._call("reduce", sendbuf, recvbuf, count, receives, datatype, stream, op=op, root=root)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        """Copy the array of one rank, which alone needs ``sendbuff``, to all."""
        sends = count if self._is(root) else None
        self._call("broadcast", sendbuff, recvbuff, sends, count, datatype, stream, root=root)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """The same in place."""
        sends = count if self._is(root) else None
        self._call("bcast", buff, buff, sends, count, datatype, stream, root=root)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        """Combine the arrays of all ranks; each gets ``recvcount`` elements."""
        sent = _integer(recvcount) * self._live()[0].size
        self._call("reduceScatter", sendbuf, recvbuf, sent, recvcount, datatype, stream, op=op)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        """Concatenate the arrays of all ranks, ``count`` elements of each, on all."""
        whole = _integer(count) * self._live()[0].size
        self._call("allGather", sendbuf, recvbuf, count, whole, datatype, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Send an array to a rank."""
        self._call("send", sendbuf, None, count, None, datatype, stream, peer=peer)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Receive an array from a rank."""
        self._call("recv", None, recvbuf, None, count, datatype, stream, peer=peer)

    # How they come about.

    def _is(self, root: int) -> bool:
        return self._live()[1].rank == _integer(root)

    def _note(self, name: str, **args: Any) -> None:
        clique, member = self._live()
        queue = self._machine.null(member.device)
        self._machine.note(name, queue, comm=clique.number, rank=member.rank, **args)

    def _call(
        self,
        name: str,
        sendbuf: int | None,
        recvbuf: int | None,
        sends: int | None,
        receives: int | None,
        datatype: int,
        stream: int,
        *,
        op: int = 0,
        root: int = 0,
        peer: int | None = None,
    ) -> None:
        clique, member = self._live()
        given = [sendbuf, recvbuf, sends, receives, datatype, stream, op, root, peer]
        numbers = [None if value is None else _integer(value) for value in given]
        sendbuf, recvbuf, sends, receives, datatype, stream, op, root, peer = numbers
        if any(count is not None and count < 0 for count in (sends, receives)):
            raise OverflowError("can't convert negative value to size_t")
        ranks = range(clique.size)
        if datatype not in DTYPES or not 0 <= op <= AVG or root not in ranks:
            raise NcclError(4)
        if peer is not None and peer not in ranks:
            raise NcclError(4)
        machine = self._machine
        queue = machine.null(member.device) if stream in (0, 1) else machine.queue(stream)
        smaller = min(n for n in (sends, receives) if n is not None)
        machine.note(
            f"nccl.{name}", queue, comm=clique.number, rank=member.rank, sendbuf=sendbuf,
            recvbuf=recvbuf, count=smaller, datatype=datatype, op=op, root=root, peer=peer,
            depth=GROUP.depth,
        )  # fmt: skip
        if queue.device != member.device:
            raise NcclError(1)
        if not smaller and peer is None:
            return  # a collective of nothing is dropped at once; nobody waits for anybody
        call = Call(
            name,
            member.rank,
            _signature(name, smaller, datatype, op, root),
            self._memory(sendbuf, sends, datatype),
            self._memory(recvbuf, receives, datatype),
            op,
            root,
            -1 if peer is None else peer,
        )
        self._check_overlap(call)
        GROUP.add(self, queue, call)

    def _check_overlap(self, call: Call) -> None:
        """Note a result in the memory of its input, elsewhere than in place."""
        if call.send is None or call.receive is None:
            return
        own = call.rank * min(call.send.nbytes, call.receive.nbytes)
        in_place = {"allGather": -own, "reduceScatter": own}.get(call.name, 0)
        apart = call.receive.ctypes.data - call.send.ctypes.data
        if apart != in_place and np.may_share_memory(call.send, call.receive):
            self._machine.misuses.append(f"{call.name} of {self!r} writes over its input")

    def _memory(self, address: int | None, count: int | None, datatype: int) -> Host | None:
        if address is None or count is None:
            return None
        dtype = DTYPES[datatype]
        if count and not address:
            raise NcclError(4)
        try:
            found = self._machine.memories.at(address, count * dtype.itemsize)
            place = self._machine.memories.find(address).device if count else -1
        except CUDARuntimeError as error:
            raise NcclError(1) from error
        if place not in (-1, self._member.device):
            raise NcclError(1)
        return found.view(dtype)

    def _launch(self, queues: list[Any], calls: list[Call]) -> None:
        """Enqueue calls as one launch on the first stream; the others wait before and after."""
        clique, member = self._live()
        for call in calls:
            if not call.is_p2p:
                call.index = member.collectives
                member.collectives += 1
        number = member.issued
        member.issued += 1
        first, *others = dict.fromkeys(queues)
        machine, order = self._machine, self._machine.order
        if not all(call.is_p2p for call in calls):
            machine.cliques.launched(clique, member.device)
        for other in others:
            position, clock = other.issued, order.clock_of(other)
            first.put("nccl waits", lambda o=other, p=position: o.pass_by(p))
            order.join(first, clock)
        find = machine.memories.find
        touched = [
            [(find(a.ctypes.data).number, a) for a in arrays if a is not None and a.size]
            for arrays in ([c.send for c in calls], [c.receive for c in calls])
        ]
        name = "nccl." + "+".join(call.name for call in calls)
        enqueue(first, name, lambda: clique.execute(member, number, calls), *touched)
        for other in others:
            position, clock = first.issued, order.clock_of(first)
            other.put("nccl waits", lambda p=position: first.pass_by(p))
            order.join(other, clock)


def _signature(name: str, count: int, datatype: int, op: int, root: int) -> tuple[Any, ...]:
    # A receive matches a send; the two names of broadcast are one call.
    kind = {"send": "p2p", "recv": "p2p", "bcast": "broadcast"}.get(name, name)
    return (kind, count, datatype, op, root)


def _integer(value: Any) -> int:
    # Cython takes nothing else for a C integer, and arrays least of all.
    if not isinstance(value, (int, np.integer)):
        raise TypeError("an integer is required")
    return int(value)


_DTYPES = {
    "INT8 CHAR": 0, "UINT8": 1, "INT32 INT": 2, "UINT32": 3, "INT64": 4, "UINT64": 5,
    "FLOAT16 HALF": 6, "FLOAT32 FLOAT": 7, "FLOAT64 DOUBLE": 8, "BFLOAT16": 9,
    "SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3, "AVG": 4,
}  # fmt: skip
CONSTANTS = {f"NCCL_{n}": value for names, value in _DTYPES.items() for n in names.split()}
