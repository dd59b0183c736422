"""A small network, and programs that are launched in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdpcore as fc

NETWORK = """
[[level]]
name = "host"
size = 1
rate = "inf"
latency = 0
[[level]]
name = "switch"
size = 0
rate = "100MB/s"
latency = "1ms"
[compute]
message = "10us"
reduce = "inf"
eager = 1000
"""


RATE, LATENCY, MESSAGE = 100e6, 1e-3, 10e-6


def network_file(folder: Path, text: str = NETWORK) -> str:
    """Write the file of a network; return its path."""
    path = folder / "network.toml"
    path.write_text(text)
    return str(path)


def launch(main: Any, world_size: int, **options: Any) -> list[Any]:
    """Run a program on every rank; what they return."""
    return fc.launch(main, world_size=world_size, transport="sim", clock="virtual", **options)
