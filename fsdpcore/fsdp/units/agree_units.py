"""All ranks have the same units, or boxes that fit together."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from fsdpcore.collectives import all_gather
from fsdpcore.collectives.consensus import LocalAttempt, agree, compare
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.transport import transport_of
from fsdpcore.core.buffers import Array, byte_view
from fsdpcore.core.device import Device
from fsdpcore.core.digests import DIGEST_BYTES, hex_digest
from fsdpcore.core.disagreement import Disagreement
from fsdpcore.core.errors import MismatchError
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.core.text import rank_list
from fsdpcore.fsdp.sharding.tensor_group import untiled
from fsdpcore.fsdp.units.declaration import UnitDeclaration
from fsdpcore.fsdp.units.spec import Spec

_OPTIONS = "the engine's options (strategy, optimizer, precision, compression, ...) differ"
_SHOWN = 200  # characters
_GENERATOR = (
    "draw them from a generator of the rank's own that has the same seed on all, as "
    "np.random.default_rng(seed) or torch.Generator().manual_seed(seed)"
)
_KEY = ", or by a key that is the same on all, jax.random.key(seed)"
_SHARED = (
    ". These ranks are threads of one process, which share the states of np.random, random and "
    "torch: what one rank seeds or draws changes what another one gets"
)


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

    Raises:
        MismatchError: they differ; on all ranks. It says which unit and parameter does, in what,
            and on which ranks.
    """
    same = [
        _Said(_OPTIONS, hex_digest(options.encode()), shown=False),
        _Said("the number of units differs", str(len(units))),
    ]
    hashes = [
        {name: digest_of(value, backend.device) for name, value in (unit.initial or {}).items()}
        for unit in units
    ]
    own, common = (
        [each for unit, told in zip(units, hashes, strict=True) for each in say(unit, told)]
        for say in (_own, _common)
    )
    if everyone is backend:  # and nobody has other boxes
        _compare(backend, [*same, *own])
        return
    _compare(everyone, [*same, *common])
    with LocalAttempt() as attempt:
        _compare(backend, own)  # the ranks of one tensor rank, which have the same boxes
    agree(everyone, "initial values", attempt.error)


class _Said(NamedTuple):
    """One thing that a rank says of its units. What comes after it is about the same things.

    Attributes:
        what: differs, if ranks say different values.
        value: of this rank.
        shown: people can read the value.
        drawn: it stands for values that may come from a random generator.
    """

    what: str
    value: str
    shown: bool = True
    drawn: bool = False


def _compare(backend: Backend, said: Sequence[_Said]) -> None:
    """Compare what the ranks say, one thing after the other."""

    def message(found: Disagreement) -> str:
        item = said[found.position]
        how = f": {found.sentence}" if item.shown else f" between {found.ranks}"
        text = f"{item.what}{how}; give all ranks the same"
        if item.drawn:
            threads = transport_of(backend).ranks_are_threads
            text += f", and {_GENERATOR}{_KEY if 'jax' in sys.modules else ''}"
            text += _SHARED if threads else ""
        return text

    compare(backend, "initial values", [each.value for each in said], message)


def _own(unit: UnitDeclaration, hashes: Mapping[str, bytes]) -> Iterator[_Said]:
    """What the ranks that shard a unit must have alike."""
    yield from _names(unit)
    for name, value in (unit.initial or {}).items():
        of, box = f"unit {unit.name!r} differs in", unit.boxes.get(name)
        where = "" if box is None else f" at {box.start} of {box.whole}"
        yield _Said(f"{of} the shape or dtype of {name}", f"{value.dtype} {value.shape}{where}")
        yield _values(f"{of} the initial values of {name}", value, hashes[name])


def _common(unit: UnitDeclaration, hashes: Mapping[str, bytes]) -> Iterator[_Said]:
    """What ranks with other boxes must have like these, too."""
    yield from _names(unit)
    for name, value in (unit.initial or {}).items():
        of, box = f"unit {unit.name!r} differs in", unit.boxes.get(name)
        shape, cut = (value.shape, "") if box is None else (box.whole, ", of which it has a box")
        yield _Said(f"{of} the whole shape or dtype of {name}", f"{value.dtype} {shape}{cut}")
        if box is None or isinstance(value, Spec):
            yield _values(f"{of} the initial values of {name}", value, hashes[name])


def _names(unit: UnitDeclaration) -> Iterator[_Said]:
    yield _Said("the name of a unit differs", repr(unit.name))
    of = f"unit {unit.name!r} differs in"
    yield _Said(f"{of} names", _short([*(unit.initial or ()), *unit.ignored, *unit.ties]))
    yield _Said(f"{of} what is tied", _short(sorted(unit.ties.items())))
    yield _Said(f"{of} what is frozen", _short(sorted(unit.frozen)))
    ignored = sorted((name, a.dtype.name, a.shape) for name, a in unit.ignored.items())
    yield _Said(f"{of} what is ignored", _short(ignored))


def _short(values: Sequence[object]) -> str:
    """Values in words, and in a hash where they are too many to be read."""
    text = str(list(values))
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]} ... ({hex_digest(text.encode(errors='backslashreplace'))})"


def _values(what: str, value: Array | Spec, hashed: bytes) -> _Said:
    spec = isinstance(value, Spec)
    return _Said(what, f"{'made by' if spec else 'given'} {hashed.hex()}", False, not spec)


def digest_of(value: Array | Spec, device: Device) -> bytes:
    """Hash the values of a parameter, or what they will be."""
    if isinstance(value, Spec):
        data: Any = repr(value.init).encode()
    else:
        data = byte_view(np.ascontiguousarray(device.to_host(value))).data
    # All ranks read all values, so that this is a part of the time in which an engine is made.
    return xxh3_128_digest(data)


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
