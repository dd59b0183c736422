"""What ``hierarchical`` costs where the ranks of every host share memory.

The table of algorithms has one alpha and one beta for all messages, with which two levels never
pay. Here only what crosses between hosts is counted so, as the docstring of ``hierarchical``
tells; what happens inside of a host costs what ``shared`` does there, once for each host whose
chunks are handled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fsdpcore.collectives.hierarchy import hierarchical
from fsdpcore.collectives.shared import algorithm
from fsdpcore.collectives.spec import Operation
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.core.policy import Costs, Tuning

NAME = "hierarchical"


def algorithms(
    hosts: Sequence[int], tuning: Tuning, operations: Mapping[str, Operation]
) -> dict[str, dict[str, Algorithm]]:
    """Return ``hierarchical`` with its costs for a group whose ranks are on these hosts."""
    arrangement = hierarchical.arrange(tuple(hosts))
    scatter, gather = _scattering(arrangement), _gathering(arrangement)
    both = CostTerms(*(a + b for a, b in zip(scatter, gather, strict=True)))
    sizes = [len(ranks) for ranks in arrangement.members.values()]
    m = max(sizes)
    rounds = sum(-(-size // min(sizes)) for size in sizes)  # on the smallest host

    def inside(name: str) -> CostTerms:
        terms = algorithm.cost(operations[name].movement, m)
        return terms._replace(alpha=rounds * terms.alpha)

    scattered, gathered = inside("reduce_scatter"), inside("all_gather")
    parts = {
        "reduce_scatter": (scatter, scattered),
        "all_gather": (gather, gathered),
        "all_reduce": (both, CostTerms(*(a + b for a, b in zip(scattered, gathered, strict=True)))),
        "broadcast": (_broadcasting(arrangement), inside("broadcast")),
    }
    costs = tuning.own.get(algorithm.NAME) or algorithm.COSTS
    return {name: {NAME: _algorithm(*terms, costs)} for name, terms in parts.items()}


def _algorithm(across: CostTerms, inside: CostTerms, costs: Costs) -> Algorithm:
    def seconds(nbytes: int) -> float:
        each = inside.beta * costs.beta + inside.gamma * costs.gamma
        return inside.alpha * costs.alpha + nbytes * each

    return Algorithm(hierarchical, lambda p: across, besides=seconds)


def _scattering(hosts: hierarchical.Arrangement) -> CostTerms:
    p, blocks, messages = len(hosts.place), sum(map(len, hosts.blocks.values())), 0
    led = _most_led(hosts)
    for host, ranks in hosts.members.items():
        k = len(hosts.blocks[host])
        messages = max(messages, k * (led[len(ranks)] - 1), blocks - k)
    return CostTerms(messages, messages / p, (blocks - 1) / p, 1)


def _gathering(hosts: hierarchical.Arrangement) -> CostTerms:
    messages = max(len(hosts.members), *_most_led(hosts).values()) - 1
    return CostTerms(messages, messages / len(hosts.place), 0, 1)


def _most_led(hosts: hierarchical.Arrangement) -> dict[int, int]:
    """For each size of a host, how many chunks its first rank leads; no other one leads more."""
    owners = Counter(hosts.place)
    sizes = {len(ranks) for ranks in hosts.members.values()}
    return {m: sum(owners[place] for place in range(0, len(owners), m)) for m in sizes}


def _broadcasting(hosts: hierarchical.Arrangement) -> CostTerms:
    # Of any root: the one on the smallest host sends the largest pieces.
    sizes = [len(ranks) for ranks in hosts.members.values()]
    most = max(len(sizes) - 1, -(-max(sizes) // min(sizes)))
    return CostTerms(most, most / min(sizes), 0, 1)
