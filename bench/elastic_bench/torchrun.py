"""How long PyTorch's launcher takes from the death of a worker to the next step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.hosts.lab import Lab

_SCRIPT = Path(__file__).with_name("restarted.py")
_PORT = 29_400
_PATIENCE = 180.0


def restart(lab: Lab, folder: Path, times: int) -> list[float]:
    """Kill a worker several times; the seconds until all have made a step again.

    Args:
        lab: the hosts, of one worker each.
        folder: for checkpoints and diaries, on a disk that all see.
        times: how often.

    Raises:
        TimeoutError: the workers make no steps.
    """
    folder.mkdir(parents=True)
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    words = ["-m", "torch.distributed.run", "--nnodes", len(lab.hosts), "--nproc-per-node", 1]
    words += ["--max-restarts", 1000, "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
    words += ["--rdzv-endpoint", f"{lab.hosts[0].address}:{_PORT}"]
    found: list[float] = []
    with contextlib.ExitStack() as stack:
        for host in lab.hosts:
            log = stack.enter_context(open(folder / f"host-{host.number}.log", "wb"))
            # It would look for the endpoint among the addresses of this machine's name only.
            first = f"is_host={'false' if host.number else 'true'}"
            each = [*words, "--local-addr", host.address, "--rdzv-conf", first, _SCRIPT, folder]
            agent = subprocess.Popen(  # noqa: S603
                host.command(sys.executable, *each), env=environ, stdout=log, stderr=log
            )
            stack.callback(agent.wait)
            stack.callback(agent.terminate)
        workers = _after(folder, 0.0, set(), len(lab.hosts))
        for _ in range(times):
            victim = sorted(workers)[len(found) % len(workers)]
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            workers = _after(folder, began, workers, len(lab.hosts))
            found.append(max(workers.values()) - began)
    return found


def _after(folder: Path, since: float, gone: Any, count: int) -> dict[int, float]:
    """Wait until so many new workers have made a step; when each made its first one."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        first: dict[int, float] = {}
        for path in folder.glob("*.jsonl"):
            for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if text.endswith("\n"):
                    line = json.loads(text)
                    if line["at"] > since and line["pid"] not in gone:
                        first.setdefault(line["pid"], line["at"])
                        break
        if len(first) == count:
            return first
        time.sleep(0.1)
    raise TimeoutError(f"the workers made no step for {_PATIENCE:g} s; see {folder}")
