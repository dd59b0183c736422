"""How flows share links: max-min fairness, by progressive filling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Shares this close, relative to each other, are one: what sums in another order differ in.
_SAME = 1e-12


def fair_rates(routes: NDArray[np.intp], limits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rate of each flow.

    No flow could have more without one that has no more than it having less. Links are filled
    evenly: where no flow of a link is held back more elsewhere, the link's share is the rate of
    all its flows. All such links are done at once, then what they leave is shared by the rest.

    Args:
        routes: the links of each flow, a column of them; link 0 fills up where a flow has fewer.
        limits: bytes per second of each link. Link 0 has no limit, and each flow has one that has.
    """
    rates = np.empty(routes.shape[1])
    waiting = np.arange(routes.shape[1])
    left = limits
    while waiting.size:
        flows = np.bincount(routes.ravel(), minlength=len(limits))
        shares = (left / np.maximum(flows, 1))[routes]
        least = shares.min(axis=0)
        # A link is full if none of its flows is held back elsewhere. The one with the least share
        # always is, so this comes to an end.
        held = routes[shares * (1 - _SAME) > least]
        full = np.bincount(held, minlength=len(limits)) == 0
        full[0] = False
        done = full[routes].any(axis=0)
        rates[waiting[done]] = least[done]
        if done.all():
            break
        gone = np.broadcast_to(least[done], (len(routes), int(done.sum())))
        taken = np.bincount(routes[:, done].ravel(), gone.ravel(), minlength=len(limits))
        left = np.maximum(left - taken, 0.0)
        waiting, routes = waiting[~done], routes[:, ~done]
    return rates
