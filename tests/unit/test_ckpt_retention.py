"""Which checkpoints are kept: every rule by itself, all together, and what makes no sense."""

from __future__ import annotations

import itertools
import math

import pytest
from support.ckpt_steps import commit, whole, write

from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.checkpoint.storage.retention import Retention, prune
from fsdpcore.checkpoint.storage.steps import StepName, directories
from fsdpcore.core.errors import ArgumentError

LOSSES = {10: 5.0, 20: 1.0, 30: 3.0, 40: 1.0, 50: 4.0}
ALL = [(step, {"loss": loss}) for step, loss in LOSSES.items()]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"last": 1}, {50}),
        ({"last": 3}, {30, 40, 50}),
        ({"last": 9}, set(LOSSES)),
        ({"every": 20}, {20, 40, 50}),
        ({"every": 7}, {50}),
        ({"best": 1, "metric": "loss"}, {40, 50}),
        ({"best": 3, "metric": "loss"}, {20, 40, 30, 50}),
        ({"best": 1, "metric": "loss", "mode": "max"}, {10, 50}),
        ({"best": 2, "metric": "none"}, {50}),
        ({"best": 1, "metric": "loss", "mode": "max", "last": 2, "every": 30}, {10, 30, 40, 50}),
    ],
    ids=str,
)
def test_rules(rules, kept):
    retention = Retention(**rules)
    for order in itertools.islice(itertools.permutations(ALL), 0, 120, 17):
        assert retention.keeps(order) == kept


def test_step_zero_is_a_multiple_of_everything():
    assert Retention(every=100).keeps([(0, {}), (1, {}), (2, {})]) == {0, 2}


def test_nothing_to_keep():
    assert Retention(last=1, best=1, metric="x", every=2).keeps([]) == set()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_value_that_is_no_number_is_not_among_the_best(mode):
    retention = Retention(best=1, metric="x", mode=mode)
    values = [(1, {"x": math.nan}), (2, {"x": 0.0}), (3, {}), (4, {"x": math.nan})]
    assert retention.keeps(values) == {2, 4}


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"last": 0},
        {"last": -1},
        {"last": 1.5},
        {"last": True},
        {"last": "3"},
        {"every": 0},
        {"best": 0, "metric": "loss"},
        {"best": 2},
        {"metric": "loss"},
        {"last": 1, "metric": "loss"},
        {"best": 2, "metric": ""},
        {"best": 2, "metric": 3},
        {"best": 2, "metric": "-loss"},
        {"best": 2, "metric": "loss", "mode": "least"},
        {"last": 2, "mode": None},
    ],
    ids=str,
)
def test_what_makes_no_sense(rules):
    with pytest.raises(ArgumentError, match="Retention"):
        Retention(**rules)


@pytest.fixture
def storage(tmp_path):
    made = LocalStorage(str(tmp_path))
    for step, metrics in ALL:
        commit(made, StepName(step), metrics)
    return made


def steps_of(storage):
    return {name.step for name in directories(storage)}


def test_pruning_removes_what_no_rule_keeps(storage):
    removed = prune(storage, Retention(last=2, best=1, metric="loss", mode="max"))
    assert removed == ([StepName(20), StepName(30)], [], [])
    assert steps_of(storage) == {10, 40, 50}
    assert all(whole(storage, name) for name in directories(storage))
    assert prune(storage, Retention(last=2, best=1, metric="loss", mode="max")) == ([], [], [])


def test_what_is_protected_stays(storage):
    assert prune(storage, Retention(last=1), protect=[StepName(20), StepName(99)]).removed == [
        StepName(10),
        StepName(30),
        StepName(40),
    ]


def test_what_somebody_reads_stays_until_the_next_time(storage):
    with storage.hold(StepName(20).name):
        removal = prune(storage, Retention(last=1))
        assert removal.held == [StepName(20)]
        assert "step_00000020 was not removed" in removal.notes()[0]
        assert steps_of(storage) == {20, 50}
        assert whole(storage, StepName(20))
    assert prune(storage, Retention(last=1)) == ([StepName(20)], [], [])


def test_older_generations_of_a_step_go(storage):
    commit(storage, StepName(50, 1))
    commit(storage, StepName(50, 2))
    assert prune(storage, Retention(every=10)).removed == [StepName(50), StepName(50, 1)]
    assert steps_of(storage) == set(LOSSES)


def test_an_older_generation_stays_if_the_newer_was_not_committed(storage):
    storage.make_directory(StepName(50, 1).name)
    write(storage, StepName(50, 1))
    prune(storage, Retention(last=1))
    assert directories(storage) == [StepName(50, 1), StepName(50)]


def test_directories_without_a_marker_are_not_counted_and_stay(storage):
    storage.make_directory(StepName(60).name)
    storage.make_directory("mine")
    prune(storage, Retention(last=2))
    assert steps_of(storage) == {40, 50, 60}
    assert "mine" in storage.names()


@pytest.mark.parametrize("lost", ["metadata.json", "rank_0.safetensors"])
def test_the_newest_that_is_sound_is_kept_too(storage, lost):
    storage.remove(f"{StepName(50).name}/{lost}")
    prune(storage, Retention(last=1))
    assert steps_of(storage) == {40, 50}
    assert whole(storage, StepName(40))


def test_a_sound_older_generation_is_kept_too(storage):
    newer = commit(storage, StepName(50, 1))
    storage.remove(f"{newer.name}/metadata.json")
    prune(storage, Retention(last=1))
    assert directories(storage) == [newer, StepName(50)]
