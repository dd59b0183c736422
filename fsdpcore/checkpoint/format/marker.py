"""The commit marker: written last, so that where it is whole, everything is.

It is text and proves itself: its last line is the SHA-256 of all lines before it, and it names size
and SHA-256 of the metadata::

    fsdpcore checkpoint 1
    step 30
    save_id 5f0c...
    metadata_bytes 12345
    metadata_sha256 9f86...
    metrics {"loss":1.5}
    checksum 60303...
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdpcore.checkpoint.format.strict_json import check_json, decode, encode, short
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError, FsdpcoreError

MARKER_NAME = "COMMIT"
MAX_MARKER_BYTES = 1 << 20
"""Larger is no marker; nobody needs to read more."""

_TITLE = "fsdpcore checkpoint 1"
_HEX = re.compile(r"[0-9a-f]{64}")
_SAVE_ID = re.compile(r"[0-9A-Za-z._-]{1,128}")
# A whole marker ends with a line as long as this; others that may be as long begin like these.
_LAST_LINE = len("checksum ") + 64
_LONG_LINES = (b"save_id ", b"metadata_sha256 ", b"metrics ")
_LINES = re.compile(
    rb"fsdpcore checkpoint 1\n"
    rb"step (0|[1-9][0-9]{0,18})\n"
    rb"save_id ([0-9A-Za-z._-]{1,128})\n"
    rb"metadata_bytes (0|[1-9][0-9]{0,18})\n"
    rb"metadata_sha256 ([0-9a-f]{64})\n"
    rb"metrics (\{[^\n]*\})\n"
)


@dataclass(frozen=True)
class Marker:
    """What the marker says.

    Attributes:
        step: of the checkpoint.
        save_id: of the save: letters, digits, dots, dashes; at most 128.
        metadata_bytes: size of metadata.json.
        metadata_checksum: SHA-256 of metadata.json, 64 hexadecimal digits.
        metrics: finite floats by name, so that retention needs to read nothing else.
    """

    step: int
    save_id: str
    metadata_bytes: int
    metadata_checksum: str
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, step: int, save_id: str, metadata: bytes, metrics: Mapping[str, float] | None = None
    ) -> Marker:
        """Return the marker for the bytes of a metadata.json."""
        checksum = hashlib.sha256(metadata).hexdigest()
        return cls(step, save_id, len(metadata), checksum, dict(metrics or {}))

    def check(self, metadata: bytes) -> None:
        """Compare the bytes of a metadata.json with what the marker says.

        Raises:
            CorruptCheckpointError: they are others.
        """
        if len(metadata) != self.metadata_bytes:
            raise CorruptCheckpointError(
                f"metadata.json has {len(metadata)} bytes, but {self.metadata_bytes} were committed"
            )
        if hashlib.sha256(metadata).hexdigest() != self.metadata_checksum:
            raise CorruptCheckpointError("metadata.json is not what was committed: its SHA-256")

    def to_bytes(self) -> bytes:
        """Return the file's content.

        Raises:
            ArgumentError: a value that the marker cannot hold.
        """
        check_marker(self)
        text = (
            f"{_TITLE}\n"
            f"step {self.step}\n"
            f"save_id {self.save_id}\n"
            f"metadata_bytes {self.metadata_bytes}\n"
            f"metadata_sha256 {self.metadata_checksum}\n"
            f"metrics {encode(self.metrics)}\n"
        ).encode()
        data = text + checksum_line(text)
        if len(data) > MAX_MARKER_BYTES:
            raise ArgumentError(f"the marker has {len(data)} bytes; keep fewer metrics")
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Marker:
        """Read a marker.

        Raises:
            CorruptCheckpointError: these are not exactly the bytes of one.
        """
        data = bytes(data)
        if len(data) > MAX_MARKER_BYTES:
            raise CorruptCheckpointError(f"{MARKER_NAME} has {len(data)} bytes, which is no marker")
        text, space, last = data.rpartition(b"checksum ")
        if not space or checksum_line(text) != space + last:
            raise CorruptCheckpointError(
                f"{MARKER_NAME} is cut off or was changed: its last line is not its checksum"
            )
        found = _LINES.fullmatch(text)
        if found is None:
            raise CorruptCheckpointError(
                f"{MARKER_NAME} begins {text[:40]!r}; this version of fsdpcore reads {_TITLE!r}"
            )
        step, save_id, size, checksum = (found[group].decode() for group in range(1, 5))
        metrics = decode(found[5], f"metrics of {MARKER_NAME}")
        marker = cls(int(step), save_id, int(size), checksum, metrics)
        try:
            same = marker.to_bytes() == data
        except ArgumentError as error:
            raise CorruptCheckpointError(f"{MARKER_NAME}: {error}") from None
        if not same:
            raise CorruptCheckpointError(f"{MARKER_NAME} is not as fsdpcore writes it")
        return marker


def is_torn(marker: bytes) -> bool:
    """Whether this is what is left of a commit that was cut off, and not a marker damaged later."""
    last = marker.rstrip(b"\0\n").rpartition(b"\n")[2]
    return len(last) < _LAST_LINE or (last.startswith(_LONG_LINES) and b"checksum" not in last)


def check_marker(marker: Marker) -> None:
    """Raise ArgumentError if a value cannot be in a marker."""
    for what, value in (("step", marker.step), ("metadata_bytes", marker.metadata_bytes)):
        if type(value) is not int or not 0 <= value < 2**63:
            raise ArgumentError(
                f"{what} of a checkpoint must be an int in [0, 2**63), got {short(value)}"
            )
    check_save_id(marker.save_id)
    if type(marker.metadata_checksum) is not str or not _HEX.fullmatch(marker.metadata_checksum):
        raise ArgumentError("the checksum of the metadata must be 64 hexadecimal digits")
    check_metrics(marker.metrics)


def check_save_id(save_id: object, error: type[FsdpcoreError] = ArgumentError) -> None:
    """Raise ``error`` if this cannot be the id of a save."""
    if type(save_id) is not str or not _SAVE_ID.fullmatch(save_id):
        raise error(
            f"the id of a save must be 1 to 128 letters, digits, dots, dashes, got {short(save_id)}"
        )


def check_metrics(metrics: object, error: type[FsdpcoreError] = ArgumentError) -> None:
    """Raise ``error`` if these are no finite floats by name."""
    if type(metrics) is not dict or any(type(value) is not float for value in metrics.values()):
        raise error(f"metrics must be a dict from names to floats, got {short(metrics)}")
    check_json(metrics, "metrics", error)


def checksum_line(text: bytes) -> bytes:
    """Return the line that ends a text, by which it proves itself."""
    return b"checksum " + hashlib.sha256(text).hexdigest().encode() + b"\n"
