"""What an agent and the ranks of its host tell each other.

Every message is a dict of JSON with a ``kind``. Over a socket pair it is a line.

From the agent:

| kind | fields | the rank |
|---|---|---|
| generation | place, generation (``Generation.encode``) | leaves the one before, meets the others |
| change | reason | makes its next commit one at which all ranks hand over |
| finished | | has ended its program: others of its generation have |
| left | | was not taken along, as it had asked to leave; its program ends |
| stop | reason | ends with an ``ElasticError`` |

``place`` has ``rank``, ``world_size``, ``local_rank``, ``local_world_size``, ``meeting``, ``token``
and ``job``, another id for each generation.

From the rank:

| kind | fields | it |
|---|---|---|
| ready | | waits for a generation |
| joined | number | has met the others |
| broken | number, suspects (ranks), reason | has given up a generation |
| paused | number, commit | has handed over at a commit, in order |
| leave | reason | wants to leave at the next commit |
| finished | number | has ended its program, with all others |
"""

from __future__ import annotations

from typing import Any, Protocol

Message = dict[str, Any]


class Channel(Protocol):
    """A rank's end of the way to its agent."""

    def send(self, message: Message) -> None:
        """Tell the agent; never blocks for long. An agent that is gone is told nothing."""

    def receive(self, timeout: float | None) -> Message | None:
        """Wait for the next message; None if none came in time.

        Raises:
            EOFError: the agent is gone.
        """
