"""Measure checkpoints: saving, loading, loading on other ranks, and how long training waits.

    python bench/checkpoint.py                                       # ours, 1 GiB, 2 ranks
    python bench/checkpoint.py --against dcp --json checkpoint.json  # beside PyTorch's DCP
    python bench/checkpoint.py --cases load-disk,reshard-disk --cold # not from the page cache

The state is that of a GPT with AdamW, float32. Ours is an engine under ``full_shard``; PyTorch's
is a dictionary of DTensors that are sharded by rows. All contestants are started first, and take
turns in every round; each loads into the memory that it saved from. Everything is synced before a
save has ended: DCP its files, ours the directories, too. ``plain files`` are what the machine
takes for so many bytes: one file per rank, one thread, with neither format nor checksum. What
``dcp`` does is in ``checkpoint_bench/peer.py``.

In the cases named stall a save goes on in the background. The time is that until training may
change the arrays, and ``memcpy`` that of copying a rank's share to memory that was used before.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parent))  # the parts, where this is not run as a script

from checkpoint_bench.cases import DEFAULT, NAMES, PEERS, SETTINGS, Case, chosen
from checkpoint_bench.run import CheckpointRun, measure

from fsdpcore.bench.cases import parse_size
from fsdpcore.bench.harness import options


def main(
    cases: Annotated[
        str, typer.Option(help=f"What to measure: all, or some of {', '.join(NAMES)}.")
    ] = ",".join(DEFAULT),
    size: Annotated[str, typer.Option(help="Of parameters and optimizer state.")] = "1GiB",
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="That save, and load.")] = 2,
    readers: Annotated[int, typer.Option(help="That load in reshard.")] = 4,
    layers: Annotated[int, typer.Option(help="Of the GPT.")] = 12,
    transport: options.Transport = "zmq",
    rounds: options.Rounds = 7,
    against: Annotated[
        str, typer.Option(help=f"Peers to take turns with: {', '.join(PEERS)}, or none.")
    ] = "none",
    peer_setting: Annotated[
        str, typer.Option(help=f"Of the peer's saves: auto (try all), {', '.join(SETTINGS)}.")
    ] = "auto",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="On a disk; for a temporary folder.")
    ] = None,
    shm: Annotated[Path, typer.Option(help="In memory; likewise.")] = Path("/dev/shm"),  # noqa: S108
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop files from the page cache before each load.")
    ] = False,
    json: options.Json = None,
) -> None:
    """Measure checkpoints, alone or beside PyTorch's distributed checkpoint.

    The exit code is 1 if a value came back wrong, and 2 if there is no result.
    """

    def bench() -> int:
        nbytes = parse_size(size)
        request = CheckpointRun(
            cases=tuple(
                Case(operation, place, ranks, readers, nbytes, layers)
                for operation, place in chosen(cases)
            ),
            transport=transport,
            against=tuple(peer for peer in options.names(against) if peer != "none"),
            setting=peer_setting,
            rounds=rounds,
            cold=cold,
            directory=Path(tempfile.gettempdir()) if directory is None else directory,
            shm=shm,
            json=json,
        )
        request.check()
        return measure(request, typer.echo)

    options.measure(bench)


if __name__ == "__main__":
    typer.run(main)
