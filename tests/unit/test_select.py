"""Which algorithm is chosen: by name, by override, by measurement, by cost formula."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fsdpcore import collectives
from fsdpcore.collectives.algorithms import star
from fsdpcore.collectives.selection import choose as select
from fsdpcore.collectives.selection.choose import candidates, choose
from fsdpcore.collectives.selection.overrides import parse
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.device import HOST
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.policy import AlgorithmRanges, Costs, MeasuredAlgorithms, Policy, Tuning

FAST = Capabilities("fast", alpha=1e-6, beta=0.1e-9, gamma=0.1e-9)
SLOW = Capabilities("slow", alpha=1e-3, beta=0.1e-9, gamma=0.1e-9)


def _float_sums(dtype: np.dtype[Any] | None, op: str) -> bool:
    return dtype == np.dtype(np.float32) and op == "sum"


# Costs nothing, so that it is taken wherever it can be.
NATIVE = Algorithm(star, lambda p: CostTerms(0, 0, 0), False, _float_sums)


def _backend(
    world_size: int,
    capabilities: Capabilities = FAST,
    rank: int = 0,
    policy: Policy | None = None,
    own: dict[str, dict[str, Algorithm]] | None = None,
    hosts: int = 1,
) -> Any:
    return SimpleNamespace(
        world_size=world_size,
        rank=rank,
        capabilities=capabilities,
        collectives=SimpleNamespace(own_algorithms=own or {}),
        moves=HOST,
        hosts=[member * hosts // world_size for member in range(world_size)],
        root=SimpleNamespace(policy=policy or Policy()),
    )


def cheapest(collective: str, nbytes: int, backend: Any) -> str:
    return select.cheapest(collective, nbytes, backend)


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
            combines = "reduce" in collective or "scan" in collective
            # Of two ranks, the second one gets what the first one has.
            assert (terms.gamma > 0) == (combines and (collective, ranks) != ("exscan", 2))
        assert algorithm.cost(1)[:2] == (0, 0)


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_choice_is_canonical_and_the_same_on_all_ranks(collective: str) -> None:
    for nbytes, ranks, costs in itertools.product(SIZES, RANKS, (FAST, SLOW)):
        names = {cheapest(collective, nbytes, _backend(ranks, costs, rank)) for rank in (0, 1, 7)}
        assert len(names) == 1
        assert names.pop() != "ring" or "reduce" not in collective


def test_only_the_ring_reductions_are_not_canonical() -> None:
    others = [
        (collective, name)
        for collective, known in ALGORITHMS.items()
        for name in known
        if name not in candidates(collective, _backend(4))
    ]
    assert others == [("all_reduce", "ring"), ("reduce_scatter", "ring")]


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_few_messages_for_small_arrays_few_bytes_for_large_ones(collective: str) -> None:
    for ranks in (2, 3, 8, 64):
        backend = _backend(ranks)
        costs = {name: known.cost(ranks) for name, known in candidates(collective, backend).items()}
        small, large = (costs[cheapest(collective, n, backend)] for n in (0, 10**12))
        assert small.alpha == min(terms.alpha for terms in costs.values())
        least = min(terms.beta + terms.gamma for terms in costs.values())
        assert large.beta + large.gamma == pytest.approx(least)


def test_few_steps_for_small_arrays() -> None:
    for ranks in (8, 64):
        assert cheapest("all_reduce", 8, _backend(ranks)) == "doubling"
        assert cheapest("broadcast", 8, _backend(ranks)) == "tree"
        assert cheapest("gather", 8, _backend(ranks)) == "tree"
        assert cheapest("gather", 10**9, _backend(ranks)) == "star"


def test_choose_by_name() -> None:
    backend = _backend(4)
    for collective, known in ALGORITHMS.items():
        for name, algorithm in known.items():
            assert choose(collective, name, 100, backend).algorithm is algorithm
        auto = choose(collective, "auto", 100, backend)
        assert auto == choose(collective, cheapest(collective, 100, backend), 100, backend)


@pytest.mark.parametrize("name", ["tree", "Star", "", None, 3])
def test_choose_something_unknown(name: Any) -> None:
    with pytest.raises(ArgumentError, match=r"it has 'auto', 'canonical', 'doubling', 'direct'"):
        choose("all_reduce", name, 100, _backend(4))


# Costs.


def test_measured_costs_replace_those_of_the_transport() -> None:
    slow = Policy(tuning=Tuning(Costs(SLOW.alpha, SLOW.beta, SLOW.gamma)))
    nbytes = 100_000
    assert cheapest("all_reduce", nbytes, _backend(8, FAST)) != "doubling"
    assert cheapest("all_reduce", nbytes, _backend(8, SLOW)) == "doubling"
    assert cheapest("all_reduce", nbytes, _backend(8, FAST, policy=slow)) == "doubling"


def test_what_was_measured_between_hosts_counts_for_groups_that_span_them() -> None:
    """A group within one host chooses as it would in a job on that host alone."""
    job = Policy(link=Costs(30e-6, 0.2e-9, 0.1e-9, 10e-3))
    alone = [_choice(Policy(), n) for n in SIZES]
    assert [_choice(job, n) for n in SIZES] == alone
    assert [_choice(job, n, hosts=4) for n in SIZES] != alone


def test_a_transports_own_algorithm_can_have_costs_of_its_own() -> None:
    like_star = Algorithm(star, ALGORITHMS["all_reduce"]["star"].cost)
    own = {"all_reduce": {"shared": like_star}}
    cheap = Policy(tuning=Tuning(own={"shared": Costs(1e-9, 1e-12, 1e-12)}))
    assert cheapest("all_reduce", 10**6, _backend(8, own=own)) != "shared"
    assert cheapest("all_reduce", 10**6, _backend(8, own=own, policy=cheap)) == "shared"


# Overrides.


def _ranges(**texts: str) -> dict[str, AlgorithmRanges]:
    return {name: parse(name, text, "test") for name, text in texts.items()}


def _choice(policy: Policy, nbytes: int, **group: Any) -> str:
    return choose("all_reduce", "auto", nbytes, _backend(4, policy=policy, **group)).name


def test_an_override_decides_within_its_ranges() -> None:
    policy = Policy(overrides=_ranges(all_reduce="star:0-99;ring:200-max"))
    usual = cheapest("all_reduce", 150, _backend(4))
    names = {n: _choice(policy, n) for n in (0, 99, 100, 150, 199, 200, 10**12)}
    assert usual not in ("star", "ring")
    expected = ["star", "star", usual, usual, usual, "ring", "ring"]
    assert list(names.values()) == expected
    other = choose("all_gather", "auto", 0, _backend(4, policy=policy))
    assert other == choose("all_gather", "auto", 0, _backend(4))


def test_a_calls_own_choice_wins_over_the_override() -> None:
    backend = _backend(4, policy=Policy(overrides=_ranges(all_reduce="star")))
    assert choose("all_reduce", "doubling", 8, backend).name == "doubling"


def test_auto_as_an_override_is_the_usual_choice() -> None:
    policy = Policy(overrides=_ranges(all_reduce="auto"))
    assert [_choice(policy, n) for n in SIZES] == [_choice(Policy(), n) for n in SIZES]


def test_an_override_that_cannot_be_followed_is_passed_over() -> None:
    policy = Policy(overrides=_ranges(all_reduce="native"))
    own = {"all_reduce": {"native": NATIVE._replace(cost=lambda p: CostTerms(1e9, 1e9, 1e9))}}
    usual = cheapest("all_reduce", 8, _backend(4))
    assert _choice(policy, 8) == usual, "the group has none"
    backend = _backend(4, policy=policy, own=own)
    float32, float16 = np.dtype(np.float32), np.dtype(np.float16)
    assert choose("all_reduce", "auto", 8, backend, float32, "sum").name == "native"
    assert choose("all_reduce", "auto", 8, backend, float16, "sum").name == usual
    assert choose("all_reduce", "auto", 8, backend, float32, "max").name == usual
    exact = _backend(4, policy=Policy(True, policy.overrides), own=own)
    assert choose("all_reduce", "auto", 8, exact, float32, "sum").name == usual


# What was measured.


def _measured(ranks: int = 4, hosts: int = 1) -> Policy:
    entry = MeasuredAlgorithms(
        ranks,
        hosts,
        _ranges(all_reduce="native:0-99;star:100-max"),
        _ranges(all_reduce="doubling:0-99;star:100-max"),
    )
    return Policy(tuning=Tuning(measured=(entry,)))


def test_measured_ranges_win_over_the_formulas() -> None:
    policy, own = _measured(), {"all_reduce": {"native": NATIVE}}
    backend = _backend(4, policy=policy, own=own)
    float32, float16 = np.dtype(np.float32), np.dtype(np.float16)
    assert choose("all_reduce", "auto", 99, backend, float32, "sum").name == "native"
    assert choose("all_reduce", "auto", 99, backend, float16, "sum").name == "doubling"
    assert choose("all_reduce", "auto", 100, backend, float32, "sum").name == "star"
    exact = _backend(4, policy=Policy(True, tuning=policy.tuning), own=own)
    assert choose("all_reduce", "auto", 99, exact, float32, "sum").name == "doubling"


def test_overrides_win_over_what_was_measured() -> None:
    policy = Policy(overrides=_ranges(all_reduce="direct:0-50"), tuning=_measured().tuning)
    assert [_choice(policy, n) for n in (50, 51, 100)] == ["direct", "doubling", "star"]


@pytest.mark.parametrize("other", [_measured(ranks=5), _measured(hosts=2)])
def test_what_was_measured_counts_for_groups_of_that_size_only(other: Policy) -> None:
    assert [_choice(other, n) for n in SIZES] == [_choice(Policy(), n) for n in SIZES]


def test_what_was_measured_on_two_hosts_counts_on_two_hosts() -> None:
    assert _choice(_measured(hosts=2), 10**7, hosts=2) == "star"


def test_a_measured_table_never_leads_to_ring() -> None:
    """Even if one came to name it; the parser refuses that."""
    entry = MeasuredAlgorithms(4, 1, {"all_reduce": parse("all_reduce", "ring", "test")})
    policy = Policy(tuning=Tuning(measured=(entry,)))
    assert {_choice(policy, n) for n in SIZES} <= set(candidates("all_reduce", _backend(4)))


def test_a_group_may_find_algorithms_of_its_own_while_another_thread_chooses() -> None:
    """It does with its first collective, on the thread of asynchronous ones."""
    own = ALGORITHMS["all_reduce"]["direct"]._replace(publishes=1)
    answers = iter([{}, *[{"all_reduce": {"own": own}}] * 9])

    class Finding(SimpleNamespace):
        @property
        def own_algorithms(self) -> Any:
            return next(answers)

    backend = _backend(2)
    backend.collectives = Finding()
    assert choose("all_reduce", "auto", 100, backend).name in ALGORITHMS["all_reduce"]
    assert choose("all_reduce", "auto", 100, backend).name == "own"


class _Gpu:
    on_host = False


def test_on_a_gpu_the_first_own_algorithm_is_taken_that_may_be_used() -> None:
    own = {"all_reduce": {"native": NATIVE, "direct": ALGORITHMS["all_reduce"]["direct"]}}

    def chosen(dtype: Any, policy: Policy | None = None, **own: Any) -> str:
        backend = _backend(2, own=own, policy=policy)
        backend.moves = _Gpu()
        return choose("all_reduce", "auto", 4, backend, np.dtype(dtype), "sum").name

    assert chosen(np.float32, **own) == "native"
    assert chosen(np.int32, **own) == "direct"
    assert chosen(np.float32, Policy(deterministic=True), **own) == "direct"
    with pytest.raises(ArgumentError, match="no algorithm for sum of int32"):
        chosen(np.int32, all_reduce={"native": NATIVE})
    with pytest.raises(ArgumentError, match="all_reduce of arrays on"):
        chosen(np.float32)
