"""``optim.Average`` and ``engine.averaged``: averages of the weights, in shards."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_steps import launch
from support.spmd import run

import fsdpcore as fc

START, DECAY = 3, 0.75


def start():
    rng = np.random.default_rng(0)
    return {"u": {"w": rng.normal(size=(5, 3))}, "v": {"w": rng.normal(size=4)}}


def average(inner, **options):
    options = {"ema": DECAY, "mean": True, "start": START} | options
    return fc.optim.Average(inner, **options)


def take(engine, steps):
    """Steps whose gradients are other ones each time; returns the weights after each."""
    found = []
    for _ in range(steps):
        rng = np.random.default_rng(engine.steps)
        fc.train_step(
            engine, lambda p, r=rng: (0.0, {u: {"w": r.normal(size=p[u]["w"].shape)} for u in p})
        )
        found.append(engine.full_tree())
    return found


def train(backend, inner, strategy, folder):
    engine = fc.FSDP(start(), backend, optimizer=average(inner), strategy=strategy)
    with engine.averaged("ema"):  # which has not begun
        assert_array_equal(engine.full_tree()["u"]["w"], start()["u"]["w"])
    weights = take(engine, 6)
    fc.checkpoint.save(folder, engine, backend)
    engine = fc.FSDP(start(), backend, optimizer=average(inner))
    fc.checkpoint.load(folder, engine, backend)
    weights += take(engine, 2)
    found = {}
    for kind in ("ema", "mean"):
        before = engine.state_dict(full=True)
        with engine.averaged(kind):
            found[kind] = engine.full_tree()
            with engine.evaluation() as step, step.whole() as (params, _):
                for unit in params:
                    assert_array_equal(params[unit]["w"], found[kind][unit]["w"])
        after = engine.state_dict(full=True)
        assert all(np.array_equal(before[name], after[name]) for name in before)
    return weights, found


@pytest.mark.parametrize(
    ("inner", "strategy", "ranks"),
    [
        (fc.optim.AdamW(lr=0.1), "full_shard", 3),
        (fc.optim.Adafactor(), "full_shard", 2),
        (fc.optim.SGD(lr=0.1), "no_shard", 2),
    ],
)
def test_averages_are_those_of_the_weights_after_each_update(
    inner, strategy, ranks, tmp_path, monkeypatch
):
    for place in ("optim.average", "state.averaged"):  # some blocks in each shard
        monkeypatch.setattr(f"fsdpcore.fsdp.{place}.BLOCK_ELEMENTS", 3)
    args = inner, strategy, str(tmp_path / "run")
    for weights, found in run(train, transport="sim", world_size=ranks, args=args):
        for unit in ("u", "v"):
            counted = [tree[unit]["w"] for tree in weights[START - 1 :]]
            ema = counted[0]
            for each in counted[1:]:
                ema = DECAY * ema + (1 - DECAY) * each
            assert_allclose(found["ema"][unit]["w"], ema, rtol=1e-12)
            assert_allclose(found["mean"][unit]["w"], np.mean(counted, axis=0), rtol=1e-12)


def test_the_weights_come_back_whatever_ends_the_block_and_are_not_lost_in_it():
    def body(backend):
        engine = fc.FSDP(start(), backend, optimizer=average(fc.optim.SGD(lr=0.1), start=1))
        take(engine, 3)
        before = engine.full_tree()
        with pytest.raises(ZeroDivisionError), engine.averaged("mean"):
            assert not np.array_equal(engine.full_tree()["u"]["w"], before["u"]["w"])
            for forbidden in (
                lambda: take(engine, 1),
                lambda: engine.state_dict(),
                lambda: engine.load_full({}, strict=False),
                lambda: engine.full_params(write=True).__enter__(),
                lambda: engine.averaged("ema").__enter__(),
            ):
                with pytest.raises(fc.StateError, match=r"inside of averaged\(\)"):
                    forbidden()
            assert set(engine.state_dict(optimizer=False)) == {"u.w", "v.w"}
            _ = 1 / 0
        for unit in before:
            assert_array_equal(engine.full_tree()[unit]["w"], before[unit]["w"])
        take(engine, 1)

    launch(body, 2)


def test_an_average_may_begin_in_a_job_that_goes_on(tmp_path):
    """A checkpoint without it leaves it to begin with the next update."""

    def body(backend):
        plain = fc.FSDP(start(), backend, optimizer=fc.optim.SGD(lr=0.1))
        take(plain, 4)
        fc.checkpoint.save(str(tmp_path / "run"), plain, backend)
        engine = fc.FSDP(start(), backend, optimizer=average(fc.optim.SGD(lr=0.1), mean=False))
        fc.checkpoint.load(str(tmp_path / "run"), engine, backend, strict=False)
        one, two = take(engine, 2)
        with engine.averaged():
            want = DECAY * one["u"]["w"] + (1 - DECAY) * two["u"]["w"]
            assert_allclose(engine.full_tree()["u"]["w"], want, rtol=1e-12)

    launch(body, 2)


def test_what_makes_no_sense_is_refused():
    inner = fc.optim.SGD(lr=0.1)
    with pytest.raises(fc.ConfigError, match="keeps no average: give ema"):
        fc.optim.Average(inner)
    with pytest.raises(fc.ConfigError, match="must be below 1"):
        fc.optim.Average(inner, ema=1.0)
    with pytest.raises(fc.ConfigError, match="keeps the same one"):
        fc.optim.Average(average(inner), ema=0.99)
    with pytest.raises(fc.ConfigError, match="takes an optimizer"):
        fc.optim.Average(3, ema=0.5)

    def body(backend):
        engine = fc.FSDP(start(), backend, optimizer=average(inner))
        for kind, words in ((None, "say which"), ("mode", "keeps ema and mean")):
            with pytest.raises(fc.ArgumentError, match=words), engine.averaged(kind):
                pass
        with pytest.raises(fc.StateError, match=r"keeps no average .* fc\.optim\.Average"):
            fc.FSDP(start(), backend, optimizer=inner).averaged().__enter__()

    launch(body, 1)
