"""Measure collectives and training between hosts, over links of a rate or a delay.

    sudo python bench/hosts.py                                   # ours
    sudo python bench/hosts.py --transport "zmq://?security=none" --against encrypted,gloo
    unshare -Ur python bench/hosts.py --parts rate,far           # without being root

The hosts are network namespaces of this machine. bench/README.md says what is measured, and how.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parent))  # the parts, where this is not run as a script
sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model
sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the hosts

from hosts_bench.request import HostsRun
from hosts_bench.run import PARTS, PEERS, check, measure

from fsdpcore.bench.harness import options


def main(
    transport: options.Transport = "zmq://",
    parts: Annotated[str, typer.Option(help=f"Some of {', '.join(PARTS)}.")] = ",".join(PARTS),
    against: Annotated[str, options.against(PEERS)] = "",
    rounds: options.Rounds = 5,
    json: options.Json = None,
) -> None:
    """Measure collectives and training between hosts.

    The exit code is 1 if a result was wrong, and 2 if there is none.
    """

    def bench() -> int:
        request = HostsRun(options.names(parts), transport, options.names(against), rounds, json)
        check(request)
        return measure(request, typer.echo)

    options.measure(bench)


if __name__ == "__main__":
    typer.run(main)
