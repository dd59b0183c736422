"""Checks of an engine's units: each for itself, and against those of the other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array, byte_view
from fsdpcore.collectives import all_gather
from fsdpcore.device import Device
from fsdpcore.errors import ArgumentError, MismatchError, StateError
from fsdpcore.fsdp.boxes import ArrayBox
from fsdpcore.fsdp.spec import Spec
from fsdpcore.fsdp.special import Tied, elements_of
from fsdpcore.fsdp.tensor import check_boxed, described, untiled
from fsdpcore.fsdp.unit import Unit

_DIGEST = 16  # bytes


def check_units(units: tuple[Unit, ...], device: Device, *, cut: bool = False) -> None:
    """Tie arrays that occur twice, and raise ArgumentError for units that do not fit together.

    Their arrays may be NumPy's, or those of the device. With ``cut`` they may be boxes of arrays
    of which other ranks have the rest.
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
    if not cut:
        check_boxed(units)
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
            _check_same_box(owner, first, unit, name)
            if (first in owner.frozen) is not (name in unit.frozen):
                stays, learns = (f"{owner.name}.{first}", f"{unit.name}.{name}")
                if name in unit.frozen:
                    stays, learns = learns, stays
                raise ArgumentError(
                    f"{stays} is frozen, but {learns}, which is the same array, is trained; freeze "
                    "both, or neither"
                )
            unit.tie(name, Tied(owner.name, first))


def _check_same_box(owner: Unit, first: str, unit: Unit, name: str) -> None:
    here = (owner.boxes.get(first), unit.boxes.get(name))
    one, other = (None if box is None or box.is_whole else box for box in here)
    if one != other:
        told = ["whole" if box is None else described(box) for box in (one, other)]
        raise ArgumentError(
            f"{owner.name}.{first} and {unit.name}.{name} are the same array, but the first is "
            f"{told[0]}, the second {told[1]}; a tied parameter has one place"
        )


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


def check_same(
    units: tuple[Unit, ...], backend: Backend, options: str, everyone: Backend | None = None
) -> None:
    """Compare all ranks' units and options: no model is glued together from different ones.

    Args:
        units: of this rank's engine.
        backend: the ranks that must have the same of everything.
        options: of the engine, in words.
        everyone: these and others, whose boxes of the same parameters are different ones; see
            ``tensor.everyone_of``.
    """
    found = [_digests(unit, backend.device) for unit in units]
    hashed = hashlib.blake2b(options.encode(), digest_size=_DIGEST).digest()
    rows = np.stack([np.frombuffer(hashed * 2, np.uint8), *found])
    everyone = backend if everyone is None else everyone
    apart = everyone is backend  # and nobody has other boxes
    mine = rows[:, :_DIGEST] if apart else rows
    table = all_gather(mine, everyone, label="initial values")
    table = table.reshape(-1, backend.world_size, *mine.shape)
    what = ["the engine's options (strategy, optimizer, precision, prefetch, seed, ...) differ"]
    what += [f"unit {unit.name!r} differs in names, shapes or initial values" for unit in units]
    ranks = np.array(everyone.ranks).reshape(table.shape[:2])
    if not apart:
        whole = [line.replace("shapes or", "whole shapes or") for line in what]
        _compare(table[..., _DIGEST:].reshape(-1, *mine.shape[:1], _DIGEST), ranks.ravel(), whole)
    for column, members in zip(table[..., :_DIGEST], ranks, strict=True):
        _compare(column, members, what)


def _compare(digests: Array, ranks: Array, what: list[str]) -> None:
    """Raise MismatchError if ranks have other digests than the first; shape (ranks, what, ...)."""
    differs = (digests != digests[0]).any(axis=2)
    for number in np.flatnonzero(differs.any(axis=0)):
        others = ", ".join(map(str, ranks[differs[:, number]]))
        raise MismatchError(
            f"{what[number]} between rank {ranks[0]} and ranks {others}; give all ranks the same"
        )


def _digests(unit: Unit, device: Device) -> Array:
    """Hash all that the ranks that shard must have alike, then what all ranks must."""
    own, whole = (
        hashlib.blake2b(unit.name.encode(errors="backslashreplace"), digest_size=_DIGEST)
        for _ in range(2)
    )
    ignored = sorted((name, a.shape, a.dtype.name) for name, a in unit.ignored.items())
    told = [repr((unit.ties, sorted(unit.frozen), ignored)).encode()]
    for name, value in (unit.initial or {}).items():
        box, dtype = unit.boxes.get(name), value.dtype.name
        first = digest_of(value, device)
        own.update(repr((name, value.shape, dtype, box)).encode() + first)
        shape = value.shape if box is None else box.whole
        told.append(repr((name, shape, dtype, box is None, isinstance(value, Spec))).encode())
        told.append(first if box is None or isinstance(value, Spec) else b"")
    for part in told:
        whole.update(part)
    own.update(told[0])
    return np.frombuffer(own.digest() + whole.digest(), np.uint8)


def digest_of(value: Array | Spec, device: Device) -> bytes:
    """Hash the values of a parameter, or what they will be."""
    if isinstance(value, Spec):
        data: Any = repr(value.init).encode()
    else:
        data = byte_view(np.ascontiguousarray(device.to_host(value))).data
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def settle_boxes(units: tuple[Unit, ...], tensor: Backend, device: Device) -> None:
    """Learn which boxes the other ranks of ``tensor`` have; a collective, after ``check_same``.

    What is whole on all of them is no box.

    Raises:
        MismatchError: the boxes of a parameter do not cover it, or overlap; on all ranks.
    """
    boxed = [(unit, name) for unit in units for name in unit.boxes]
    if not boxed:
        return
    mine: list[int] = []
    for unit, name in boxed:
        box, digest = unit.boxes[name], bytes(_DIGEST)
        if box.is_whole:  # maybe on all ranks, with the same values then
            digest = digest_of((unit.initial or {})[name], device)
        mine += [*box.start, *box.shape, *np.frombuffer(digest, np.int64).tolist()]
    row = np.array(mine, np.int64)
    table = all_gather(row, tensor, label="boxes").reshape(tensor.world_size, -1).tolist()
    at = 0
    for unit, name in boxed:
        whole, axes = unit.boxes[name].whole, len(unit.boxes[name].whole)
        tiling = tuple(
            ArrayBox(whole, row[at : at + axes], row[at + axes : at + 2 * axes]) for row in table
        )
        digests = {tuple(row[at + 2 * axes : at + 2 * axes + 2]) for row in table}
        at += 2 * axes + 2
        if all(box.is_whole for box in tiling):
            problem = "they have other values" if len(digests) > 1 else ""
            del unit.boxes[name]
        else:
            problem = untiled(tiling)
            unit.tilings[name] = tiling
        if problem:
            raise MismatchError(
                f"the parts that ranks {list(tensor.ranks)} have of {unit.name}.{name} do not make "
                f"one array of shape {whole}: {problem}"
            )
