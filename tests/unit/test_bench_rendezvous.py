"""``bench/rendezvous.py``: a meeting of a few light ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_light_ranks_meet(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, BENCH / "rendezvous.py", "--ranks", "2,40", "--processes", "2"]
    subprocess.run([*command, "--json", figures], check=True, timeout=60)
    few, many = json.loads(figures.read_text())
    assert (few["ranks"], many["ranks"]) == (2, 40)
    assert many["table kB"] < 4  # what ranks have alike is told once
