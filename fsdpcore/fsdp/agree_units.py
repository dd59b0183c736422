"""Checks of an engine's units: each for itself, and against those of the other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.buffers import byte_view
from fsdpcore.collectives import all_gather
from fsdpcore.device import Device
from fsdpcore.errors import ArgumentError, MismatchError, StateError
from fsdpcore.fsdp.spec import Spec
from fsdpcore.fsdp.special import Tied, elements_of
from fsdpcore.fsdp.unit import Unit


def check_units(units: tuple[Unit, ...], device: Device) -> None:
    """Tie arrays that occur twice, and raise ArgumentError for units that do not fit together.

    Their arrays may be NumPy's, or those of the device.
    """
    if not units:
        raise ArgumentError("an engine needs at least one unit")
    names = set()
    for unit in units:
        if not isinstance(unit, Unit):
            raise ArgumentError(f"units must be Unit objects, got {type(unit).__name__}")
        if unit.name in names:
            raise ArgumentError(f"two units are named {unit.name!r}; names must be unique")
        names.add(unit.name)
        if unit.initial is None:
            raise StateError(f"unit {unit.name!r} belongs to an engine already; make a new one")
        for name, value in (*unit.initial.items(), *unit.ignored.items()):
            if not isinstance(value, Spec):
                device.given(value, f"{unit.name}.{name}")
    _tie_same_arrays(units)
    _check_ties(units)


def _tie_same_arrays(units: tuple[Unit, ...]) -> None:
    seen: dict[Hashable, tuple[Unit, str]] = {}
    for unit in units:
        for name, value in list((unit.initial or {}).items()):
            # The same elements, also by way of a view or a transpose.
            place = elements_of(value)
            owner, first = (unit, name) if place is None else seen.setdefault(place, (unit, name))
            if (owner, first) == (unit, name):
                continue
            other = (owner.initial or {})[first]
            assert not isinstance(other, Spec)
            assert not isinstance(value, Spec)
            if (other.shape, other.strides, other.dtype) != (
                value.shape,
                value.strides,
                value.dtype,
            ):
                raise ArgumentError(
                    f"{owner.name}.{first} and {unit.name}.{name} are views of the same memory, "
                    "but not the same array; a tied parameter has one shape: pass "
                    f"fc.Tied({owner.name!r}, {first!r}) and transpose it where it is used"
                )
            if (first in owner.frozen) is not (name in unit.frozen):
                stays, learns = (f"{owner.name}.{first}", f"{unit.name}.{name}")
                if name in unit.frozen:
                    stays, learns = learns, stays
                raise ArgumentError(
                    f"{stays} is frozen, but {learns}, which is the same array, is trained; freeze "
                    "both, or neither"
                )
            unit.tie(name, Tied(owner.name, first))


def _check_ties(units: tuple[Unit, ...]) -> None:
    by_name = {unit.name: unit for unit in units}
    for unit in units:
        for name, tie in unit.ties.items():
            owner = by_name.get(tie.unit)
            if owner is None or tie.param not in (owner.initial or {}):
                raise ArgumentError(
                    f"{unit.name}.{name} is tied to {tie}, which no unit of this engine owns; name "
                    "a parameter that is itself an array or a Spec"
                )


def check_same(units: tuple[Unit, ...], backend: Backend, options: str) -> None:
    """Compare all ranks' units and options: no model is glued together from different ones."""
    hashed = hashlib.blake2b(options.encode(), digest_size=16).digest()
    found = [_digest(unit, backend.device) for unit in units]
    digests = np.stack([np.frombuffer(hashed, np.uint8), *found])
    everywhere = all_gather(digests, backend, label="initial values")
    everywhere = everywhere.reshape(backend.world_size, *digests.shape)
    names = ["the engine's options (strategy, optimizer, precision, prefetch, seed, ...) differ"]
    names += [f"unit {unit.name!r} differs in names, shapes or initial values" for unit in units]
    for number, name in enumerate(names):
        differing = np.flatnonzero((everywhere[:, number] != everywhere[0, number]).any(axis=1))
        if differing.size:
            ranks = ", ".join(str(backend.ranks[rank]) for rank in differing)
            raise MismatchError(
                f"{name} between rank {backend.ranks[0]} and ranks {ranks}; give all ranks the same"
            )


def _digest(unit: Unit, device: Device) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    hasher = hashlib.blake2b(unit.name.encode(errors="backslashreplace"), digest_size=16)
    ignored = sorted((name, a.shape, a.dtype.name) for name, a in unit.ignored.items())
    hasher.update(repr((unit.ties, sorted(unit.frozen), ignored)).encode())
    for name, value in (unit.initial or {}).items():
        hasher.update(repr((name, value.shape, value.dtype.name)).encode())
        if isinstance(value, Spec):
            hasher.update(repr(value.init).encode())
        else:
            hasher.update(byte_view(np.ascontiguousarray(device.to_host(value))).data)
    return np.frombuffer(hasher.digest(), np.uint8)
