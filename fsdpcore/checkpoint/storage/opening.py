"""From a path or URL to the storage that it stands for."""

from __future__ import annotations

import os
import re
from typing import Union

from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.checkpoint.storage.object_storage import FsspecStorage
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.errors import ArgumentError

DISK_TIMEOUT = 1800.0
"""Seconds that ranks wait for one another's disks."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_URL_PARTS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(.+)")

StoragePath = Union[str, "os.PathLike[str]", Storage]
"""Where checkpoints are: a path, a URL such as ``s3://bucket/run``, or a storage."""


def open_storage(path: StoragePath) -> Storage:
    """Return the storage that a path or URL stands for; nothing is made or looked for yet.

    Raises:
        ArgumentError: ``path`` is neither.
        MissingDependencyError: a package for such URLs is not installed.
    """
    if isinstance(path, Storage):
        return path
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if isinstance(text, str) and text and "\0" not in text:
            if _URL.match(text):
                return FsspecStorage(text)
            return LocalStorage(text)
    raise ArgumentError(
        "a place for checkpoints is a path, a URL of the form scheme://..., or a Storage; "
        f"got {path!r}"
    )


def open_folder(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """Return the storage of the folder above ``path``, and the last part of its name.

    Raises:
        ArgumentError: as ``open_storage``; or nothing is above it.
        MissingDependencyError: as ``open_storage``.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or "\0" in text or not text:
        raise ArgumentError(
            f"the path of a checkpoint is that of its folder, as text or a URL; got {path!r:.80}"
        )
    url = _URL_PARTS.fullmatch(text)
    if url is None:
        above, name = os.path.split(os.path.abspath(text))
    else:
        above, _, name = url[2].rstrip("/").rpartition("/")
        above = above and url[1] + above
    if not above or not name:
        raise ArgumentError(f"a checkpoint is a folder in another one, which {text!r:.200} is not")
    return open_storage(above), name
