from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import spmd


@pytest.fixture(scope="session", autouse=True)
def _processes() -> Iterator[None]:
    """End the processes that the suite keeps between tests."""
    yield
    spmd.shut_down()
