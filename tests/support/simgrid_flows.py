"""A program that asks SimGrid when flows end: JSON on stdin and stdout, in a process of its own.

The binding is that of SimGrid 4.1. Its factors are 1 and its weights 0, so that flows share links
fairly whatever their latency: the model that ours has, by another's code. Latencies are 0.
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
    from simgrid import ActivitySet, Comm, Engine, Host, LinkInRoute

    engine = Engine(["flows", "--log=root.thres:warning", *(f"--cfg={each}" for each in CONFIG)])
    zone = engine.netzone_root.add_netzone_full("all")
    hosts = [zone.add_host(f"rank {rank}", 1e9).seal() for rank in range(ranks)]
    links: dict[str, Any] = {}

    def link(level: int, member: int, way: str) -> Any:
        name = f"{level} {member} {way}"
        if name not in links:
            links[name] = zone.add_link(name, rates[level]).seal()
        return LinkInRoute(links[name])

    for src, dst in sorted({(src, dst) for each in rounds for src, dst, _ in each}):
        up, down, a, b = [], [], src, dst
        for level, size in enumerate(sizes):
            if a != b:
                up.append(link(level, a, "up"))
                down.append(link(level, b, "down"))
            a, b = (a // size, b // size) if size else (0, 0)
        route = up + down[::-1]
        zone.add_route(hosts[src], hosts[dst], route, False)
    zone.seal()
    found: list[list[float]] = []

    def send(flows: list[tuple[int, int, int]]) -> None:
        begun = Engine.clock
        sent = [
            Comm.sendto_async(Host.by_name(f"rank {src}"), Host.by_name(f"rank {dst}"), nbytes)
            for src, dst, nbytes in flows
        ]
        ActivitySet(sent).wait_all()
        found.append([comm.finish_time - begun for comm in sent])

    def main() -> None:
        for flows in rounds:
            send(flows)

    hosts[0].add_actor("main", main)
    engine.run()
    return found


if __name__ == "__main__":
    json.dump(ends(**json.load(sys.stdin)), sys.stdout)
