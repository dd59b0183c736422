"""What tests of whole programs share, those that run side by side too."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import fake_cuda
from support.hosts.lab import why_no_hosts


@pytest.fixture
def machine() -> Iterator[fake_cuda.Machine]:
    """Three GPUs of the stand-in."""
    with fake_cuda.installed(3) as made:
        yield made


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a source text to a file, alone in its folder; return its path."""
    home, numbers = tmp_path_factory.mktemp("scripts"), itertools.count()

    def write(source: str, name: str = "script.py") -> Path:
        path = home / str(next(numbers)) / name
        path.parent.mkdir(parents=True)
        path.write_text(source)
        return path

    return write


@pytest.fixture(scope="session")
def needs_hosts() -> None:
    """Skip where this machine cannot make hosts of our own."""
    if why := why_no_hosts():
        pytest.skip(why)


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Find a port where nobody listens, another one each time.

    It is outside of the range from which systems choose ports by themselves, so that nobody else
    is given it before the test uses it; each process that runs tests has a range.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20_000 + worker % 12 * 1_000
    ports = iter(range(first, first + 1_000))

    def find() -> int:
        for port in ports:
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
        raise AssertionError("no port is free")

    return find
