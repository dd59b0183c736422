"""How the ranks of a job find each other: rank 0 collects a card from each, and hands out all.

It goes over ZeroMQ with CURVE, whatever ``security`` says: who does not know the job's secret gets
no further than the handshake, and nobody who reads the network learns anything. A joining rank
needs one connection, and rank 0 one for each. When all have their table, rank 0 ends the meeting,
and the port is free for the links to it (``links.py``).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import zlib
from dataclasses import dataclass
from typing import Any

import zmq

from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import RendezvousError
from fsdpcore.core.text import name_ranks
from fsdpcore.core.work import Deadline
from fsdpcore.launch.addresses import is_loopback, join_address
from fsdpcore.launch.endpoints import resolve

from .keys import NONCE_BYTES, JobKeys
from .monitors import InboundConnections
from .visit import RETRY_SECONDS, Visit, packed, set_up, unpacked

Card = dict[str, Any]
Socket = zmq.Socket[bytes]

PROTOCOL = 3
_MAX_CARD = 1 << 16
# Rank 0 gives up at the deadline; the others leave it this long to tell them who was missing.
_GRACE_SECONDS = 2.0
# Where ranks disagree about the job, those that come so much later hear of it, too. The launcher of
# rank 0 leaves it that long once others have failed.
_LATE_SECONDS = 1.0
# How long rank 0 lets somebody be silent; and for each rank, as all may come at the same moment.
_STRANGER_MS, _EACH_MS = 3_000, 2


@dataclass(frozen=True)
class Meeting:
    """What came of a meeting.

    Attributes:
        cards: of all ranks, in rank order.
        nonce: what rank 0 has drawn, the same on all ranks and unlike any other job's.
        reached: the address at which rank 0 was.
    """

    cards: list[Card]
    nonce: bytes
    reached: str


class MeetingHost:
    """Rank 0's side of one meeting.

    Args:
        context: of this rank.
        place: of rank 0.
        keys: of the job.
        descriptor: of the TCP socket at which it listens; ZeroMQ's from now on.
        address: where it does.
        version: of the package, which all ranks must have.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        place: RankPlace,
        keys: JobKeys,
        descriptor: int,
        address: tuple[str, int],
        version: str,
    ) -> None:
        self._place, self._address, self._version = place, address, version
        self._names: dict[int, bytes] = {0: b""}
        self._cards: dict[int, Card] = {}
        self._refused = 0
        self._socket: Socket = context.socket(zmq.ROUTER)
        sock = self._socket
        set_up(sock, address[0], _MAX_CARD)
        sock.setsockopt(zmq.HANDSHAKE_IVL, _STRANGER_MS + _EACH_MS * place.world_size)
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.meeting().secret)
        sock.setsockopt(zmq.USE_FD, descriptor)
        self._inbound = InboundConnections(sock)
        sock.bind(f"tcp://{join_address(*address)}")

    def meet(self, card: Card, deadline: Deadline) -> Meeting:
        """Collect the cards, and hand out all; blocks. See ``meet``."""
        self._cards[0] = card
        try:
            self._collect(deadline)
            nonce = secrets.token_bytes(NONCE_BYTES)
            cards = [self._cards[rank] for rank in range(self._place.world_size)]
            self._tell(packed({"table": cards, "nonce": nonce.hex()}))
            seconds = max(deadline.remaining(), _GRACE_SECONDS)
            self._await_thanks(Deadline(seconds, deadline.clock, deadline.given_up))
            return Meeting(cards, nonce, self._address[0])
        except RendezvousError as error:
            self._tell(_error(error))
            if self._refused:
                self._refuse_late(error, Deadline(_LATE_SECONDS, deadline.clock))
            raise
        finally:
            self._socket.disable_monitor()
            self._inbound.monitor.close(0)
            self._socket.close(int(1000 * _GRACE_SECONDS))

    def _poll(self, deadline: Deadline) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._inbound.monitor, zmq.POLLIN)
        poller.poll(int(1000 * deadline.patience()) + 1)

    def _collect(self, deadline: Deadline) -> None:
        while len(self._cards) < self._place.world_size:
            if deadline.remaining() <= 0:
                missing = self._missing()
                raise RendezvousError(self._describe_missing(missing, deadline.seconds), missing)
            self._poll(deadline)
            while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._admit(*self._socket.recv_multipart(copy=False))
            self._look_for_losses()

    def _missing(self) -> list[int]:
        return sorted(set(range(self._place.world_size)) - set(self._cards))

    def _describe_missing(self, missing: list[int], seconds: float) -> str:
        host, hint = self._address[0], ""
        if self._place.local_world_size < self._place.world_size and is_loopback(host):
            hint = "; no other host reaches that address, name one that this host has"
        elif len(missing) == self._place.world_size - 1:
            hint = "; if they were started, is their secret (FSDPCORE_TOKEN) the same one?"
        return (
            f"{name_ranks(missing)} of {self._place.world_size} did not come to the rendezvous at "
            f"{join_address(*self._address)} within {seconds:g} s{hint}"
        )

    def _look_for_losses(self) -> None:
        for rank in self._inbound.broken():
            raise RendezvousError(
                f"rank {rank} was lost while the ranks met: its process "
                "ended, or the network between it and rank 0 failed",
                [rank],
            )

    def _admit(self, name: zmq.Frame, *parts: zmq.Frame) -> None:
        try:
            message = json.loads(parts[0].bytes) if len(parts) == 1 else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            return  # who knows the secret sends what is right
        rank, size, card = message.get("rank"), message.get("world_size"), message.get("card")
        try:
            self._check(rank, size, message)
            if not isinstance(rank, int) or not isinstance(card, dict):
                raise RendezvousError(f"rank {rank} came without a card")
        except RendezvousError as error:
            self._say([name.bytes], _error(error))  # the others hear of it, too
            self._refused += 1
            raise
        card.setdefault("seen", parts[0].get("Peer-Address"))
        self._names[rank], self._cards[rank] = name.bytes, card
        self._inbound.know(parts[0], rank)

    def _refuse_late(self, why: RendezvousError, end: Deadline) -> None:
        """Tell ranks that come a little later why they will not meet."""
        while len(self._cards) + self._refused < self._place.world_size and end.remaining() > 0:
            self._poll(end)
            self._inbound.broken()
            while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._say([self._socket.recv_multipart()[0]], _error(why))
                self._refused += 1

    def _check(self, rank: Any, size: Any, message: dict[str, Any]) -> None:
        place = self._place
        theirs, ours = message.get("version"), self._version
        if message.get("fsdpcore") != PROTOCOL or theirs != ours:
            raise RendezvousError(
                f"rank {rank} runs fsdpcore {theirs}, rank 0 {ours}: install one version everywhere"
            )
        theirs, ours = message.get("ranks_per_host"), place.ranks_per_host
        if theirs and ours and theirs != ours:
            raise RendezvousError(
                f"the launchers were told different numbers of ranks per host: that of rank {rank} "
                f"{theirs}, that of rank 0 {ours}; give all the same --nnodes, --per-node and -n"
            )
        if size != place.world_size:
            raise RendezvousError(
                f"rank {rank} was started for a job of {size} ranks, rank 0 for one of "
                f"{place.world_size}"
            )
        if type(rank) is not int or not 0 <= rank < place.world_size:
            raise RendezvousError(f"a process came as rank {rank} of {size}, which does not exist")
        if rank in self._cards:
            raise RendezvousError(
                f"two processes came as rank {rank}; every rank must be started once"
            )

    def _tell(self, data: bytes) -> None:
        self._say([name for rank, name in self._names.items() if rank], data)

    def _say(self, names: list[bytes], data: bytes) -> None:
        for name in names:
            self._socket.send_multipart([name, data])

    def _await_thanks(self, deadline: Deadline) -> None:
        """Wait until all have their table; who is lost now is found missing by its links."""
        waiting = set(self._names) - {0}
        names = {name: rank for rank, name in self._names.items()}
        while waiting and deadline.remaining() > 0:
            self._poll(deadline)
            while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                waiting.discard(names.get(self._socket.recv_multipart()[0], 0))
            waiting -= set(self._inbound.broken())


