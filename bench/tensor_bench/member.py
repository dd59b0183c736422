"""The program of a rank: it obeys the orders of ``fsdpcore.bench.member``, on blocks."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import fsdpcore as fc
from fsdpcore.bench.contestants import Ours
from fsdpcore.bench.member import serve, timed
from fsdpcore.bench.memory import Memory, reset_peak
from tensor_bench.cases import OURS, PEER, Case
from tensor_bench.ours import OurBlock


class BlockMember:
    """A rank of one contestant.

    Args:
        contestant: its name.
        make: makes its block.
        versions: of libraries.
        leave: called at the end.
    """

    def __init__(
        self,
        contestant: str,
        make: Callable[[Case], Any],
        versions: dict[str, str],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.versions = {contestant: versions}
        self._make, self._leave = make, leave
        self._block: Any = None

    def obey(self, order: Mapping[str, Any]) -> list[float]:
        """Carry out one order."""
        do = order["do"]
        if do in ("prepare", "release"):
            self._block = None
            gc.collect()
            if do == "prepare":
                self._block = self._make(Case(**order["case"]))
                reset_peak()
            return []
        if do == "memory":
            return Memory.now().as_answer()
        if do == "check":
            return [float(self._block.check())]
        block = self._block
        return [timed(block.barrier, block.step, order["warmup"], order["iterations"])]

    def close(self) -> None:
        """Leave."""
        self._block = None
        self._leave()


def _ours(backend: fc.Backend, options: Mapping[str, Any]) -> None:
    member = BlockMember(OURS, lambda case: OurBlock(case, backend), Ours(backend).versions)
    serve(backend.rank, backend.world_size, member, options["path"])


def main() -> None:
    """Become the rank that the first argument describes, in JSON."""
    options = json.loads(sys.argv[1])
    if options["contestant"] == OURS:
        fc.launch(_ours, args=(options,))
        return
    peer = importlib.import_module("tensor_bench.peer")
    rank, ranks = options["rank"], options["world_size"]
    group = peer.Group(rank, ranks, options["store"], options["threads"])
    member = BlockMember(
        PEER, lambda case: peer.PeerBlock(case, group), group.versions, group.close
    )
    serve(rank, ranks, member, options["path"])


if __name__ == "__main__":
    main()
