"""The process that holds the hosts of a ``Lab``, and does what the lab asks of it in JSON.

A namespace lives as long as somebody is in it or holds its file. This process holds the files, and
ends when its input does, which is when the test is gone, however it ended; before that, it kills
whoever is still in one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.hosts import namespaces
from support.hosts.switch import Recorder, Switch, port


class _Keeper:
    """Namespace 0 is the hub, to which the cables of all others lead."""

    def __init__(self, hosts: int) -> None:
        self._switch: Switch | None = None
        self._recorder: Recorder | None = None
        self._files = [namespaces.make() for _ in range(hosts + 1)]
        self.paths = [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]

    def run(self, at: int, program: str, lines: str) -> None:
        """Have ``ip`` or ``tc`` carry out lines in a namespace."""
        namespaces.enter(self.paths[at])
        done = subprocess.run([program, "-batch", "-"], input=lines, capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"{program}: {done.stderr.strip()} ({lines!r})")

    def write(self, at: int, name: str, value: str) -> None:
        """Set a parameter of the kernel, given by its path below ``net``."""
        namespaces.enter(self.paths[at])
        Path("/proc/sys/net", name).write_text(value)

    def switch(self, delay: float, loss: float) -> None:
        """Have a switch in user space forward the frames, or change how it does."""
        if self._switch is None:
            self._switch = Switch(self._ports(), delay, loss)
            self._switch.start()
        self._switch.delay, self._switch.loss = delay, loss

    def record(self, path: str) -> None:
        """Write all frames to a file from now on; no path ends that."""
        if self._recorder is not None:
            self._recorder.finish()
            self._recorder = None
        if path:
            self._recorder = Recorder(self._ports(), path)
            self._recorder.start()

    def _ports(self) -> Mapping[int, socket.socket]:
        namespaces.enter(self.paths[0])
        return {number: port(f"p{number}") for number in range(1, len(self._files))}

    def sent(self, at: int) -> int:
        """The bytes that a host has sent."""
        namespaces.enter(self.paths[at])
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        (counts,) = [line.split(":")[1] for line in lines if line.strip().startswith("eth0:")]
        return int(counts.split()[8])

    def pids(self, at: int) -> list[int]:
        """The processes that are in a namespace, but for this one."""
        wanted = os.fstat(self._files[at])
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if os.path.samestat((entry / "ns" / "net").stat(), wanted):
                        found.append(int(entry.name))
        return found

    def kill(self, at: int) -> None:
        """Kill all processes in a namespace."""
        for pid in self.pids(at):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Answer orders: what a method returns, or the words of an error."""
    keeper = _Keeper(int(sys.argv[1]))
    orders: dict[str, Callable[..., Any]] = {
        "run": keeper.run,
        "write": keeper.write,
        "switch": keeper.switch,
        "record": keeper.record,
        "sent": keeper.sent,
        "pids": keeper.pids,
        "kill": keeper.kill,
    }
    print(json.dumps({"is": keeper.paths}), flush=True)
    try:
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            try:
                answer = {"is": orders[order.pop("do")](**order)}
            except OSError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
    finally:
        for at in range(len(keeper.paths)):
            keeper.kill(at)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, which ends this
    main()