def _error(error: RendezvousError) -> bytes:
    missing = {"ranks": error.ranks} if error.ranks else {}
    return json.dumps({"error": str(error), **missing}).encode()


class MeetingGuest:
    """Every other rank's side: it finds rank 0, brings a card, and waits for the table.

    Args:
        context: of this rank.
        place: of this rank.
        keys: of the job.
        address: where the ranks meet.
        deadline: for all of it.
        version: of the package, which all ranks must have.

    Attributes:
        hosts: the addresses that rank 0 may have.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        place: RankPlace,
        keys: JobKeys,
        address: tuple[str, int],
        deadline: Deadline,
        version: str,
    ) -> None:
        self._context, self._server, self._port = context, keys.meeting(), address[1]
        self._place, self._deadline, self._version = place, deadline, version
        self._where = join_address(*address)
        self.hosts = resolve(address, deadline)
        self._visits: list[Visit] = []
        self._found: Visit | None = None

    def __enter__(self) -> MeetingGuest:
        return self

    def __exit__(self, *exception: object) -> None:
        for visit in self._visits:
            visit.close()

    def greet(self) -> str:
        """Connect to rank 0, unless done before; return at which of its addresses it was found.

        Raises:
            RendezvousError: rank 0 is not there, or has another secret.
        """
        if self._found is not None:
            return self._found.host
        poller = zmq.Poller()
        for host in self.hosts:
            self._visit(host, poller)
        refused = False
        while self._deadline.remaining() > 0:
            poller.poll(int(1000 * self._deadline.patience()) + 1)
            for visit in list(self._visits):
                visit.look()
                refused |= visit.refused
                if visit.greeted:
                    self._stay_with(visit)
                    return visit.host
                if visit.given_up:  # rank 0 may come when who listens there now has gone
                    poller.unregister(visit.monitor)
                    self._visits.remove(visit)
                    visit.close()
                    self._deadline.clock.sleep(min(RETRY_SECONDS, self._deadline.remaining()))
                    self._visit(visit.host, poller)
        rank = self._place.rank
        if refused:
            raise RendezvousError(
                f"who listens at {self._where} does not know the secret of rank {rank} "
                "(FSDPCORE_TOKEN, FSDPCORE_TOKEN_FILE), or is no rank of this version of fsdpcore"
            )
        raise RendezvousError(
            f"rank {rank} found no rank 0 at the rendezvous at {self._where} within "
            f"{self._deadline.seconds:g} s",
            [0],
        )

    def _visit(self, host: str, poller: zmq.Poller) -> None:
        visit = Visit(self._context, self._server, host, self._port)
        self._visits.append(visit)
        poller.register(visit.monitor, zmq.POLLIN)

    def _stay_with(self, found: Visit) -> None:
        """End all other connections: rank 0 has room for one of each rank."""
        for visit in self._visits:
            if visit is not found:
                visit.close()
        self._visits, self._found = [found], found

    def meet(self, card: Card) -> Meeting:
        """Bring the card to rank 0, and wait for the table.

        Raises:
            RendezvousError: rank 0 is not there, has another secret, or refuses the job.
        """
        self.greet()
        (visit,) = self._visits
        place = self._place
        message = {"fsdpcore": PROTOCOL, "version": self._version, "rank": place.rank}
        message |= {"world_size": place.world_size, "card": card}
        message["ranks_per_host"] = place.ranks_per_host
        visit.socket.send(json.dumps(message).encode())
        answer = self._answer(visit)
        if "error" in answer:
            raise RendezvousError(str(answer["error"]), answer.get("ranks", ()))
        cards, nonce = answer.get("table"), answer.get("nonce")
        if isinstance(cards, list) and len(cards) == place.world_size and isinstance(nonce, str):
            with contextlib.suppress(ValueError):
                return Meeting(cards, bytes.fromhex(nonce), visit.host)
        raise RendezvousError(f"rank 0 sent rank {place.rank} a table that makes no sense")

    def _answer(self, visit: Visit) -> dict[str, Any]:
        poller = zmq.Poller()
        poller.register(visit.monitor, zmq.POLLIN)
        poller.register(visit.socket, zmq.POLLIN)
        end = self._deadline.longer(_GRACE_SECONDS)
        while end.remaining() > 0:
            poller.poll(int(1000 * end.patience()) + 1)
            ended = visit.look()  # first, since the answer may come, and then the end
            with contextlib.suppress(zmq.Again):
                answer = self._understood(visit.socket.recv(zmq.NOBLOCK))
                if "table" in answer and not ended:
                    visit.thank(end)
                return answer
            if ended:
                raise RendezvousError(
                    f"rank 0 ended the rendezvous at {self._where} without an answer to rank "
                    f"{self._place.rank}: it failed, or had met all ranks before",
                    [0],
                )
        raise RendezvousError(
            f"rank 0 did not answer rank {self._place.rank} at the rendezvous at {self._where} "
            f"within {self._deadline.seconds:g} s"
        )

    def _understood(self, data: bytes) -> dict[str, Any]:
        try:
            return unpacked(data)
        except (ValueError, TypeError, RecursionError, zlib.error) as error:
            raise RendezvousError(
                f"rank 0 sent rank {self._place.rank} an answer that makes no sense"
            ) from error
