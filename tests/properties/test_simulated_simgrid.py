"""Flows end when SimGrid's model of fair sharing says that they do."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdpcore.simulation.flows import Flows
from fsdpcore.simulation.network import Level, Network

PROGRAM = Path(__file__).parents[1] / "support" / "simgrid_flows.py"
MIB = 1 << 20

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(find_spec("simgrid") is None, reason="needs SimGrid's Python binding"),
]

# Hosts of eight, racks of four hosts that share half of what those have, pods a quarter of that.
SIZES, RATES = [8, 4, 8, 0], [450e9, 400e9, 800e9, 1.6e12]


def pairwise(ranks, size):
    """Rounds in which all exchange with a partner twice as far as in the one before."""
    far = [1 << n for n in range(ranks.bit_length() - 1)]
    return [[(rank, rank ^ step, size()) for rank in range(ranks)] for step in far]


def ring(ranks, size):
    return [[(rank, (rank + 1) % ranks, size()) for rank in range(ranks)] for _ in range(3)]


def all_to_all(ranks, size):
    pairs = [(src, (src + n) % ranks) for src in range(ranks) for n in range(1, ranks)]
    return [[(src, dst, size()) for src, dst in pairs]]


def ours(ranks, rounds):
    network = Network(
        tuple(
            Level(f"level{n}", size, rate, 0.0)
            for n, (size, rate) in enumerate(zip(SIZES, RATES, strict=True))
        )
    )
    flows, now, found = Flows(network, ranks), 0.0, []
    for each in rounds:
        begun, ends = now, {}
        started = [flows.start(now, *flow) for flow in each]
        while (then := flows.next_end()) < math.inf:
            now = then
            ends |= dict.fromkeys(flows.ended(now), now - begun)
        found.append([ends[flow] for flow in started])
    return found


@pytest.mark.parametrize(
    ("pattern", "ranks", "sizes"),
    [
        *itertools.product([pairwise], [64, 256, 1024], ["equal", "random"]),
        *itertools.product([ring], [64, 1024], ["equal", "random"]),
        # Of random sizes each flow ends at a moment of its own, and changes the rates of all.
        (all_to_all, 64, "random"),
        (all_to_all, 64, "equal"),
        (all_to_all, 256, "equal"),
    ],
)
def test_flows_end_as_simgrid_says(pattern, ranks, sizes, record_property):
    rng = random.Random(7)
    rounds = pattern(ranks, lambda: MIB if sizes == "equal" else rng.randrange(MIB // 8, 4 * MIB))
    asked = {"sizes": SIZES, "rates": RATES, "ranks": ranks, "rounds": rounds}
    done = subprocess.run(
        [sys.executable, PROGRAM], input=json.dumps(asked), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    pairs = [
        (own, other)
        for mine, those in zip(ours(ranks, rounds), theirs, strict=True)
        for own, other in zip(mine, those, strict=True)
    ]
    largest = max(abs(own - other) / other for own, other in pairs)
    print(f"{pattern.__name__}, {ranks} ranks, {sizes} sizes: {largest:.2e} at most")
    record_property("largest difference", largest)
    assert largest < 0.01  # SimGrid takes what ends within a nanosecond as one
