"""What a rank says to its agent, as the agent's ``Member`` is told it."""

from __future__ import annotations

from fsdpcore.elastic.channel import Message
from fsdpcore.elastic.membership import Member


def pass_on(member: Member, number: int, message: Message, now: float) -> None:
    """Tell a member what one of its seats has said.

    Words that are for the agent alone are left to it.

    Args:
        member: of the agent.
        number: of the seat.
        message: as ``channel.py`` has it.
        now: the time.

    Raises:
        KeyError, TypeError, ValueError: the message lacks a field.
    """
    kind = message["kind"]
    if kind == "ready":
        member.seat_ready(number, now)
    elif kind == "leave":
        member.seat_leaves(number, str(message["reason"]), now)
    elif kind in ("joined", "broken", "paused", "finished"):
        generation = int(message["number"])
        if kind == "joined":
            member.seat_joined(number, generation, now)
        elif kind == "broken":
            suspects = [int(rank) for rank in message["suspects"]]
            member.seat_broken(number, generation, suspects, str(message["reason"]), now)
        elif kind == "paused":
            member.seat_paused(number, generation, now, bool(message["leaves"]))
        else:
            member.seat_finished(number, generation, now)
