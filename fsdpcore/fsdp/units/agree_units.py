"""All ranks have the same units, or boxes that fit together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.collectives import all_gather
from fsdpcore.collectives.consensus import LocalAttempt, agree, compare
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, byte_view
from fsdpcore.core.device import Device
from fsdpcore.core.digests import DIGEST_BYTES, digest, hex_digest
from fsdpcore.core.disagreement import Disagreement
from fsdpcore.core.errors import MismatchError
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.core.text import rank_list
from fsdpcore.fsdp.sharding.tensor_group import untiled
from fsdpcore.fsdp.units.declaration import UnitDeclaration
from fsdpcore.fsdp.units.spec import Spec

_OPTIONS = "the engine's options (strategy, optimizer, precision, prefetch, seed, ...) differ"


def check_same(
    units: Sequence[UnitDeclaration], backend: Backend, everyone: Backend, options: str
) -> None:
    """Compare all ranks' units and options: no model is glued together from different ones.

    Args:
        units: of this rank's engine.
        backend: the ranks that must have the same of everything.
        everyone: these and others, whose boxes of the same parameters are different ones; see
            ``tensor_group.everyone_of``.
        options: of the engine, in words.
    """
    found = [_Digests.of(unit, backend.device) for unit in units]
    hashed = hex_digest(options.encode())
    same = [f"{_OPTIONS}|{hashed}", f"the number of units differs|{len(units)}"]
    own = [
        f"unit {unit.name!r} differs in names, shapes or initial values|{each.own.hex()}"
        for unit, each in zip(units, found, strict=True)
    ]
    if everyone is backend:  # and nobody has other boxes
        _compare(backend, [*same, *own])
        return
    common = [
        f"unit {unit.name!r} differs in names, whole shapes or initial values|{each.common.hex()}"
        for unit, each in zip(units, found, strict=True)
    ]
    _compare(everyone, [*same, *common])
    with LocalAttempt() as attempt:
        _compare(backend, own)  # the ranks of one tensor rank, which have the same boxes
    agree(everyone, "initial values", attempt.error)


def _compare(backend: Backend, digests: list[str]) -> None:
    """Compare digests, each behind what is wrong if it differs."""

    def message(found: Disagreement) -> str:
        cause = found.groups[0][0].rpartition("|")[0]
        return f"{cause} between {found.ranks}; give all ranks the same"

    compare(backend, "initial values", digests, message)


class _Digests(NamedTuple):
    """Hashes of a unit.

    Attributes:
        own: of all that the ranks that shard must have alike.
        common: of what the ranks with other boxes must have, too.
    """

    own: bytes
    common: bytes

    @classmethod
    def of(cls, unit: UnitDeclaration, device: Device) -> _Digests:
        """Hash a unit that has its initial values still."""
        ignored = sorted((name, a.shape, a.dtype.name) for name, a in unit.ignored.items())
        fixed = repr((unit.ties, sorted(unit.frozen), ignored)).encode()
        first = unit.name.encode(errors="backslashreplace")
        own, common = (bytearray(first + fixed) for _ in range(2))
        for name, value in (unit.initial or {}).items():
            box, dtype = unit.boxes.get(name), value.dtype.name
            hashed = digest_of(value, device)
            own += repr((name, value.shape, dtype, box)).encode() + hashed
            shape = value.shape if box is None else box.whole
            common += repr((name, shape, dtype, box is None, isinstance(value, Spec))).encode()
            common += hashed if box is None or isinstance(value, Spec) else b""
        return cls(digest(own), digest(common))


def digest_of(value: Array | Spec, device: Device) -> bytes:
    """Hash the values of a parameter, or what they will be."""
    if isinstance(value, Spec):
        data: Any = repr(value.init).encode()
    else:
        data = byte_view(np.ascontiguousarray(device.to_host(value))).data
    return digest(data)


class _BoxRecord(NamedTuple):
    """What a rank tells of a box.

    Attributes:
        box: where it lies.
        digest: of its values if it is whole, since then all ranks of ``tensor`` may have the same;
            else zeros.
    """

    box: ArrayBox
    digest: bytes

    def pack(self) -> bytes:
        """Return it as bytes, as many on all ranks."""
        return np.array([*self.box.start, *self.box.shape], np.int64).tobytes() + self.digest

    @classmethod
    def unpack(cls, data: bytes, whole: tuple[int, ...]) -> _BoxRecord:
        """Return what another rank told of its box of the same array."""
        numbers = np.frombuffer(data[:-DIGEST_BYTES], np.int64).tolist()
        return cls(
            ArrayBox(whole, numbers[: len(whole)], numbers[len(whole) :]), data[-DIGEST_BYTES:]
        )


def exchange_tilings(units: Sequence[UnitDeclaration], tensor: Backend, device: Device) -> None:
    """Learn which boxes the other ranks of ``tensor`` have; a collective, after ``check_same``.

    Sets ``tilings`` of the units, and takes out of ``boxes`` what is whole on all of these ranks.

    Raises:
        MismatchError: the boxes of a parameter do not cover it, or overlap; on all ranks.
    """
    boxed = [(unit, name) for unit in units for name in unit.boxes]
    if not boxed:
        return
    mine = []
    for unit, name in boxed:
        box, hashed = unit.boxes[name], bytes(DIGEST_BYTES)
        if box.is_whole:
            hashed = digest_of((unit.initial or {})[name], device)
        mine.append(_BoxRecord(box, hashed).pack())
    row = np.frombuffer(b"".join(mine), np.uint8)
    table = all_gather(row, tensor, label="boxes").reshape(tensor.world_size, -1)
    ends = list(itertools.accumulate(map(len, mine), initial=0))
    for (unit, name), (start, stop) in zip(boxed, itertools.pairwise(ends), strict=True):
        whole = unit.boxes[name].whole
        told = [_BoxRecord.unpack(each[start:stop].tobytes(), whole) for each in table]
        tiling = tuple(each.box for each in told)
        if all(box.is_whole for box in tiling):
            problem = "they have other values" if len(set(told)) > 1 else ""
            del unit.boxes[name]
        else:
            problem = untiled(tiling)
            unit.tilings[name] = tiling
        if problem:
            raise MismatchError(
                f"the parts that ranks {rank_list(tensor.ranks)} have of {unit.name}.{name} do not "
                f"make one array of shape {whole}: {problem}"
            )
