"""What goes wrong on the machine because a test says so."""

from __future__ import annotations

import threading
import uuid

from support.fake_cuda.errors import CUDARuntimeError

ANY = -1


class Faults:
    """Set before or while something runs, from any thread. A rank of ``ANY`` is every rank.

    Attributes:
        devices: how many GPUs are visible.
        driver: whether there is one; without it every call raises ``CUDARuntimeError(35)``.
        peer_access: whether work on one GPU may use the memory of another.
        uuids: of the GPUs. Two that are equal are one GPU with two ordinals.
        shared_gpu: whether NCCL takes two ranks of a communicator on one GPU.
        limit: bytes of memory that a GPU has.
    """

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.driver = True
        self.peer_access = False
        self.shared_gpu = False
        self.limit = 80 << 30
        self.uuids = [uuid.uuid5(uuid.NAMESPACE_OID, f"GPU {i}").bytes for i in range(64)]
        self._refused: dict[int, int] = {}
        self._hanging_inits: set[int] = set()
        self._hanging_aborts: set[int] = set()
        self._changed = threading.Condition()
        self._over = False

    def check_driver(self) -> None:
        """Raise if there is no driver."""
        if not self.driver:
            raise CUDARuntimeError(35)
        if not self.devices:
            raise CUDARuntimeError(100)

    def same_gpu(self, first: int, second: int) -> None:
        """Let two ordinals be one GPU."""
        self.uuids[second] = self.uuids[first]

    def refuse_init(self, rank: int = ANY, status: int = 2) -> None:
        """Have making a communicator raise ``NcclError(status)`` on a rank, at once."""
        self._refused[rank] = status

    def refused(self, rank: int) -> int:
        """The status of a refusal, or 0."""
        return self._refused.get(rank, self._refused.get(ANY, 0))

    def hang_init(self, rank: int = ANY) -> None:
        """Have a rank never come out of making a communicator."""
        self._hanging_inits.add(rank)

    def hang_abort(self, rank: int = ANY) -> None:
        """Have ``abort`` never return on a rank, and free nothing."""
        self._hanging_aborts.add(rank)

    def release(self) -> None:
        """Let go on what hangs in making or aborting communicators."""
        with self._changed:
            self._hanging_inits.clear()
            self._hanging_aborts.clear()
            self._refused.clear()
            self._changed.notify_all()

    def pass_init(self, rank: int) -> None:
        """Hang where making a communicator does."""
        self._pass(self._hanging_inits, rank)

    def pass_abort(self, rank: int) -> None:
        """Hang where aborting one does."""
        self._pass(self._hanging_aborts, rank)

    def wake(self) -> None:
        """The machine is switched off."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _pass(self, hanging: set[int], rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or not hanging & {rank, ANY})
