from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support import spmd


@pytest.fixture(scope="session", autouse=True)
def _processes() -> Iterator[None]:
    """End the processes that the suite keeps between tests, and see that no thread stays."""
    yield
    spmd.shut_down()
    mine = ("rank-", "fsdpcore-", "fleet")
    for thread in [t for t in threading.enumerate() if t.name.startswith(mine)]:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} is left behind"
