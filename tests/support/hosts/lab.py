"""``Lab``: hosts, and the links between them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from support.hosts import namespaces

_TESTS = Path(__file__).parents[2]
_NOWHERE = "02:00:00:00:00:ff"  # nobody's address: what is sent there is lost without a word


@dataclass(frozen=True)
class Host:
    """A network namespace with a cable to the lab's hub.

    Attributes:
        number: from 0.
        namespace: file of the namespace that a process has to enter to be on this host.
    """

    number: int
    namespace: str

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return f"10.77.0.{self.number + 1}"

    @property
    def address6(self) -> str:
        """Its IPv6 address."""
        return f"fd77::{self.number + 1}"

    @property
    def name(self) -> str:
        """What its ranks give as ``host_id``, since they share the machine's processes."""
        return f"host-{self.number}"

    def command(self, *words: object) -> list[str]:
        """The command line that runs a command on this host."""
        nsenter = shutil.which("nsenter") or "nsenter"
        return [nsenter, f"--net={self.namespace}", *map(str, words)]

    def socket(self, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Make a socket that belongs to this host, whatever thread uses it then."""

        def make() -> socket.socket:
            namespaces.enter(self.namespace)
            return socket.socket(socket.AF_INET, kind)

        with ThreadPoolExecutor(1) as visitor:
            return visitor.submit(make).result()


class Lab:
    """Hosts with a link each to a hub, in namespaces without names. They go when the lab does.

    ::

        with Lab(2, rate=100e6) as lab:
            subprocess.run(lab.hosts[0].command("ip", "address"))
            lab.lose(0, 1)

    Args:
        count: number of hosts.
        rate: of each link, in bits per second and direction; 0 for as fast as it goes.
        delay: seconds that a packet takes from one host to another, besides. With a delay or a
            loss, a switch in user space stands in for the kernel's bridge, which has neither.
        loss: part of the frames that is lost at random, whole segments of up to 64 KiB each.
    """

    def __init__(
        self, count: int, *, rate: float = 0.0, delay: float = 0.0, loss: float = 0.0
    ) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "support.hosts.keeper", str(count)],
            env={**os.environ, "PYTHONPATH": str(_TESTS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, *paths = self._answer()
            self.hosts = [Host(at, path) for at, path in enumerate(paths)]
            self._join(kernel=not delay and not loss)
            for host in range(1, count + 1):
                # BBR, the default of some kernels, nearly stops a connection for 0.2 s every 10 s.
                self._ask("write", at=host, name="ipv4/tcp_congestion_control", value="reno")
                # Others begin slowly again after a pause of a few round trips.
                self._ask("write", at=host, name="ipv4/tcp_slow_start_after_idle", value="0")
            if delay or loss:
                self._ask("switch", delay=delay, loss=loss)
            if rate:
                for host in range(count):
                    self.set_rate(host, rate)
        except BaseException:
            self.close()
            raise

    def _join(self, *, kernel: bool) -> None:
        numbers = range(1, self._count + 1)
        cables = [
            f"link add p{at} address {_mac(at, 4)} type veth peer name eth0 address {_mac(at)} "
            f"netns {self.hosts[at - 1].namespace}"
            for at in numbers
        ]
        cables += [f"link set p{at} addrgenmode none up" for at in numbers]
        if kernel:
            cables += ["link add hub type bridge", "link set hub addrgenmode none up"]
            cables += [f"link set p{at} master hub" for at in numbers]
        self._ip(0, cables)
        for host in self.hosts:
            here = ["link set lo up", "link set eth0 addrgenmode none up"]
            here += [f"address add {host.address}/24 dev eth0"]
            here += [f"address add {host.address6}/64 dev eth0 nodad"]
            here += [self._way(other, _mac(other.number + 1)) for other in self.hosts]
            self._ip(host.number + 1, here)

    def _way(self, host: Host, mac: str) -> str:
        """Where packets for a host are sent to; nobody has to ask for its address."""
        command = f"neighbour replace {{}} lladdr {mac} dev eth0 nud permanent"
        return "\n".join(map(command.format, (host.address, host.address6)))

    # What may happen to links and hosts. Hosts are numbers here.

    def set_rate(self, host: int, rate: float) -> None:
        """Limit a host's link, both ways, to so many bits per second."""
        limit = f"root tbf rate {int(rate)} burst {burst(rate)} limit 1000000\n"
        self._ask("run", at=host + 1, program="tc", lines=f"qdisc replace dev eth0 {limit}")
        self._ask("run", at=0, program="tc", lines=f"qdisc replace dev p{host + 1} {limit}")

    def set_delay(self, delay: float, loss: float = 0.0) -> None:
        """Change the delay, and the loss, of a lab that was made with one."""
        self._ask("switch", delay=delay, loss=loss)

    def lose(self, sender: int, receiver: int) -> None:
        """Lose what one host sends to another without a word; not what comes back."""
        self._ip(sender + 1, [self._way(self.hosts[receiver], _NOWHERE)])

    def lead(self, sender: int, receiver: int, to: int) -> None:
        """Lead what one host sends to another to a third."""
        self._ip(sender + 1, [self._way(self.hosts[receiver], _mac(to + 1))])

    def silence(self, host: int) -> None:
        """Lose all that a host sends, and all that is sent to it, without a word."""
        for other in range(self._count):
            if other != host:
                self.lose(host, other)
                self.lose(other, host)

    def cut(self, host: int) -> None:
        """Pull the cable: the host sees that there is none, the others do not."""
        self._ip(0, [f"link set p{host + 1} down"])

    def vanish(self, host: int) -> None:
        """Make a host go as if it had lost its power: nothing of it says good-bye."""
        self.silence(host)
        self.kill(host)

    def kill(self, host: int) -> None:
        """Kill all processes on a host; its kernel still closes their connections."""
        self._ask("kill", at=host + 1)

    def mend(self) -> None:
        """Undo ``lose``, ``silence`` and ``cut``."""
        self._ip(0, [f"link set p{at + 1} up" for at in range(self._count)])
        for host in range(self._count):
            self._ip(host + 1, [self._way(other, _mac(other.number + 1)) for other in self.hosts])

    # What else can be asked.

    def pids(self) -> list[int]:
        """All processes on its hosts."""
        return [pid for at in range(1, self._count + 1) for pid in self._ask("pids", at=at)]

    def sent(self, host: int) -> int:
        """The bytes that a host has sent until now, with the heads of packets."""
        return int(self._ask("sent", at=host + 1))

    def record(self, path: Path | None) -> None:
        """Write all frames that hosts send into a file from now on; None ends that."""
        self._ask("record", path="" if path is None else str(path))

    def limit_ports(self, host: int, first: int, last: int) -> None:
        """Choose from which ports the system takes one where a program leaves that to it."""
        self._ask("write", at=host + 1, name="ipv4/ip_local_port_range", value=f"{first} {last}")

    def ip(self, host: int, *lines: str) -> None:
        """Have ``ip`` carry out lines on a host."""
        self._ip(host + 1, lines)

    def _ip(self, at: int, lines: Sequence[str]) -> None:
        self._ask("run", at=at, program="ip", lines="\n".join(lines) + "\n")

    def _ask(self, do: str, **details: Any) -> Any:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"do": do, **details}) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            words = self._process.stderr.read().strip().splitlines() or ["it ended"]
            raise OSError(words[-1])
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["is"]

    def close(self) -> None:
        """Kill everything on the hosts, and give them up."""
        self._process.communicate()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)


def burst(rate: float) -> int:
    """The bytes that a link of so many bits per second lets pass at once.

    That is a millisecond's worth, a few packets at the least.
    """
    return max(16_000, int(rate / 8 * 0.001))


def _mac(number: int, kind: int = 2) -> str:
    return f"0{kind}:00:00:00:00:{number:02x}"


@functools.cache
def why_no_hosts() -> str:
    """Why this machine cannot make hosts; empty if it can."""
    for program in ("ip", "tc", "nsenter"):
        if shutil.which(program) is None:
            return f"hosts of our own need {program!r} (iproute2, util-linux)"
    try:
        with Lab(1, rate=1e9):
            return ""
    except OSError as error:
        return f"no hosts can be made here, but as root or under 'unshare -Ur': {error}"
