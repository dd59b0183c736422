"""The witness in a file: what it has promised outlives its readers, and damage is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fsdpcore as fc
from fsdpcore.elastic.witness import FileWitness

VALUE = {"number": 2}


def test_a_promise_outlives_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "witness"
    one, other = FileWitness(path), FileWitness(path)
    assert one.id == other.id
    answer = one.prepare("job", 2, (2, "a"))
    assert answer is not None
    assert answer.granted
    assert answer.accepted is None
    refused = other.prepare("job", 2, (1, "b"))
    assert refused is not None
    assert not refused.granted
    assert refused.promised == (2, "a")
    accepted = one.accept("job", 2, (2, "a"), VALUE)
    assert accepted is not None
    assert accepted.granted
    later = FileWitness(path).prepare("job", 2, (3, "b"))
    assert later is not None
    assert later.accepted == ((2, "a"), VALUE)
    another = other.prepare("another job", 2, (1, "b"))
    assert another is not None
    assert another.granted
    assert other.accept("job", 3, (1, "b"), VALUE) is not None
    assert one.prepare("job", 2, (9, "a")) is None, "a decision that is long past"


def test_it_says_nothing_while_another_asks(tmp_path: Path) -> None:
    """A lock of another process is not waited for."""
    witness = FileWitness(tmp_path / "witness")
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "witness.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert witness.prepare("job", 2, (1, "a")) is None
        assert "cannot be asked" in witness.trouble
        holder.communicate()
    assert witness.prepare("job", 2, (1, "a")) is not None
    assert not witness.trouble


@pytest.mark.parametrize("harm", ["damage", "delete", "replace"])
def test_it_says_nothing_when_its_file_is_not_what_it_was(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "witness"
    witness = FileWitness(path)
    witness.prepare("job", 2, (5, "a"))
    if harm == "damage":
        path.write_bytes(path.read_bytes().replace(b"5", b"1"))
    else:
        path.unlink()
    if harm == "replace":
        FileWitness(path)
    assert witness.prepare("job", 2, (1, "b")) is None
    assert str(path) in witness.trouble


def test_what_is_no_witness_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("something else")
    for path in (tmp_path / "notes", tmp_path / "nowhere" / "witness"):
        with pytest.raises(fc.ConfigError, match="all hosts share"):
            FileWitness(path)
    assert (tmp_path / "notes").read_text() == "something else"
