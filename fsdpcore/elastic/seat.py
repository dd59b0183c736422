"""A rank as its agent knows it: what it is told, and what it says."""

from __future__ import annotations

import functools
import threading

from fsdpcore.comm.transport import Transport
from fsdpcore.core.errors import ElasticError, StateError
from fsdpcore.elastic.channel import Channel, Message
from fsdpcore.elastic.parts import Vault

_LOOK_SECONDS = 0.2  # for which a thread waits before it sees whether an interrupt came

GENERATION, CHANGE = "generation", "change"
FINISHED, LEFT, STOP = "finished", "left", "stop"


class Seat:
    """A process, or a thread, that becomes one rank after another of one job.

    A thread listens to the agent. What ends a generation breaks the backend of it at once.

    Args:
        channel: to the agent.

    Attributes:
        vault: parts of states, which outlive a generation.
        changed: why the next commit is to be one at which all hand over; empty if it is not.
        leaves: this rank is to leave then.
    """

    def __init__(self, channel: Channel) -> None:
        self.vault = Vault()
        self.changed, self.leaves = "", False
        self._channel = channel
        self._news = threading.Condition()
        self._verdict: Message | None = None
        self._begun = False
        self._backend: Transport | None = None
        self._thread = threading.Thread(
            target=self._listen, name="fsdpcore-elastic-agent", daemon=True
        )

    def sit(self) -> None:
        """Tell the agent that this rank is there, and listen from now on."""
        self._thread.start()
        self.tell("ready")

    def begin(self) -> None:
        """Note that a program begins; raises StateError if another one has."""
        if self._begun:
            raise StateError(
                "an elastic job has one program: call one function that elastic.run has decorated, "
                "once"
            )
        self._begun = True

    def tell(self, kind: str, **fields: object) -> None:
        """Tell the agent something; never blocks for long."""
        self._channel.send({"kind": kind, **fields})

    def leave(self, reason: str) -> None:
        """Ask to leave in order; from any thread, or a signal handler."""
        self.leaves, self.changed = True, reason
        # On a thread: the one that a signal has interrupted may be telling the agent something.
        telling = functools.partial(self.tell, "leave", reason=reason)
        threading.Thread(target=telling, name="fsdpcore-elastic-leave", daemon=True).start()

    def verdict(self) -> Message:
        """Wait for what comes next: a generation, or an end."""
        with self._news:
            while self._verdict is None:
                self._news.wait(_LOOK_SECONDS)
            found, self._verdict = self._verdict, None
            return found

    def overtaken(self) -> str:
        """Why what this rank does is over; empty if it is not."""
        verdict = self._verdict
        return "" if verdict is None else _words(verdict)

    def hold(self, backend: Transport) -> None:
        """Have a backend that is broken when the agent says what ends its generation."""
        with self._news:
            self._backend = backend
            if self._verdict is not None:
                self._break(_words(self._verdict))

    def release(self) -> None:
        """Have none any more."""
        with self._news:
            self._backend = None

    def _break(self, why: str) -> None:
        if self._backend is not None:
            self._backend.fail(ElasticError(why))

    def _listen(self) -> None:
        try:
            while True:
                message = self._channel.receive(None)
                if message is not None:
                    self._heard(message)
        except EOFError:
            why = "the agent of this host, which has started this rank, has ended"
            self._heard({"kind": STOP, "reason": why})

    def _heard(self, message: Message) -> None:
        if message["kind"] == CHANGE:
            self.leaves = self.leaves or bool(message.get("leaves"))
            self.changed = str(message["reason"]) or "the ranks of the job change"
            return
        if not self.leaves:
            self.changed = ""
        with self._news:
            self._verdict = message
            self._break(_words(message))
            self._news.notify_all()


def _words(verdict: Message) -> str:
    kind = verdict["kind"]
    if kind == GENERATION:
        content = verdict["generation"]
        reason = f": {content['reason']}" if content["reason"] else ""
        return f"generation {content['number']} of the job begins{reason}"
    if kind == STOP:
        return str(verdict["reason"])
    return "the job has ended" if kind == FINISHED else "this rank has left the job"
