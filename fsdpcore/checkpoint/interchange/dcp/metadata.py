"""What the file ``.metadata`` says: which tensors there are, and where their chunks lie."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from fsdpcore.checkpoint.format.metadata_builder import check_shape
from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.checkpoint.interchange.array_sources import ArraySpec
from fsdpcore.checkpoint.interchange.dcp.names import (
    BYTES,
    CHUNK,
    DTYPES,
    IN_METADATA,
    INDEX,
    METADATA,
    PROPERTIES,
    SIZE,
    STORAGE_INFO,
    TENSOR,
)
from fsdpcore.checkpoint.interchange.dcp.pickles import Instance, Name, read_pickle
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError
from fsdpcore.core.geometry.regions import Box, check_region, first_overlap

_Shape = tuple[int, ...]

_NOT_IN_NAMES = re.compile(r"[/\\\0]")


class Item(NamedTuple):
    """Bytes of a file, which a chunk is written as."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A box of a tensor, and what has its elements."""

    box: Box
    item: Item


@dataclass(frozen=True)
class DcpMetadata:
    """What is in a checkpoint.

    Attributes:
        arrays: dtype and shape by name.
        chunks: of each, none of them empty; they do not overlap, but may leave something out.
        objects: names of what is no tensor.
    """

    arrays: dict[str, ArraySpec]
    chunks: dict[str, tuple[Chunk, ...]]
    objects: tuple[str, ...]


def read_metadata(data: bytes, what: str) -> DcpMetadata:
    """Return what ``.metadata`` says.

    Args:
        data: all of the file.
        what: it is, for messages.

    Raises:
        CorruptCheckpointError: it makes no sense, or names what no such file needs.
        ArgumentError: a tensor has a dtype that NumPy does not have, or was compressed.
    """
    return _Parsed(read_pickle(data, IN_METADATA, what), what).result()


