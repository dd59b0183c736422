"""Measure how long thousands of ``zmq`` ranks take to meet, with rank 0 as it is.

    python bench/rendezvous.py                     # 64 to 4,096 ranks
    python bench/rendezvous.py --ranks 1024,4096 --json rendezvous.json

The others are light: a few processes have a socket for each, which speaks the protocol of the
meeting and does not read the table that it gets. In a job each rank reads its own, all at the same
time on their hosts; ``read`` is what that takes one of them. ``rank 0`` is processor time, of all
its threads; ``table`` what it sends, to each rank.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import resource
import secrets
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
import zmq

from fsdpcore import __version__
from fsdpcore.bench.harness import options
from fsdpcore.comm.hosts import identity
from fsdpcore.comm.place import RankPlace
from fsdpcore.core.text import columns
from fsdpcore.core.work import Deadline
from fsdpcore.launch.endpoints import listen

# Packages of transports are mapped, which mypy does not see.
_KEYS, _MEETING, _VISIT = (
    importlib.import_module(f"fsdpcore.transports.zmq.{name}")
    for name in ("keys", "meeting", "visit")
)
_HOST = "127.0.0.1"
_SECONDS = 120.0
_RANKS_PER_HOST = 8

Socket = zmq.Socket[bytes]


def main(
    ranks: Annotated[str, typer.Option(help="How many meet, one number after the other.")] = (
        "64,256,1024,4096"
    ),
    processes: Annotated[int, typer.Option(help="That the light ranks are in.")] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the figures.")] = None,
) -> None:
    """Measure how long thousands of ranks take to meet."""
    rows = [_measure(int(number), processes) for number in options.names(ranks)]
    print(columns(list(rows[0]), [[f"{value:g}" for value in row.values()] for row in rows]))
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


def _measure(ranks: int, processes: int) -> dict[str, float]:
    """Let so many ranks meet; seconds, and the size of the table in kB."""
    _raise_file_limit()
    token = secrets.token_hex(32)
    listener = listen(_HOST, 0)
    port = int(listener.getsockname()[1])
    start_method = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    guests = []
    for number in range(processes):
        ours, theirs = start_method.Pipe()
        mine = list(range(1, ranks))[number::processes]
        guests.append(start_method.Process(target=_guests, args=(mine, ranks, port, token, theirs)))
        guests[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()  # its sockets are there
    context: zmq.Context[Socket] = zmq.Context()
    keys = _KEYS.JobKeys(token)
    place = RankPlace(0, ranks, 0, ranks, "bench", token=token)
    host = _MEETING.MeetingHost(
        context, place, keys, listener.dup().detach(), (_HOST, port), __version__
    )
    began, used = time.perf_counter(), time.process_time()
    for pipe in pipes:
        pipe.send("go")
    met = host.meet(_card(0, port), Deadline(_SECONDS))
    took, used = time.perf_counter() - began, time.process_time() - used
    assert len(met.cards) == ranks
    answers = [pipe.recv_bytes() for pipe in pipes]
    read = time.perf_counter()
    assert len(_VISIT.unpacked(answers[0])["table"]) == ranks
    read = time.perf_counter() - read
    for guest in guests:
        guest.join()
    context.destroy()
    listener.close()
    return {
        "ranks": ranks,
        "meeting s": round(took, 3),
        "rank 0 s": round(used, 3),
        "table kB": round(len(answers[0]) / 1000, 1),
        "read ms": round(1000 * read, 2),
    }


def _card(rank: int, port: int) -> dict[str, Any]:
    host = f"{rank // _RANKS_PER_HOST:08x}{identity()[8:]}"
    return {"address": (_HOST, port), "encrypted": True, "host": host}


def _guests(mine: list[int], ranks: int, port: int, token: str, pipe: Connection) -> None:
    """Come as some of the ranks, each over a connection of its own."""
    _raise_file_limit()
    context: zmq.Context[Socket] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * len(mine) + 16)
    server = _KEYS.JobKeys(token).meeting()
    socks = []
    for _ in mine:
        sock = context.socket(zmq.DEALER)
        public, secret = zmq.curve_keypair()
        sock.setsockopt(zmq.CURVE_SERVERKEY, server.public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, secret)
        sock.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * _SECONDS))
        sock.setsockopt(zmq.RCVTIMEO, int(1000 * _SECONDS))
        socks.append(sock)
    pipe.send("ready")
    pipe.recv()
    for rank, sock in zip(mine, socks, strict=True):
        sock.connect(f"tcp://{_HOST}:{port}")
        message = {
            "fsdpcore": _MEETING.PROTOCOL,
            "version": __version__,
            "rank": rank,
            "world_size": ranks,
        }
        sock.send(
            json.dumps({**message, "card": _card(rank, 20_000 + rank * 7919 % 40_000)}).encode()
        )
    last = b""
    for sock in socks:
        last = sock.recv()
        sock.send(b"{}")
    pipe.send_bytes(last)
    context.destroy(1000)


def _raise_file_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    typer.run(main)
