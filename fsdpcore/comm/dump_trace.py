"""``dump_trace``: write a rank's last operations to a file."""

from __future__ import annotations

from pathlib import Path

from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import ArgumentError
from fsdpcore.diagnostics.trace_file import file_name


def dump_trace(backend: Backend, directory: str | Path) -> Path:
    """Write this rank's last operations to a directory that ``fsdpcore trace`` reads.

    No collective: any rank may call it at any time. For a trace of all ranks, each has to.

    Args:
        backend: a job's, or a group's, for all operations of this rank.
        directory: made if it is not there.

    Returns:
        The file, ``rank_K.json``; an older one is replaced.

    Raises:
        ArgumentError: it cannot be written.

    Example::

        fc.dump_trace(backend, "traces")  # on every rank; then: fsdpcore trace traces
    """
    path = Path(directory) / file_name(backend.root.rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        backend.root.recorder.dump(path)
    except OSError as error:
        raise ArgumentError(f"dump_trace(): cannot write {path}: {error.strerror}") from error
    return path
