"""Whether what all ranks should have alike is so: by digests, told in words where it is not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from xxhash import xxh3_128

from fsdpcore.checkpoint.format.nodes import leaves, name_of, shown, tag_of
from fsdpcore.checkpoint.format.strict_json import encode
from fsdpcore.checkpoint.memory.fetching import WINDOW_BYTES, fetch
from fsdpcore.checkpoint.plan.contents import Contents
from fsdpcore.checkpoint.save.writing import chunks
from fsdpcore.collectives.objects import all_gather_object
from fsdpcore.comm.backend import Backend
from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.device import Device
from fsdpcore.core.digests import hex_digest
from fsdpcore.core.disagreement import grouped
from fsdpcore.core.errors import MismatchError
from fsdpcore.core.text import name_ranks

Said = dict[str, tuple[str, str]]
"""Of each entry a digest of it, and what it is in words ("" for arrays).

The keys are "array:" or "value:", and the name.
"""

_ABSENT = ("", "not there")
_SHARED_OUT = {"array", "engine"}  # an array may be on some ranks only; engines agree by themselves


def said_of(contents: Contents, backend: Backend) -> Said:
    """Return what this rank says of the entries that are not its own; reads whole arrays."""
    found: Said = {}
    if backend.world_size == 1:
        return found
    for path, node in () if contents.node is None else leaves(contents.node):
        if tag_of(node) not in _SHARED_OUT:
            found[f"value:{name_of(path)}"] = (hex_digest(encode(node).encode()), shown(node))
    arrays: list[Any] = [contents.arrays[name] for name in contents.alike]
    for name, digest in zip(contents.alike, _digests(arrays, backend.device), strict=True):
        found[f"array:{name}"] = (digest, "")
    return found


def in_one(said: Said) -> str:
    """Return one digest of all."""
    return hex_digest(json.dumps(list(said.items())).encode())


def _digests(arrays: Sequence[Array], device: Device) -> Iterator[str]:
    """Give a digest of each array; those of a device come by way of one window of memory."""
    window = None if all(map(on_host, arrays)) else device.page_locked(WINDOW_BYTES)
    for array in arrays:
        found = xxh3_128()
        if window is None or on_host(array):
            parts: Iterable[Array] = [array]
        else:
            parts = _fetched(array, window, device)
        for part in parts:
            for chunk in chunks(part):
                found.update(chunk)
        yield found.hexdigest()


def _fetched(array: Array, window: Bytes, device: Device) -> Iterator[Array]:
    """Give an array of a device in parts, each of which overwrites the one before."""
    flat = device.xp.ascontiguousarray(array).reshape(-1)
    step = WINDOW_BYTES // flat.itemsize
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        room = window[: part.nbytes].view(part.dtype)
        fetch([(room, part)], device)
        yield room


def check_alike(said: Said, backend: Backend, ending: str) -> None:
    """Raise MismatchError for the first entry that ranks do not have alike; a collective.

    To be called where ``in_one`` differs between ranks. Arrays that ranks have not in common are
    not compared.
    """
    lines = all_gather_object(json.dumps(list(said.items())), backend, label="save, what differs")
    every = [dict(json.loads(line)) for line in lines]
    names = dict.fromkeys(name for each in every for name in each)
    for name in names:
        rows = [tuple(each.get(name, _ABSENT)) for each in every]
        kind, _, entry = name.partition(":")
        if kind == "array":
            held = [(row, rank) for row, rank in zip(rows, backend.ranks, strict=True) if row[0]]
            rows, ranks = [row for row, _ in held], [rank for _, rank in held]
        else:
            ranks = list(backend.ranks)
        groups = grouped(rows, ranks)
        if len(groups) > 1:
            raise MismatchError(_message(entry, groups, ending, array=kind == "array"))


def _message(name: str, groups: list[tuple[Any, list[int]]], ending: str, *, array: bool) -> str:
    told = [f"{words} on {name_ranks(ranks)}" for (_, words), ranks in groups[:4] if words]
    where = " and ".join(name_ranks(ranks) for _, ranks in groups[:4])
    distinct = len({words for (_, words), _ in groups[:4]}) > 1  # long ones are cut
    what = f"is {', but '.join(told)}" if distinct else f"differs between {where}"
    advice = "Mark what each rank has of its own with checkpoint.PerRank(value)"
    if array:
        advice = (
            "Make it equal first, with fc.all_reduce(array, backend, op='mean') or "
            "fc.broadcast(array, backend); or mark"
            f"{advice.removeprefix('Mark')}"
        )
    return f"save: the entry {name!r:.80} {what}. {advice}. {ending}"
