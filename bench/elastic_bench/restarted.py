"""What others do about a loss: all ranks start again, from a checkpoint on the disk.

    python -m torch.distributed.run --max-restarts 100 ... bench/elastic_bench/restarted.py FOLDER

Each step is an all_reduce of Gloo and a checkpoint. A line of the diary is written at its end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_ELEMENTS = 1 << 18


def main() -> None:
    """Be a worker."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    saved = folder / f"rank-{dist.get_rank()}.pt"
    state = {"step": 0, "w": torch.zeros(_ELEMENTS)}
    if saved.exists():
        state = torch.load(saved)
    with open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as diary:
        while True:
            gradient = torch.ones(_ELEMENTS)
            dist.all_reduce(gradient)
            state = {"step": state["step"] + 1, "w": state["w"] + gradient}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
            line = {"at": time.monotonic(), "pid": os.getpid(), "step": state["step"]}
            diary.write(json.dumps(line) + "\n")
            diary.flush()


if __name__ == "__main__":
    main()
