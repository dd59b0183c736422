"""``FileWitness``: what decides between two halves of a job, in a file on a disk that all reach."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from typing import Any

import xxhash

from fsdpcore.core.errors import ConfigError
from fsdpcore.elastic.paxos import NO_BALLOT, Acceptor, Answer, Ballot, Value, read_ballot

_JOBS = 100  # that the file remembers, those that asked last


class FileWitness:
    """An acceptor whose state lies in a file.

    It is read and written under a lock on ``PATH.lock``, and replaced as a whole. Reading and
    writing may block as long as the disk does; a lock that another agent holds is not waited for.
    The file must not be deleted while a job runs: the witness notices, and says no more.

    Args:
        path: of the file, on a disk that all hosts of the job share; it is made if it isn't there.

    Attributes:
        id: of the file, the same for all that have opened it.
        trouble: why it could not be asked the last time; empty if it could.

    Raises:
        ConfigError: the file cannot be made or read, or is something else.

    Example:
        >>> member = Member(card, witness=FileWitness("/shared/job.witness"), ...)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.trouble = ""
        self._path = os.path.abspath(os.fspath(path))
        try:
            with self._locked(wait=True):
                if not os.path.exists(self._path):
                    self._write({"id": secrets.token_hex(8), "jobs": {}})
                self.id = str(self._read()["id"])
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the file of the witness, {self._path}, cannot be used: {error}; name one in a "
                "folder that all hosts share and may write to"
            ) from error

    def prepare(self, decree: str, number: int, ballot: Ballot) -> Answer | None:
        """As ``Acceptor.prepare``; None if the file cannot be had, or knows a later decision."""
        return self._ask(decree, number, ballot, None)

    def accept(self, decree: str, number: int, ballot: Ballot, value: Value) -> Answer | None:
        """As ``Acceptor.accept``; None if the file cannot be had, or knows a later decision."""
        return self._ask(decree, number, ballot, value)

    def _ask(self, decree: str, number: int, ballot: Ballot, value: Value | None) -> Answer | None:
        try:
            with self._locked(wait=False):
                content = self._read()
                if content["id"] != self.id:
                    raise ValueError("it was replaced by another file")
                jobs = content["jobs"]
                before = jobs.pop(decree, None)
                if before and before["number"] > number:
                    return None
                acceptor = _acceptor(before if before and before["number"] == number else None)
                answer = (
                    acceptor.prepare(ballot) if value is None else acceptor.accept(ballot, value)
                )
                jobs[decree] = {
                    "number": number,
                    "promised": acceptor.promised,
                    "accepted": acceptor.accepted,
                }
                content["jobs"] = dict([*jobs.items()][-_JOBS:])
                self._write(content)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            self.trouble = f"the witness {self._path} cannot be asked: {error}"
            return None
        self.trouble = ""
        return answer

    @contextlib.contextmanager
    def _locked(self, *, wait: bool) -> Iterator[None]:
        fd = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.fstat(fd).st_ino != os.stat(f"{self._path}.lock").st_ino:
                raise OSError("its lock was deleted")
            yield
        finally:
            os.close(fd)

    def _read(self) -> dict[str, Any]:
        with open(self._path, encoding="utf-8") as file:
            digest, _, text = file.read().partition("\n")
        if digest != _digest(text):
            raise ValueError("it is damaged, or no file of a witness")
        content: dict[str, Any] = json.loads(text)
        return content

    def _write(self, content: dict[str, Any]) -> None:
        text = json.dumps(content)
        temporary = f"{self._path}.new"  # under the lock there is one
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(f"{_digest(text)}\n{text}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        folder = os.open(os.path.dirname(self._path), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _digest(text: str) -> str:
    return xxhash.xxh64_hexdigest(text.encode())


def _acceptor(content: dict[str, Any] | None) -> Acceptor:
    """The acceptor as it was written; a new one if there was none."""
    if content is None:
        return Acceptor(NO_BALLOT)
    accepted = content["accepted"]
    return Acceptor(
        read_ballot(content["promised"]), accepted and (read_ballot(accepted[0]), dict(accepted[1]))
    )
