"""What ``hierarchical`` costs where the ranks of every host share memory.

The table of algorithms has one alpha and one beta for all messages, with which two levels never
pay. Here only what crosses between hosts is counted so, as the docstring of ``hierarchical``
tells; what happens inside of a host costs what ``shared`` does there, once for each host whose
chunks are handled.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdpcore.collectives.algorithms import hierarchical
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.shared import algorithm, host_context
from fsdpcore.comm.backend import Backend
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.core.policy import Costs, Tuning

NAME = "hierarchical"

_MEMORY = host_context.Carrier(algorithm.reduce_scatter, algorithm.all_gather, algorithm.broadcast)


def establish(context: CollectiveContext, backend: Backend) -> dict[str, dict[str, Algorithm]]:
    """Find out, in a group's first collective, whether its ranks share memory on every host.

    Returns:
        The algorithms that the group has because of that, by collective and name.

    Raises:
        ConfigError: some do not, though the transport was told that they have to.
    """
    if host_context.establish(context, backend, _MEMORY):
        return algorithms(backend.hosts, backend.root.policy.tuning)
    return {}


def algorithms(hosts: Sequence[int], tuning: Tuning) -> dict[str, dict[str, Algorithm]]:
    """Return ``hierarchical`` with its costs for a group whose ranks are on these hosts."""
    arrangement = hierarchical.arrange(tuple(hosts))
    scatter, gather = _scattering(arrangement), _gathering(arrangement)
    both = CostTerms(*(a + b for a, b in zip(scatter, gather, strict=True)))
    m = max(len(ranks) for ranks in arrangement.members.values())
    rounds = max(len(arrangement.slabs(host)) for host in arrangement.members)
    memory = {
        name: known[algorithm.NAME]
        .cost(m)
        ._replace(alpha=rounds * known[algorithm.NAME].cost(m).alpha)
        for name, known in algorithm.ALGORITHMS.items()
    }
    inside = memory["reduce_scatter"], memory["all_gather"]
    parts = {
        "reduce_scatter": (scatter, inside[0]),
        "all_gather": (gather, inside[1]),
        "all_reduce": (both, CostTerms(*(a + b for a, b in zip(*inside, strict=True)))),
        "broadcast": (_broadcasting(arrangement), memory["broadcast"]),
    }
    costs = (
        tuning.own.get(algorithm.NAME) or algorithm.ALGORITHMS["all_reduce"][algorithm.NAME].costs
    )
    assert costs is not None
    return {name: {NAME: _algorithm(*terms, costs)} for name, terms in parts.items()}


def _algorithm(across: CostTerms, inside: CostTerms, costs: Costs) -> Algorithm:
    def seconds(nbytes: int) -> float:
        each = inside.beta * costs.beta + inside.gamma * costs.gamma
        return inside.alpha * costs.alpha + nbytes * each

    return Algorithm(hierarchical, lambda p: across, besides=seconds)


def _scattering(hosts: hierarchical.Arrangement) -> CostTerms:
    p, messages = len(hosts.place), 0
    for host, ranks in hosts.members.items():
        k = len(hosts.blocks[host])
        sent = max(k * (len(hosts.owners(rank, host)) - 1) for rank in ranks)
        received = sum(len(blocks) for other, blocks in hosts.blocks.items() if other != host)
        messages = max(messages, sent, received)
    return CostTerms(messages, messages / p, (sum(map(len, hosts.blocks.values())) - 1) / p)


def _gathering(hosts: hierarchical.Arrangement) -> CostTerms:
    p, messages = len(hosts.place), len(hosts.members) - 1
    for host, ranks in hosts.members.items():
        received = max(len(hosts.owners(rank, host)) - 1 for rank in ranks)
        messages = max(messages, received)
    return CostTerms(messages, messages / p, 0)


def _broadcasting(hosts: hierarchical.Arrangement) -> CostTerms:
    # Of any root: the one on the smallest host sends the largest pieces.
    sizes = [len(ranks) for ranks in hosts.members.values()]
    most = max(len(sizes) - 1, -(-max(sizes) // min(sizes)))
    return CostTerms(most, most / min(sizes), 0)
