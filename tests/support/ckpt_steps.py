"""Tiny committed checkpoints, written call by call: one file with one array of bytes."""

from __future__ import annotations

from collections.abc import Mapping

from fsdpcore.checkpoint.format.marker import MARKER_NAME, Marker
from fsdpcore.checkpoint.format.metadata import METADATA_NAME, Metadata, make_metadata
from fsdpcore.checkpoint.format.stored import StoredFile
from fsdpcore.checkpoint.storage.steps import StepName
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.geometry.regions import Range

FILE = "rank_0.safetensors"
_START, _NBYTES = 64, 100


def held(storage: Storage, directory: str) -> bool:
    """Whether somebody holds a directory; always False without locks."""
    with storage.claim(directory) as claimed:
        return not claimed


def contents(step: int, save_id: str) -> bytes:
    """What the file of a step holds; nobody who reads a step looks at it."""
    return f"{step}/{save_id} ".encode().ljust(_START + _NBYTES + 8, b".")


def described(step: int, save_id: str) -> Metadata:
    size = len(contents(step, save_id))
    return make_metadata(
        save_id=save_id,
        step=step,
        world_size=1,
        created="then",
        files=[StoredFile(FILE, size, _START, _START + _NBYTES, 1, 2)],
        arrays={"x": ("uint8", (_NBYTES,))},
        pieces=[("x", Range(0, _NBYTES), 0, _START)],
    )


def write(storage: Storage, name: StepName, save_id: str | None = None) -> bytes:
    """Write all but the marker into a directory; return the metadata."""
    save_id = save_id or name.name
    data = described(name.step, save_id).to_bytes()
    storage.put(f"{name.name}/{FILE}", contents(name.step, save_id))
    storage.put(f"{name.name}/{METADATA_NAME}", data)
    storage.sync(name.name)
    storage.sync()
    return data


def commit(
    storage: Storage,
    name: StepName,
    metrics: Mapping[str, float] | None = None,
    save_id: str | None = None,
) -> StepName:
    """Make a checkpoint, durable, as a save does; the root must be there."""
    storage.make_directory(name.name)
    data = write(storage, name, save_id)
    marker = Marker.of(name.step, save_id or name.name, data, metrics)
    storage.put(f"{name.name}/{MARKER_NAME}", marker.to_bytes())
    storage.sync(name.name)
    return name


def whole(storage: Storage, name: StepName) -> bool:
    """Whether a checkpoint's file holds what it should."""
    wanted = contents(name.step, name.name)
    return storage.read(f"{name.name}/{FILE}", 1 << 10) == wanted
