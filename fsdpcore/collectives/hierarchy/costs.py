"""What ``hierarchical`` costs where the ranks of every host share memory.

The table of algorithms has one alpha and one beta for all messages, with which two levels never
pay. Here only what crosses between hosts is counted so, as the docstring of ``hierarchical``
tells; what happens inside of a host costs what ``shared`` does there, once for each host whose
chunks are handled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.hierarchy import hierarchical, host_context
from fsdpcore.collectives.shared import algorithm
from fsdpcore.collectives.shared.interpreter import move
from fsdpcore.collectives.spec import Layout, Operation
from fsdpcore.comm.backend import Backend
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.core.policy import Costs, Tuning

NAME = "hierarchical"


def establish(
    context: CollectiveContext, backend: Backend, operations: Mapping[str, Operation]
) -> dict[str, dict[str, Algorithm]]:
    """Find out, in a group's first collective, whether its ranks share memory on every host.

    Args:
        context, backend: of the group.
        operations: all collectives, by name.

    Returns:
        The algorithms that the group has because of that, by collective and name.

    Raises:
        ConfigError: some do not, though the transport was told that they have to.
    """
    if host_context.establish(context, backend, _in_memory(operations)):
        return algorithms(backend.hosts, backend.root.policy.tuning, operations)
    return {}


def _in_memory(operations: Mapping[str, Operation]) -> host_context.Carrier:
    """The collectives of ranks that share memory."""
    names = "reduce_scatter", "all_gather", "broadcast"
    scatter, gather, spread = (operations[name].movement for name in names)
    return host_context.Carrier(
        lambda context, source, own, bounds, reduction: move(
            context, scatter, Layout(-1, reduction, bounds), source, own
        ),
        lambda context, own, out, bounds: move(context, gather, Layout(-1, None, bounds), own, out),
        lambda context, data, root: move(context, spread, Layout(root), data, data),
    )


def algorithms(
    hosts: Sequence[int], tuning: Tuning, operations: Mapping[str, Operation]
) -> dict[str, dict[str, Algorithm]]:
    """Return ``hierarchical`` with its costs for a group whose ranks are on these hosts."""
    arrangement = hierarchical.arrange(tuple(hosts))
    scatter, gather = _scattering(arrangement), _gathering(arrangement)
    both = CostTerms(*(a + b for a, b in zip(scatter, gather, strict=True)))
    m = max(len(ranks) for ranks in arrangement.members.values())
    rounds = max(len(arrangement.slabs(host)) for host in arrangement.members)
    memory = {name: algorithm.cost(known.movement, m) for name, known in operations.items()}
    memory = {name: terms._replace(alpha=rounds * terms.alpha) for name, terms in memory.items()}
    inside = memory["reduce_scatter"], memory["all_gather"]
    parts = {
        "reduce_scatter": (scatter, inside[0]),
        "all_gather": (gather, inside[1]),
        "all_reduce": (both, CostTerms(*(a + b for a, b in zip(*inside, strict=True)))),
        "broadcast": (_broadcasting(arrangement), memory["broadcast"]),
    }
    costs = tuning.own.get(algorithm.NAME) or algorithm.COSTS
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
