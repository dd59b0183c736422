"""Which states of the protocols of ``zmq`` the schedules of a run have come through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fsdpcore.transports.zmq.control import Control
from fsdpcore.transports.zmq.meeting import MeetingGuest, MeetingHost
from fsdpcore.transports.zmq.watch import Report, Watch
from support.visits import Visit

_TABLE = {
    "rank 0 collects": ("comes", "is refused", "is lost", "is missing"),
    "rank 0 has told": ("all thank", "some do not"),
    "rank 0 has refused": ("all know", "some do not come"),
    "looks for rank 0": ("finds it", "finds nobody", "is another"),
    "waits for the table": ("table", "error", "ended"),
    "hears nothing bad": ("link breaks", "ended", "stopped", "silent", "cut", "left", "again"),
    "finds out": ("link breaks", "ended", "stopped", "silent", "cut", "alive", "left", "again"),
    "has decided": ("link breaks", "ended", "stopped", "silent", "alive", "again"),
    "decides": ("ended", "stopped", "silent", "cut", "nobody is lost", "was stopped itself"),
    "whole job": ("peer failed", "peer leaves", "peer is gone", "peer is missed", "closes up"),
    "broken job": ("peer failed", "peer leaves", "peer is gone"),
}
ALL = frozenset((state, event) for state, events in _TABLE.items() for event in events)


def _admitted(host: MeetingHost, *_: Any) -> Any:
    return lambda: [("rank 0 collects", "is refused" if sys.exc_info()[1] else "comes")]


def _lost(host: MeetingHost) -> Any:
    return lambda: [("rank 0 collects", "is lost")] if sys.exc_info()[1] else []


def _missing(host: MeetingHost, *_: Any) -> list[Visit]:
    return [("rank 0 collects", "is missing")]


def _thanked(host: MeetingHost, deadline: Any) -> Any:
    return lambda: [("rank 0 has told", "all thank" if deadline.remaining() else "some do not")]


def _refused(host: MeetingHost, why: str, end: Any) -> Any:
    return lambda: [("rank 0 has refused", "all know" if end.remaining() else "some do not come")]


def _greeted(guest: MeetingGuest) -> Any:
    def told() -> list[Visit]:
        error = str(sys.exc_info()[1] or "")
        event = "is another" if "secret" in error else "finds nobody" if error else "finds it"
        return [("looks for rank 0", event)]

    return told


def _answered(guest: MeetingGuest, *_: Any) -> Any:
    def told() -> list[Visit]:
        error = str(sys.exc_info()[1] or "")
        return [("waits for the table", "ended" if "ended" in error else "no answer")] * bool(error)

    return told


def _met(guest: MeetingGuest, data: bytes) -> list[Visit]:
    return [("waits for the table", "error" if data.startswith(b"{") else "table")]


def _state(watch: Any) -> str:
    if watch._done:
        return "has decided"
    unsure = watch._broken or watch._probes or watch._settled is not None
    return "finds out" if unsure else "hears nothing bad"


def _broke(watch: Watch, rank: int) -> list[Visit]:
    return [(_state(watch), "link breaks")]


def _noted(watch: Any, report: Report, *_: Any) -> list[Visit]:
    return [(_state(watch), "again" if report in watch._reports else report.found)]


def _decided(watch: Any) -> Any:
    def told() -> list[Visit]:
        failure = watch._owner._backend.failure
        if not watch._done:
            return [("decides", "nobody is lost")]
        return [("decides", "cut")] if getattr(failure, "pair", None) else []

    return told


def _verdict(watch: Watch, rank: int, found: str, *_: Any) -> list[Visit]:
    return [("decides", found)]


def _control(event: str) -> Callable[..., list[Visit]]:
    def told(control: Any, *_: Any) -> list[Visit]:
        return [("whole job" if control._backend.failure is None else "broken job", event)]

    return told


def _closing_up(watch: Watch) -> list[Visit]:
    return [("whole job", "closes up")]


def _stopped(watch: Watch, *_: Any) -> list[Visit]:
    return [("decides", "was stopped itself")]


WATCHED: list[tuple[Any, str, Any]] = [
    (MeetingHost, "_admit", _admitted),
    (MeetingHost, "_look_for_losses", _lost),
    (MeetingHost, "_describe_missing", _missing),
    (MeetingHost, "_await_thanks", _thanked),
    (MeetingHost, "_refuse_late", _refused),
    (MeetingGuest, "greet", _greeted),
    (MeetingGuest, "_answer", _answered),
    (MeetingGuest, "_understood", _met),
    (Watch, "lost", _broke),
    (Watch, "_note", _noted),
    (Watch, "_decide", _decided),
    (Watch, "_text", _verdict),
    (Watch, "_fail_stopped", _stopped),
    (Watch, "_close_up", _closing_up),
    (Control, "_note_failure", _control("peer failed")),
    (Control, "_note_leaving", _control("peer leaves")),
    (Control, "_note_gone", _control("peer is gone")),
    (Control, "miss", _control("peer is missed")),
]
