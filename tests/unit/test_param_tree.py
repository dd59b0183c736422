"""Parameters in nested containers: units of an engine, and back."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.fsdp_steps import launch

import fsdpcore as fc
from fsdpcore.core.skeleton import Skeleton


class Pair(NamedTuple):
    w: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Block:
    pair: Pair
    activation: Any
    width: int


def ones(*shape):
    return np.ones(shape, np.float32)


def example():
    block = Block(Pair(ones(3, 2), None), np.tanh, 3)
    return {
        "scale": ones(),
        "blocks": [block, Block(Pair(ones(2), ones(5)), len, 2)],
        "table": OrderedDict(ids=np.arange(4), w=fc.Spec((4, 2)), tied=fc.Tied("table", "w")),
    }


NAMES = {
    1: ["params.scale", "blocks.0.pair.w", "blocks.1.pair.w", "blocks.1.pair.b", "table.ids"],
    2: ["params.scale", "blocks.0.pair.w", "blocks.1.pair.w", "blocks.1.pair.b", "table.ids"],
}
UNITS = {1: ["params", "blocks", "table"], 2: ["params", "blocks.0", "blocks.1", "table"]}


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_takes_a_tree_and_gives_it_back(depth):
    """Each rank adds 1 to all that is trained: functions get the tree, and return its like."""

    def body(backend):
        given = example()
        engine = fc.FSDP(
            given if depth == 1 else fc.ParamTree(given, depth),
            backend,
            optimizer=fc.optim.SGD(1.0),
        )
        assert [unit.name for unit in engine.units] == UNITS[depth]
        assert engine.tree.names == (*NAMES[depth], "table.w", "table.tied")
        assert engine.units[-1].frozen == {"ids"}
        seen = []

        def function(params):
            seen.append(params)
            block = params["blocks"][1]
            return "loss", {
                "scale": -ones(),
                "blocks": [None, dataclasses.replace(block, pair=Pair(-ones(2), -ones(5)))],
                "table": {"tied": -ones(4, 2)},
            }

        assert fc.train_step(engine, function) == "loss"
        assert type(seen[0]["blocks"][0]) is Block
        assert seen[0]["blocks"][0].activation is np.tanh
        found = engine.full_tree()
        assert type(found["table"]) is OrderedDict
        first, second = found["blocks"]
        assert (first.pair.b, first.activation, first.width) == (None, np.tanh, 3)
        assert_array_equal(first.pair.w, ones(3, 2))
        for array, value in [(found["scale"], 2), (second.pair.w, 2), (second.pair.b, 2)]:
            assert_array_equal(array, np.full_like(array, value))
        assert_array_equal(found["table"]["w"], ones(4, 2))
        assert_array_equal(found["table"]["tied"], ones(4, 2))
        assert_array_equal(found["table"]["ids"], np.arange(4))
        engine.load_full(engine.tree.named(given | {"table": None}), strict=False)
        assert_array_equal(engine.full_tree()["scale"], given["scale"])
        only = engine.full_tree(to=1)
        assert (only is None) is (backend.rank != 1)
        with engine.evaluation() as step, step.whole() as (params, _):
            assert_array_equal(params["blocks"][0].pair.w, ones(3, 2))

    launch(body, 2)


def test_the_rule_of_units_may_be_a_function():
    names = ("layer1.w", "layer1.b", "layer2.w", "layer2.g")
    tree = fc.ParamTree(
        {**{name: ones(2) for name in names}, "layer2.mask": np.ones(2, np.bool_)},
        lambda names: "last" if names[0] == "layer2" else "",
        frozen="*.layer1.b",
        ignored="last.layer2.g",
    )
    last = ("last.layer2.w", "last.layer2.g", "last.layer2.mask")
    assert tree.names == ("params.layer1.w", "params.layer1.b", *last)
    assert [unit.frozen for unit in tree] == [{"layer1.b"}, {"layer2.mask"}]
    assert [set(unit.ignored) for unit in tree] == [set(), {"layer2.g"}]
    # As torch.nn.Module.named_parameters has names.
    assert fc.ParamTree({"0.weight": ones(1), "2.weight": ones(1)}).names == (
        "0.weight",
        "2.weight",
    )


def test_arrays_of_jax_are_values_and_those_of_numpy_are_memory():
    import jax.numpy as jnp

    def body(backend):
        for array, tied in ((jnp.ones(3), False), (ones(3), True)):
            engine = fc.FSDP({"a": {"w": array}, "b": {"w": array}}, backend)
            assert bool(engine["b"].ties) is tied

    launch(body, 1)


def test_a_unit_takes_a_tree():
    def body(backend):
        unit = fc.Unit("u", {"attn": {"w": ones(2)}, "mlp": [ones(3), {"b": ones(4)}]})
        assert unit.names == ("attn.w", "mlp.0", "mlp.1.b")
        engine = fc.FSDP([unit], backend, optimizer=fc.optim.SGD(1.0))
        with engine.step() as step:
            with step.forward(unit) as params:
                tree = unit.build(params)
                assert tree["mlp"][1]["b"] is params["mlp.1.b"]
            with step.backward(unit) as (params, grads):
                grads.update(unit.split({"mlp": [-ones(3), None]}))
            step.update()
        state = engine.state_dict(full=True)
        assert [float(state[f"u.{name}"][0]) for name in unit.names] == [1, 2, 1]

    launch(body, 2)


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ({"a": {"w": ones(2)}, "c": ones(1)}, "these have no 'c'"),
        ({"a": {"wrong": ones(2)}}, "at a: these have no 'wrong'"),
        ({"a": ones(2)}, "at a: these are a dict there, but it has a ndarray"),
        ({"a": {"w": ones(3)}}, r"gradient of a\.w must have shape \(2,\)"),
        (None, "the gradients are None"),
        ("only a loss", "must return the loss, and gradients nested like the parameters"),
    ],
)
def test_gradients_that_are_nested_otherwise_are_refused_before_anything_changes(gradients, words):
    def body(backend):
        engine = fc.FSDP(
            {"a": {"w": ones(2)}, "b": [1, None]}, backend, optimizer=fc.optim.SGD(1.0)
        )
        result = gradients if gradients == "only a loss" else ("loss", gradients)
        with pytest.raises(fc.ArgumentError, match=words):
            fc.train_step(engine, lambda params: result)
        assert_array_equal(engine.full_tree()["a"]["w"], ones(2))

    launch(body, 1)


def test_mistakes_with_the_tree_of_an_engine_say_what_to_do():
    def body(backend):
        engine = fc.FSDP({"enc": {"a": {"w": ones(2)}}, "b": ones(1)}, backend)
        named = fc.FSDP(fc.ParamTree({"enc": {"a": {"w": ones(2)}}, "b": ones(1)}, 2), backend)
        words = r"full_tree\(\) inside of a step; leave that"
        with engine.step(), pytest.raises(fc.StateError, match=words):
            engine.full_tree()
        words = r"no such unit; it has enc\.a, params; .*grads\.update\(tree\)"
        with (
            pytest.raises(fc.ArgumentError, match=words),
            named.step() as step,
            step.whole() as (_, grads),
        ):
            grads["enc"] = {"a": {"w": ones(2)}}

    launch(body, 1)


def test_load_full_takes_the_tree_that_full_tree_gives():
    def body(backend):
        engine = fc.FSDP({"enc": {"a": {"w": ones(5)}}, "b": ones(1), "f": len}, backend)
        tree = engine.full_tree()
        tree["enc"]["a"]["w"] *= 3
        tree["b"] = 2 * tree["b"]
        engine.load_full(tree if backend.rank == 1 else None, src=1)
        found = engine.full_tree()
        assert_array_equal(found["enc"]["a"]["w"], 3 * ones(5))
        assert_array_equal(found["b"], 2 * ones(1))
        for wrong in (None, {"enc": {"z": ones(5)}}, [ones(5)], {"enc.z": ones(5)}):
            with pytest.raises(
                fc.ArgumentError, match=r"missing are|come as a mapping .* or nested"
            ):
                engine.load_full(wrong)

    launch(body, 2)


def test_what_makes_no_tree_is_refused():
    with pytest.raises(fc.ArgumentError, match=r"two parameters of the tree are named 'a\.b\.w'"):
        fc.ParamTree({"a": {"b.w": ones(1), "b": {"w": ones(1)}}})
    with pytest.raises(fc.ArgumentError, match=r"frozen='\*\.z' matches no parameter"):
        fc.ParamTree({"a": ones(1)}, frozen="*.z")
    with pytest.raises(fc.ArgumentError, match="returns the name of a unit; for 'a' it returned 3"):
        fc.ParamTree({"a": ones(1)}, lambda names: 3)
    mixed = [fc.Unit("u", {"w": ones(1)}), {"w": ones(1)}]
    with pytest.raises(fc.RankFailedError, match="units must be Unit objects, got dict"):
        launch(lambda b: fc.FSDP(mixed, b), 1)
    with pytest.raises(
        fc.RankFailedError, match=r"full_tree\(\) needs an engine that was made of a"
    ):
        launch(lambda b: fc.FSDP([fc.Unit("u", {"w": ones(1)})], b).full_tree(), 1)


def test_aux_comes_back_beside_the_loss():
    from fsdpcore.adapters import jax as adapter

    def body(backend):
        engine = fc.FSDP({"a": {"w": ones(2)}, "f": len}, backend, optimizer=fc.optim.SGD(1.0))

        def loss_fn(params, x):
            return (params["a"]["w"] * x).sum(), {"x": x + 1, "same": params["a"]["w"]}

        function = adapter.loss_and_grads(loss_fn, has_aux=True)
        loss, aux = fc.train_step(engine, function, np.float32(backend.rank))
        assert loss == 2 * backend.rank
        assert type(aux["x"]) is np.ndarray
        assert aux["x"] == backend.rank + 1
        assert_array_equal(aux["same"], ones(2))  # as it was before the update
        assert_array_equal(engine.full_tree()["a"]["w"], ones(2) / 2)
        with pytest.raises(
            fc.ArgumentError, match=r"with has_aux the function returns \(loss, aux\)"
        ):
            fc.train_step(engine, adapter.loss_and_grads(lambda p: p["a"]["w"].sum(), has_aux=True))

    launch(body, 2)


LEAVES = st.one_of(st.none(), st.integers(0, 9), st.just(len), st.just(ones(1)))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=8,
)


def reference(tree, path=()):
    """Paths of arrays, by a walk of its own."""
    if isinstance(tree, np.ndarray):
        return [path]
    if isinstance(tree, Pair):
        return reference(tree._asdict(), path)
    items = {}
    if isinstance(tree, dict):
        items = tree
    elif isinstance(tree, (list, tuple)):
        items = dict(enumerate(tree))
    return [each for key, item in items.items() for each in reference(item, (*path, key))]


@given(tree=TREES, other=TREES)
@settings(max_examples=60, deadline=None)
def test_a_skeleton_takes_leaves_out_and_puts_them_back(tree, other):
    def is_array(leaf):
        return isinstance(leaf, np.ndarray)

    skeleton = Skeleton(tree, is_array)
    assert skeleton.paths == reference(tree)
    numbers = list(range(len(skeleton)))
    assert skeleton.find(skeleton(numbers), "it") == numbers
    assert repr(skeleton(skeleton.leaves)) == repr(tree)
    again, else_ = Skeleton(tree, is_array), Skeleton(other, is_array)
    assert again == skeleton
    assert hash(again) == hash(skeleton)
    text = repr(tree).replace(repr(ones(1)), "*"), repr(other).replace(repr(ones(1)), "*")
    assert (else_ == skeleton) is (text[0] == text[1])