class _Parsed:
    def __init__(self, root: Any, what: str) -> None:
        self._root = root
        self._what = what

    def result(self) -> DcpMetadata:
        state = self._state(self._root, (METADATA,), "the whole")
        entries = self._dict(state.get("state_dict_metadata"), "state_dict_metadata")
        items = self._items(self._dict(state.get("storage_data"), "storage_data"))
        self._check_apart(items)
        found = DcpMetadata({}, {}, ())
        objects = []
        for name, entry in entries.items():
            if type(name) is not str:
                raise self._wrong(f"{short(name)} is the name of a tensor")
            if isinstance(entry, Instance) and entry.of == BYTES:
                objects.append(name)
                items.pop((name, None), None)
                continue
            array, boxes = self._tensor(name, entry)
            found.arrays[name] = array
            found.chunks[name] = tuple(self._chunks(name, array, boxes, items))
        for name, _ in items:
            raise self._wrong(f"it says where {short(name)} is, but not what that is")
        return DcpMetadata(found.arrays, found.chunks, tuple(objects))

    def _wrong(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._what} is damaged: {why}")

    # Pickled objects.

    def _state(self, value: Any, kinds: tuple[Name, ...], what: str) -> dict[Any, Any]:
        if not isinstance(value, Instance) or value.of not in kinds:
            raise self._wrong(f"{what} is no {kinds[0].name}")
        return self._dict(value.state, what)

    def _dict(self, value: Any, what: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise self._wrong(f"{what} is {short(value)}, no dict")
        return value

    def _size(self, value: Any, what: str) -> _Shape:
        if isinstance(value, Instance) and value.of == SIZE and len(value.args) == 1:
            value = value.args[0]
        if type(value) is not tuple or not all(type(each) is int and each >= 0 for each in value):
            raise self._wrong(f"{what} is {short(value)}, no size")
        return value

    # What they mean.

    def _tensor(self, name: str, entry: Any) -> tuple[ArraySpec, list[Box]]:
        state = self._state(entry, (TENSOR,), short(name))
        shape = self._size(state.get("size"), f"the size of {short(name)}")
        dtype = DTYPES.get(self._dtype(name, state.get("properties")))
        if dtype is None:
            raise ArgumentError(
                f"{self._what}: {short(name)} has the dtype "
                f"torch.{self._dtype(name, state.get('properties'))}, which NumPy does not have"
            )
        check_shape(shape, dtype.itemsize, name, CorruptCheckpointError)
        chunks = state.get("chunks")
        if type(chunks) is not list:
            raise self._wrong(f"the chunks of {short(name)} are {short(chunks)}, no list")
        boxes = [self._box(name, shape, chunk) for chunk in chunks]
        overlap = first_overlap(boxes, shape)
        if overlap is not None:
            raise self._wrong(f"chunks {overlap[0]} and {overlap[1]} of {short(name)} overlap")
        return ArraySpec(dtype, shape), boxes

    def _dtype(self, name: str, properties: Any) -> str:
        if isinstance(properties, Instance) and properties.of in PROPERTIES:
            state = properties.state
            if type(state) is tuple and state and isinstance(state[0], Name):
                return state[0].name
        raise self._wrong(f"{short(name)} has no dtype")

    def _box(self, name: str, shape: _Shape, chunk: Any) -> Box:
        what = f"a chunk of {short(name)}"
        state = self._state(chunk, (CHUNK,), what)
        start, sizes = (
            self._size(state.get(each), f"{each} of {what}") for each in ("offsets", "sizes")
        )
        stop = tuple(map(sum, zip(start, sizes, strict=False)))
        box = Box(start, stop)
        check_region(box, shape, f"{self._what}: {what}", CorruptCheckpointError)
        if len(sizes) != len(start):
            raise self._wrong(f"sizes of {what} are {short(sizes)}")
        return box

    def _items(self, stored: dict[Any, Any]) -> dict[tuple[str, _Shape | None], Item]:
        found = {}
        for key, value in stored.items():
            state = self._state(key, (INDEX,), "a key of storage_data")
            name, offset = state.get("fqn"), state.get("offset")
            if type(name) is not str:
                raise self._wrong("a key of storage_data has no fqn")
            if offset is not None:
                offset = self._size(offset, f"an offset of {short(name)}")
            found[name, offset] = self._item(name, value)
        return found

    def _item(self, name: str, value: Any) -> Item:
        state = self._state(value, (STORAGE_INFO,), f"where {short(name)} is")
        file = state.get("relative_path")
        plain = isinstance(file, str) and file not in ("", ".", "..")
        if not isinstance(file, str) or not plain or _NOT_IN_NAMES.search(file):
            raise self._wrong(f"the file of {short(name)} is {short(file)}, which is no plain name")
        offset, length = state.get("offset"), state.get("length")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise self._wrong(f"{short(name)} has {short(length)} bytes at {short(offset)}")
        if state.get("transform_descriptors"):
            raise ArgumentError(
                f"{self._what}: {short(name)} was written by way of stream extensions "
                f"({short(state['transform_descriptors'])}), which only PyTorch reads; save it "
                "there without them"
            )
        return Item(file, offset, length)

    def _check_apart(self, items: dict[tuple[str, _Shape | None], Item]) -> None:
        """Raise unless each item has bytes of its own."""
        ordered = sorted(zip(items.values(), items, strict=True), key=lambda each: each[0])
        for (one, (name, _)), (other, (next_name, _)) in pairwise(ordered):
            if one.file == other.file and one.offset + one.length > other.offset:
                raise self._wrong(
                    f"{short(name)} and {short(next_name)} share bytes of {short(one.file)}"
                )

    def _chunks(
        self,
        name: str,
        array: ArraySpec,
        boxes: list[Box],
        items: dict[tuple[str, _Shape | None], Item],
    ) -> Iterator[Chunk]:
        for box in boxes:
            item = items.pop((name, box.start), None)
            if not box.size:
                continue
            if item is None:
                raise self._wrong(f"it does not say where {short(name)} is from {box.start} on")
            # Before anybody has memory for it: a size may say more than there is.
            if item.length < box.size * array.dtype.itemsize:
                raise self._wrong(
                    f"{short(name)} from {box.start} on has the size {box.shape}, but only "
                    f"{item.length} bytes"
                )
            yield Chunk(box, item)
