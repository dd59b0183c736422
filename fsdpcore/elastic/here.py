"""``Here``: the seats of one host, as its agent sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Here:
    """What the seats of this host are about.

    A seat starts, is ready, and has ended; meanwhile it may want to leave. What it says of a
    generation is forgotten with that generation.
    """

    def __init__(self) -> None:
        self.starting: set[int] = set()
        self.ready: set[int] = set()
        self.ended: set[int] = set()
        self.leaving: dict[int, str] = {}
        self.paused: dict[int, bool] = {}  # and whether it leaves
        self.joined: set[int] = set()
        self.broken: dict[int, tuple[int, ...]] = {}
        self._all_leave = ""

    def start(self, number: int) -> None:
        """Expect a seat."""
        if number not in self.ready | self.ended:
            self.starting.add(number)

    def come(self, number: int) -> None:
        """Note that a seat is ready."""
        self.starting.discard(number)
        if number not in self.ended:
            self.ready.add(number)
            if self._all_leave:
                self.leave(number, self._all_leave)

    def end(self, number: int) -> None:
        """Note that a seat is no more; it never comes back."""
        self.starting.discard(number)
        self.ready.discard(number)
        self.leaving.pop(number, None)
        self.broken.pop(number, None)
        self.ended.add(number)

    def leave(self, number: int, reason: str) -> None:
        """Note that a seat wants to leave."""
        if number in self.ready:
            self.leaving.setdefault(number, reason)

    def leave_all(self, reason: str) -> None:
        """All seats want to leave, also those that come."""
        self._all_leave = reason
        for number in sorted(self.ready):
            self.leave(number, reason)

    def broke(self, number: int, suspects: Sequence[int]) -> None:
        """Note that the backend of a seat broke, and which ranks it suspects."""
        if number in self.ready:
            self.broken[number] = tuple(sorted({*suspects}))

    def install(self, dropped: Iterable[int]) -> None:
        """Begin a generation, without some seats that were in the last."""
        self.paused.clear()
        self.joined.clear()
        self.broken.clear()
        for number in dropped:
            self.end(number)
