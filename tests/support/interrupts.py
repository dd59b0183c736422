"""Ctrl-C at a chosen moment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import fsdpcore.transports
import zmq

import fsdpcore

_OURS = tuple(os.path.dirname(str(module.__file__)) for module in (fsdpcore, fsdpcore.transports))
_PYZMQ = os.path.dirname(zmq.__file__)


def _ours(frame: Any) -> bool:
    # What Python calls by itself, to free something, would not be left by an exception.
    code = frame.f_code
    return bool(code.co_filename.startswith(_OURS)) and code.co_name != "<genexpr>"


class Interrupt:
    """Raises KeyboardInterrupt at the given one of the moments at which Python looks for signals.

    These are where our functions begin, and where those return that are written in C.

    Args:
        moment: its number, from 0.
        begun: raise it before, too, where that one of our functions begins; moments count from
            there on.

    Attributes:
        raised: how often it was.
    """

    def __init__(self, moment: int, begun: int | None = None) -> None:
        self._left = moment
        self._begun = -1 if begun is None else begun
        self.raised = 0

    def during(self, call: Callable[[], object]) -> None:
        """Make the call, which may be interrupted."""
        try:
            sys.setprofile(self._profile)
            if self._begun >= 0:
                sys.settrace(self._trace)
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            sys.setprofile(None)

    def _trace(self, frame: Any, event: str, argument: Any) -> None:
        if _ours(frame) and event == "call":
            self._begun -= 1
            if self._begun < 0:
                sys.settrace(None)
                self.raised += 1
                raise KeyboardInterrupt

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if self._begun >= 0:
            return
        inside = _ours(frame) and event in ("call", "c_return")
        # Before pyzmq's functions in C there are some in Python.
        if inside or (event == "return" and frame.f_code.co_filename.startswith(_PYZMQ)):
            self._left -= 1
            if self._left < 0:
                sys.setprofile(None)
                self.raised += 1
                raise KeyboardInterrupt
