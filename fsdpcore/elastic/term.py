"""``Term``: what an agent does in one generation, so that the next comes when it must."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fsdpcore.elastic.decree import Decree, Message
from fsdpcore.elastic.events import Stop
from fsdpcore.elastic.paxos import Value, Witness
from fsdpcore.elastic.reports import Terms
from fsdpcore.elastic.succession import (
    View,
    ended,
    has_majority,
    is_disturbed,
    is_paused,
    successor,
    undecided,
    wished,
)

_SETTLE = 0.05  # seconds in which reports of one loss come together
_STAGGER = 0.25  # seconds after which the next agent proposes
_PHASES = 3  # of a decision; all may be due at once
SILENT_SECONDS = 3.0
"""After which a user is told what is waited for."""


@dataclass(frozen=True)
class Limits:
    """What a job holds to; see ``Member``."""

    minimum: int
    maximum: int
    lost_after: float
    patience: float

    @property
    def terms(self) -> Terms:
        """What must be the same on all hosts."""
        return self.minimum, self.maximum, self.lost_after

    def waiting(self, why: str) -> str:
        """What to tell a user meanwhile."""
        return f"this host waits, up to {self.patience:g} s: {why}"


class Term:
    """An agent's part in one generation, from its beginning to the next.

    It wants the ranks to hand over when some come or leave. It proposes the next generation when
    something is lost, or all have handed over. It gives up where nothing can be decided. What it
    knows is a ``View``, which it is given with each call.

    Args:
        decree: on the next generation.
        me: the agent's id.
        limits: of the job.
        witness: what tips the scales.

    Attributes:
        decree: likewise.
        wished: the ranks were told to hand over.
        due_since: since when the next generation is due; None if it is not.
        wake: when something is to be done again, after the last call.
    """

    def __init__(self, decree: Decree, me: str, limits: Limits, witness: Witness | None) -> None:
        self.decree = decree
        self.wished = False
        self.due_since: float | None = None
        self.wake = math.inf
        self._me, self._limits, self._witness = me, limits, witness

    @property
    def decided(self) -> Value | None:
        """The next generation, once it is decided."""
        return self.decree.decided

    def look(self, view: View, now: float) -> None:
        """See whether the next generation is due; call this first."""
        self.wake = math.inf
        if not _is_due(view):
            self.due_since = None
        elif self.due_since is None:
            self.due_since = now

    def take_wish(self, view: View) -> str:
        """Why the ranks are to hand over; empty if they are not, or were told before."""
        if self.due_since is not None or self.wished:
            return ""
        reason = wished(view, self._limits.maximum)
        self.wished = bool(reason)
        return reason

    def vote(
        self, view: View, now: float, without: Callable[[frozenset[str]], View]
    ) -> list[tuple[str, Message]]:
        """Propose if it is this agent's turn, and go on with what it has proposed.

        Args:
            view: what the agent knows.
            now: the time.
            without: returns the view in which some agents don't answer.

        Returns:
            Messages, each with the id of the agent that gets it.
        """
        decree, messages = self.decree, list[tuple[str, Message]]()
        if self.due_since is not None and decree.may_propose(now):
            turn = self.due_since + self._turn(view)
            if now >= turn and self._choose(view):
                messages += decree.propose(now)
            elif now < turn:
                self._wake_at(turn)
        expected = view.linked & {card.id for card in view.generation.hosts}
        for _ in range(_PHASES):
            messages += decree.step(now, expected, lambda mute: self._choose(without(mute)))
        if decree.proposes or (self.due_since is not None and not decree.may_propose(now)):
            self._wake_at(decree.next_step())
        return messages

    def give_up(self, view: View, now: float) -> Stop | str:
        """Why this host must stop: nothing is left to wait for, or patience is over.

        Returns:
            A text for the user instead, once the next generation is late; empty before.
        """
        if self.due_since is None:
            return ""
        limits, waited = self._limits, now - self.due_since
        late, early = waited >= limits.patience, waited < SILENT_SECONDS
        settled = len(ended(view)) == len(view.generation.seats) or is_paused(view)
        self._wake_at(self.due_since + limits.patience)
        if early:
            self._wake_at(self.due_since + SILENT_SECONDS)
        following = successor(view, limits.maximum)
        pending = any(view.reports[host].starting for host in view.linked & view.reports.keys())
        left = len(following.seats)
        if not left and not pending and (late or settled):
            return Stop(f"no ranks are left: {following.reason}")
        if early and not late:
            return ""
        there = f"{left} {'rank is' if left == 1 else 'ranks are'} left"
        few = f"{there}, and the job needs {limits.minimum}: {following.reason}"
        # Who reaches no majority does not know how many are left elsewhere.
        lacks = left < limits.minimum and has_majority(view)
        if late and lacks:
            return Stop(few)
        if late:
            return Stop(undecided(view, limits.patience, self._witness), goes_on=True)
        return limits.waiting(few if lacks else undecided(view, SILENT_SECONDS, self._witness))

    def _wake_at(self, time: float) -> None:
        self.wake = min(self.wake, time)

    def _turn(self, view: View) -> float:
        """How long after the first notice of a loss this agent proposes."""
        there = [card.id for card in view.generation.hosts if card.id in view.linked]
        settle = 0.0 if is_paused(view) else _SETTLE * 2 ** min(view.unmet, 6)
        return settle + there.index(self._me) * min(_STAGGER, self._limits.lost_after / 8)

    def _choose(self, view: View) -> Value | None:
        """The next generation, as far as this agent knows; None if there is no need for one."""
        if not _is_due(view):
            return None
        following = successor(view, self._limits.maximum)
        return following.encode() if len(following.seats) >= self._limits.minimum else None


def _is_due(view: View) -> bool:
    return is_disturbed(view) or is_paused(view)
