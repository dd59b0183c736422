"""How long PyTorch's ways to go on take from the death of a worker to the next step."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.hosts.lab import Host, Lab

_HERE = Path(__file__).parent
_RENDEZVOUS, _LIGHTHOUSE = 29_400, 29_510
_PATIENCE = 180.0
# With what torchft's own readme gives it.
_SERVE = """
import sys, threading
from torchft.coordination import LighthouseServer
server = LighthouseServer(
    bind=sys.argv[1], min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10_000
)
threading.Event().wait()
"""


def torchrun(lab: Lab, folder: Path, times: int) -> list[float]:
    """Kill a worker several times; the seconds until all, started again, have made a step.

    Args:
        lab: the hosts, of one worker each.
        folder: for checkpoints and diaries, on a disk that all see.
        times: how often.

    Raises:
        TimeoutError: the workers make no steps.
    """
    words = ["-m", "torch.distributed.run", "--nnodes", len(lab.hosts), "--nproc-per-node", 1]
    words += ["--max-restarts", 1000, "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
    words += ["--rdzv-endpoint", f"{lab.hosts[0].address}:{_RENDEZVOUS}"]
    found: list[float] = []
    with _Workers(folder) as all:
        for host in lab.hosts:
            # It would look for the endpoint among the addresses of this machine's name only.
            first = f"is_host={'false' if host.number else 'true'}"
            each = [*words, "--local-addr", host.address, "--rdzv-conf", first]
            all.start(host, *each, _HERE / "restarted.py", folder)
        there = all.wait(lambda steps: len(steps) == len(lab.hosts), 0.0)
        for _ in range(times):
            began, gone = all.kill(sorted(there)[len(found) % len(there)]), {*there}
            there = all.wait(functools.partial(_as_many_new, gone), began)
            found.append(max(at for pid, at in there.items() if pid not in gone) - began)
            there = {pid: at for pid, at in there.items() if pid not in gone}
    return found


def torchft(lab: Lab, folder: Path, times: int) -> list[float]:
    """Kill a replica several times; the seconds until all others have made a step.

    The same arguments and errors as ``torchrun``. What was killed is started again afterwards.
    """
    lighthouse = f"{lab.hosts[0].address}:{_LIGHTHOUSE}"
    found: list[float] = []
    with _Workers(folder) as all:
        all.start(lab.hosts[0], "-c", _SERVE, lighthouse)

        def start(host: Host) -> int:
            script = [_HERE / "replica.py", folder, host.address, f"http://{lighthouse}"]
            return all.start(host, *script)

        replicas = [start(host) for host in lab.hosts]
        began = 0.0
        for number in range(times):
            all.wait({*replicas}.issubset, began)
            victim = number % len(replicas)
            began = all.kill(replicas[victim])
            others = {*replicas} - {replicas[victim]}
            # A step that was all but made counts for nothing.
            steps = all.wait(others.issubset, began, len(others))
            found.append(max(steps[pid] for pid in others) - began)
            replicas[victim], began = start(lab.hosts[victim]), time.monotonic()
    return found


def _as_many_new(gone: set[int], steps: dict[int, float]) -> bool:
    return len({*steps} - gone) == len(gone)


class _Workers:
    """Processes on hosts that write diaries; all of them end with the block."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder, self._all = folder, contextlib.ExitStack()

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *reason: object) -> None:
        self._all.close()

    def start(self, host: Host, *words: object) -> int:
        """Start Python on a host; return its process id."""
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        with open(self._folder / f"host-{host.number}.log", "ab") as log:
            started = subprocess.Popen(  # noqa: S603
                host.command(sys.executable, *words), env=environ, stdout=log, stderr=log
            )
        self._all.callback(started.wait)
        self._all.callback(started.terminate)
        return started.pid

    @staticmethod
    def kill(pid: int) -> float:
        """Kill a process; return when."""
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return began

    def wait(
        self, over: Callable[[dict[int, float]], bool], since: float, most: int = 0
    ) -> dict[int, float]:
        """Wait until something is true of when each process made its first step since a time.

        Args:
            most: workers that take part in these steps; 0 for any number.
        """
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            if over(steps := self._first_steps(since, most)):
                return steps
            time.sleep(0.02)
        raise TimeoutError(f"the workers made no step for {_PATIENCE:g} s; see {self._folder}")

    def _first_steps(self, since: float, most: int) -> dict[int, float]:
        first: dict[int, float] = {}
        for path in self._folder.glob("*.jsonl"):
            for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
                line: dict[str, Any] = json.loads(text) if text.endswith("\n") else {"at": 0.0}
                if line["at"] > since and not line.get("replicas", 0) > most > 0:
                    first.setdefault(line["pid"], line["at"])
        return first
