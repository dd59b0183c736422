"""Which machine the fake modules stand for: there is one at a time, as there is one ``cupy``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.fake_cuda.machine import Machine

_machines: list[Machine] = []


def machine() -> Machine:
    """The machine that is switched on."""
    if not _machines:
        raise RuntimeError("the stand-in for CuPy is used outside `with fake_cuda.installed()`")
    return _machines[-1]


def is_on() -> bool:
    """Whether one is switched on."""
    return bool(_machines)


def switch_on(made: Machine) -> None:
    """Make it the machine of the fake modules."""
    if _machines:
        raise RuntimeError("`fake_cuda.installed()` within another one: there is one at a time")
    _machines.append(made)


def switch_off() -> None:
    """Have none."""
    _machines.pop()
