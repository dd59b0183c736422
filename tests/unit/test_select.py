from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from fsdpcore import collectives
from fsdpcore.backend import Capabilities
from fsdpcore.collectives.algorithms import ALGORITHMS
from fsdpcore.collectives.select import cheapest, choose
from fsdpcore.errors import ArgumentError

FAST = Capabilities("fast", alpha=1e-6, beta=0.1e-9, gamma=0.1e-9)
SLOW = Capabilities("slow", alpha=1e-3, beta=0.1e-9, gamma=0.1e-9)


def _backend(world_size: int, capabilities: Capabilities = FAST, rank: int = 0) -> Any:
    return SimpleNamespace(
        world_size=world_size, rank=rank, capabilities=capabilities, own_algorithms={}
    )


SIZES = [0, 4, 1000, 100_000, 10**7, 10**10]
RANKS = [1, 2, 3, 4, 5, 7, 8, 64, 100, 1000]


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_every_algorithm_has_its_function_and_sane_costs(collective: str) -> None:
    assert hasattr(collectives, collective)
    for name, algorithm in ALGORITHMS[collective].items():
        assert callable(getattr(algorithm.module, collective)), name
        assert algorithm.module.__name__.endswith(f".{name}")
        for ranks in RANKS[1:]:
            terms = algorithm.cost(ranks)
            assert terms.alpha >= 1
            assert terms.beta > 0
            assert (terms.gamma > 0) == ("reduce" in collective)
        assert algorithm.cost(1)[:2] == (0, 0)


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_choice_is_canonical_and_the_same_on_all_ranks(collective: str) -> None:
    for nbytes, ranks, costs in itertools.product(SIZES, RANKS, (FAST, SLOW)):
        names = {cheapest(collective, nbytes, _backend(ranks, costs, rank)) for rank in (0, 1, 7)}
        assert len(names) == 1
        assert ALGORITHMS[collective][names.pop()].canonical


def test_only_the_ring_reductions_are_not_canonical() -> None:
    others = [
        (collective, name)
        for collective, known in ALGORITHMS.items()
        for name, algorithm in known.items()
        if not algorithm.canonical
    ]
    assert others == [("all_reduce", "ring"), ("reduce_scatter", "ring")]


def test_few_steps_for_small_arrays_few_bytes_for_large_ones() -> None:
    for ranks in (8, 64):
        assert cheapest("all_reduce", 8, _backend(ranks)) == "doubling"
        assert cheapest("all_reduce", 10**9, _backend(ranks)) == "direct"
        assert cheapest("broadcast", 8, _backend(ranks)) == "tree"
        assert cheapest("gather", 8, _backend(ranks)) == "tree"
        assert cheapest("gather", 10**9, _backend(ranks)) == "star"


def test_choose_by_name() -> None:
    backend = _backend(4)
    for collective, known in ALGORITHMS.items():
        for name, algorithm in known.items():
            function = choose(collective, name, 100, backend).function
            assert function is getattr(algorithm.module, collective)
        auto = choose(collective, "auto", 100, backend)
        assert auto == choose(collective, cheapest(collective, 100, backend), 100, backend)


@pytest.mark.parametrize("name", ["tree", "Star", "", None, 3])
def test_choose_something_unknown(name: Any) -> None:
    with pytest.raises(ArgumentError, match=r"it has 'auto', 'doubling', 'direct'"):
        choose("all_reduce", name, 100, _backend(4))
