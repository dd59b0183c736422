"""Which rank keeps a copy of whose state."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def holders(hosts: Sequence[int], leaving: Collection[int] = ()) -> tuple[int | None, ...]:
    """Return for each rank who keeps a copy of its part; None where nobody can.

    Nobody keeps the parts of two ranks, unless some leave. It is a rank on another host, but where
    more than half of all ranks are on one: without that host, the others could not go on anyway.
    What those have who leave is kept by those who stay.

    Args:
        hosts: the number of each rank's host.
        leaving: ranks.
    """
    staying = [rank for rank in range(len(hosts)) if rank not in leaving]
    by_host = sorted(staying, key=lambda rank: (hosts[rank], rank))
    most = max((sum(hosts[each] == host for each in staying) for host in {*hosts}), default=0)
    # A shift by the largest host leaves every host; one by all would be none.
    shift = most if most < len(staying) else 1
    found: list[int | None] = [None] * len(hosts)
    for place, rank in enumerate(by_host):
        found[rank] = by_host[(place + shift) % len(by_host)]
    for number, rank in enumerate(sorted({*leaving})):
        found[rank] = by_host[number % len(by_host)] if by_host else None
    return tuple(None if holder == rank else holder for rank, holder in enumerate(found))
