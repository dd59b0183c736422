"""Which communicators of NCCL the groups of a job get, on the stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.fake_cuda import Machine
from support.nccl_ranks import SOON, results_of, settled

import fsdpcore as fc
from fsdpcore.collectives.on_device import device_twin

P = 3


@pytest.fixture
def machine() -> Iterator[Machine]:
    with fake_cuda.installed(P) as made:
        yield made


def on_ranks(body: Callable[[Any], Any]) -> list[Any]:
    return results_of(body, P, timeout=SOON)


def device_array(backend: Any, shape: tuple[int, ...]) -> Any:
    return backend.device.from_host(np.ones(shape, np.float32))


def test_groups_have_communicators_of_their_own(machine: Machine) -> None:
    def body(backend: Any) -> list[float]:
        x = device_array(backend, (4,))
        found = [fc.all_reduce(x, backend)]
        if backend.rank:
            found.append(fc.all_reduce(x, backend.sub([2, 1])))
        return [float(y[0]) for y in found]

    assert on_ranks(body) == [[3.0], [3.0, 2.0], [3.0, 2.0]]
    of_rank_2 = [e.args["rank"] for e in machine.calls("nccl.allReduce") if e.device == 2]
    assert of_rank_2 == [2, 0]  # in the job, and in the group


def test_split_divides_the_communicator(machine: Machine) -> None:
    def body(backend: Any) -> list[float]:
        x = device_array(backend, (4,))
        group = backend.split(None if backend.rank == 0 else 7, key=-backend.rank)
        if group is None:
            return []
        half = group.split(0)  # and again
        assert half is not None
        return [float(fc.all_reduce(x, each)[0]) for each in (group, half)]

    assert on_ranks(body) == [[], [2.0, 2.0], [2.0, 2.0]]
    assert len(machine.calls("nccl.init")) == P  # that of all ranks alone
    splits = [(e.device, e.args["color"], e.args["key"]) for e in machine.calls("nccl.commSplit")]
    assert sorted(splits) == [(0, -1, 0), (1, 0, 1), (1, 1, 1), (2, 0, 0), (2, 1, 0)]


def test_a_communicator_is_used_again(machine: Machine) -> None:
    """By a group of the same ranks, in the same order, after all of them have closed the first."""

    def body(backend: Any) -> list[float]:
        x, found = device_array(backend, (4,)), []
        order = [2, 0, 1]
        for _ in range(4):
            with backend.sub(order) as group:
                found.append(float(fc.all_reduce(x, group)[0]))
        backend.barrier()
        group = backend.sub(sorted(order))
        with backend.sub(order) as again:
            found.append(float(fc.all_reduce(x, again)[0]))
            found.append(float(fc.all_reduce(x, group)[0]))
            with backend.sub(order) as third:  # while the other one is in use
                found.append(float(fc.all_reduce(x, third)[0]))
        return found

    assert on_ranks(body) == [[3.0] * 7] * P
    # Of all ranks when they join, of those in another order, of the ordered group, of the third;
    # one more for each time that a rank had not yet closed its group when the next one came.
    assert len(machine.calls("nccl.init")) in [P * n for n in (4, 5, 6, 7)]


def test_a_part_of_a_split_is_given_what_a_closed_one_had(machine: Machine) -> None:
    """NCCL's communicators take memory of the GPU, and last until the job ends."""

    def body(backend: Any) -> list[float]:
        x, found = device_array(backend, (4,)), []
        for _ in range(4):
            group = backend.split(None if backend.rank == 0 else 7, key=-backend.rank)
            if group is not None:
                with group:
                    found.append(float(fc.all_reduce(x, group)[0]))
            backend.barrier()
        kept = [backend.split(0) for _ in range(2)]  # these are open at the same time
        return [*found, *(float(fc.all_reduce(x, group)[0]) for group in kept)]

    assert on_ranks(body) == [[3.0] * 2, *[[2.0] * 4 + [3.0] * 2] * 2]
    splits = [e.args["color"] for e in machine.calls("nccl.commSplit") if e.device == 1]
    assert splits == [1, -1, -1, -1, 0, 0]


def test_what_some_ranks_have_closed_is_not_used_again(machine: Machine) -> None:
    """Ranks that have closed different groups of the same ranks agree on what is free."""

    def body(backend: Any) -> list[float]:
        x = device_array(backend, (4,))

        def total(group: Any) -> float:
            return float(fc.all_reduce(x, group)[0])

        groups = sorted(
            (backend.sub(range(P)) for _ in range(2)), key=lambda group: device_twin(group).channel
        )
        found = [total(group) for group in groups]
        first, second = groups if backend.rank != 1 else reversed(groups)
        first.close()
        found.append(total(backend.sub(range(P))))  # nothing is free on all ranks
        if backend.rank != 1:
            second.close()
        found.append(total(backend.sub(range(P))))  # one is, and more on some
        if backend.rank == 1:
            second.close()
        return found + [total(backend.sub(range(P))) for _ in range(2)]

    assert on_ranks(body) == [[3.0] * 6] * P
    # Of all ranks, of the first three groups, of the last one.
    assert len(machine.calls("nccl.init")) == P * (1 + 3 + 1)


def test_a_communicator_is_divided_when_its_calls_have_ended(machine: Machine) -> None:
    """The machine tells where it is not: NCCL does not say what it would do."""

    def body(backend: Any) -> float:
        x = settled(backend)
        machine.slow(0, 0.3)
        fc.all_reduce(x, backend, op="mean", out=x)
        group = backend.split(0)
        machine.slow(0, 0)
        return float(fc.all_reduce(x, group)[0])

    assert on_ranks(body) == [3.0] * P
