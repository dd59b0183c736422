"""A program that asks SimGrid when flows end: JSON on stdin and stdout, in a process of its own.

Its factors are 1 and its weights 0, so that flows share links fairly whatever their latency: the
model that ours has, by another's code. Latencies are 0.
"""

from __future__ import annotations

import json
import sys
from typing import Any

CONFIG = (
    "network/model:CM02",
    "network/latency-factor:1",
    "network/bandwidth-factor:1",
    "network/weight-S:0",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
)


def ends(sizes: list[int], rates: list[float], ranks: int, rounds: Any) -> list[list[float]]:
    """For each round of (source, destination, bytes): when its flows end, all started at once."""
    from simgrid import Actor, Comm, Engine, Host, LinkInRoute, NetZone

    engine = Engine(["flows", "--log=root.thres:warning", *(f"--cfg={each}" for each in CONFIG)])
    zone = NetZone.create_full_zone("all")
    hosts = [zone.create_host(f"rank {rank}", 1e9).seal() for rank in range(ranks)]
    links: dict[str, Any] = {}

    def link(level: int, member: int, way: str) -> Any:
        name = f"{level} {member} {way}"
        if name not in links:
            links[name] = zone.create_link(name, rates[level]).seal()
        return LinkInRoute(links[name])

    for src, dst in sorted({(src, dst) for each in rounds for src, dst, _ in each}):
        up, down, a, b = [], [], src, dst
        for level, size in enumerate(sizes):
            if a != b:
                up.append(link(level, a, "up"))
                down.append(link(level, b, "down"))
            a, b = (a // size, b // size) if size else (0, 0)
        route = up + down[::-1]
        zone.add_route(hosts[src].netpoint, hosts[dst].netpoint, None, None, route, False)
    zone.seal()
    found: list[list[float]] = []

    def send(flows: list[tuple[int, int, int]]) -> None:
        begun = Engine.clock
        sent = [
            Comm.sendto_async(Host.by_name(f"rank {src}"), Host.by_name(f"rank {dst}"), nbytes)
            for src, dst, nbytes in flows
        ]
        Comm.wait_all(sent)
        found.append([comm.finish_time - begun for comm in sent])

    def main() -> None:
        for flows in rounds:
            send(flows)

    Actor.create("main", hosts[0], main)
    engine.run()
    return found


if __name__ == "__main__":
    json.dump(ends(**json.load(sys.stdin)), sys.stdout)
