"""What torchft does about a loss: replicas go on, with the state of those that are left.

    python bench/elastic_bench/replica.py FOLDER ADDRESS LIGHTHOUSE

Each step is an all_reduce of Gloo. A line of the diary is written at its end.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

_ELEMENTS = 1 << 18


def main() -> None:
    """Be a replica of one worker."""
    folder, address, lighthouse = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    # Replicas fetch the state of one that is ahead at the name of its machine, which hosts of a lab
    # have in common.
    socket.gethostname = lambda: address
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    torchft: Any = importlib.import_module("torchft")
    state = {"w": torch.zeros(_ELEMENTS)}
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=state.update,
        state_dict=lambda: state,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=address,
        hostname=address,
    )
    with open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as diary:
        while True:
            manager.start_quorum()
            gradient = torch.ones(_ELEMENTS)
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                state["w"] += gradient
                line = {
                    "at": time.monotonic(),
                    "pid": os.getpid(),
                    "step": manager.current_step(),
                    "replicas": manager.num_participants(),
                }
                diary.write(json.dumps(line) + "\n")
                diary.flush()


if __name__ == "__main__":
    main()
