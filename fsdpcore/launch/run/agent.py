"""What ``fsdpcore run --hosts`` starts on each host, over ssh: it runs the ranks of that host.

It is told all on its standard input, so that neither the job's secret nor a user's variables are on
a command line: an order, which is one line of JSON, and later, perhaps, lines with the number of a
signal. The end of the input means that who started it is gone, and the ranks end with that. On its
standard output it writes frames, a line each, apart from what a shell may print before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpcore.core.errors import ConfigError, FsdpcoreError
from fsdpcore.core.version import VERSION
from fsdpcore.launch.addresses import is_loopback, join_address, parse_address
from fsdpcore.launch.config import resolve
from fsdpcore.launch.output import RankOutput
from fsdpcore.launch.run.endings import RankEnd, RankEnds
from fsdpcore.launch.run.scripts import JobShare, run_share, script_command
from fsdpcore.launch.supervision import StopRequested

MODULE = "fsdpcore.launch.run.agent"
# All ranks ended well; one did not, or was stopped; none was started.
EXIT_CODES = WELL, BADLY, REFUSED = 0, 1, 2
# A frame: this byte, its kind, and what it says.
MARK = b"\x1e"
OUT, ERROR, MEETING, FAILING, ENDS, PROBLEM = (bytes([byte]) for byte in b"oemfxp")


@dataclass(frozen=True)
class Order:
    """What a host is to run.

    Attributes:
        version: of this package.
        directory: where.
        environ: variables for the ranks, over those that the host has.
        script, arguments, module: as for ``script_command``.
        share: which ranks.
        others: hosts that shall reach the address of ``share``; empty if a user has named that.
    """

    version: str
    directory: str
    environ: dict[str, str]
    script: str
    arguments: list[str]
    module: bool
    share: JobShare
    others: list[str]

    def encode(self) -> bytes:
        """Write it as a line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes, here: str) -> Order:
        """Read what ``encode`` wrote.

        Raises:
            ConfigError: another version wrote it.
        """
        content: dict[str, Any] = json.loads(line)
        if content["version"] != here:
            raise ConfigError(
                f"fsdpcore is {here} here, and {content['version']} where the job was started; "
                "install the same one on all hosts"
            )
        return cls(**{**content, "share": JobShare(**content["share"])})


def encode_ends(ends: RankEnds) -> bytes:
    """Write how ranks ended."""
    return json.dumps(ends).encode()


def decode_ends(text: bytes) -> RankEnds:
    """Read what ``encode_ends`` wrote."""
    ranks, first, number = json.loads(text)
    return RankEnds([RankEnd(*rank) for rank in ranks], first, number)


class _Frames(RankOutput):
    """Passes on what ranks print, and what their launcher has to say."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # lines of ranks come from another thread

    def send(self, kind: bytes, text: bytes = b"") -> None:
        """Write a frame; raises OSError if nobody reads it."""
        with self._lock:
            sys.stdout.buffer.write(MARK + kind + text + b"\n")
            sys.stdout.buffer.flush()

    def tell(self, kind: bytes, text: bytes) -> None:
        """Write a frame, if somebody reads it."""
        with contextlib.suppress(OSError):
            self.send(kind, text)

    def write(self, rank: int, error: bool, line: bytes) -> None:
        self.send(ERROR if error else OUT, b"%d " % rank + line)

    def finish(self, culprit: int | None) -> None:
        pass  # whoever reads the frames shows what is left


class _Overseer:
    """The launcher at the other end of standard input and output."""

    def __init__(self, frames: _Frames) -> None:
        self._frames = frames
        self._data = b""

    def order(self) -> bytes:
        """Wait for the order; empty if it does not come."""
        while b"\n" not in self._data:
            piece = os.read(0, 1 << 16)
            if not piece:
                return b""
            self._data += piece
        line, _, self._data = self._data.partition(b"\n")
        return line

    def fileno(self) -> int:
        return 0

    def check(self) -> None:
        if not self._data and not select.select([0], [], [], 0)[0]:
            return
        line, _, self._data = (self._data or os.read(0, 4096)).partition(b"\n")
        raise StopRequested(int(line) if line.isdigit() else 0)

    def failing(self, rank: int) -> None:
        self._frames.tell(FAILING, b"%d" % rank)


def main(here: str) -> int:
    """Carry out the order on standard input, by version ``here``; return an exit code."""
    frames = _Frames()
    overseer = _Overseer(frames)
    line = overseer.order()
    if not line:
        return BADLY
    try:
        ends = _carry_out(Order.decode(line, here), frames, overseer)
    except FsdpcoreError as error:
        frames.tell(PROBLEM, str(error).replace("\n", " ").encode())
        return REFUSED
    frames.tell(ENDS, encode_ends(ends))
    return WELL if all(rank.code == 0 for rank in ends.ranks) else BADLY


def _carry_out(order: Order, frames: _Frames, overseer: _Overseer) -> RankEnds:
    try:
        os.chdir(order.directory)
    except OSError as error:
        raise ConfigError(
            f"the directory {order.directory} where the job was started is not here: {error}"
        ) from error
    os.environ.update(order.environ)
    command = script_command(order.script, order.arguments, module=order.module)
    config = resolve({}, os.environ, Path.cwd(), default_transport="zmq")
    share = order.share
    if order.others:
        host, port = parse_address(share.address)
        address = join_address(_own_address(host, order.others), port)
        share = dataclasses.replace(share, address=address)
    return run_share(
        command,
        config,
        os.environ,
        share,
        frames,
        lambda address: frames.tell(MEETING, address.encode()),
        overseer,
    )


def _own_address(name: str, others: Sequence[str]) -> str:
    """The address of this host at which the others reach it.

    That is what its name stands for; but many hosts know their own name as one of the loopback,
    and ssh may know names that are no host's.
    """
    for host, port in [(name, 0), *((other, 9) for other in others)]:
        with contextlib.suppress(OSError, UnicodeError):
            for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    if not port:
                        probe.bind(target)
                    else:
                        probe.connect(target)  # no packet is sent: the kernel picks a route
                    own = str(probe.getsockname()[0])
                if not is_loopback(own):
                    return own
    raise ConfigError(
        f"at which of its addresses do the other hosts reach {name}? Say so with --address HOST, "
        "or HOST:PORT if only some ports are open"
    )


if __name__ == "__main__":
    sys.exit(main(VERSION))
