"""What is taken out of layers' attributes, where gradients are found, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
import pickle
from collections import OrderedDict, deque
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import nccl_ranks
from support.fsdp_steps import cause_of, is_clean, launch

import fsdpcore as fc
from fsdpcore.adapters.fully_shard.guards import Placeholder

F32 = np.float32
X = np.random.default_rng(1).standard_normal((6, 4)).astype(F32)


class Layer:
    """Adds to its input the sum of all its arrays; each has the sum of dy as gradient."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def forward(self, x):
        return x + sum(self.arrays())

    def backward(self, dy):
        for name, array in self.named():
            setattr(self, f"d{name}", np.full(array.shape, dy.sum(), array.dtype))
        return dy

    def arrays(self):
        return [array.sum() for _, array in self.named()]

    def named(self):
        return [(name, value) for name, value in vars(self).items() if name[0] in "vw"]


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def once(layers, backend, x=X, **options):
    """One step of gradient descent with learning rate 1; the parameters, whole."""
    sharded = fc.fully_shard(layers, backend, optimizer=fc.optim.SGD(lr=1.0), **options)
    with sharded.step() as step:
        for layer in sharded.layers:
            x = layer.forward(x)
        dy = np.ones_like(x)
        for layer in reversed(sharded.layers):
            dy = layer.backward(dy)
        step.update()
    assert is_clean(sharded.engine)
    with sharded.engine.full_params() as whole:
        return {name: array.copy() for name, array in whole.items()}


def names_of(layers, **options):
    def body(backend):
        units = fc.fully_shard(layers, backend, **options).engine.units
        return {unit.name: unit.names for unit in units}

    return launch(body, 1)[0]


# What is found.


def test_arrays_are_found_below_attributes_and_named_by_the_way_there():
    class Inner:
        def __init__(self):
            self.w = ones(2)

    class Rows(list):
        """A list with an attribute."""

    rows = Rows([ones(2)])
    rows.scale = ones(3)
    layer = Layer(
        w=ones(3, 2),
        scalar=ones(),
        none=None,
        number=3.0,
        scalar_of_numpy=F32(3),
        integers=np.arange(3),
        halves=ones(3, dtype=np.float16),
        text="w",
        inner=Inner(),
        rows=rows,
        table={"a": {"b": ones(2)}, 3: [ones(1), Inner()]},
        space=SimpleNamespace(w=ones(2), n=1),
        pair=(Inner(), 4),
        module=np,
        generator=np.random.default_rng(0),
        kind=Inner,
    )
    layer.inner.parent = layer
    assert names_of([layer]) == {
        "layer0": (
            "w",
            "scalar",
            "inner.w",
            "rows.0",
            "rows.scale",
            "table.a.b",
            "table.3.0",
            "table.3.1.w",
            "space.w",
            "pair.0.w",
        )
    }


def test_units_are_named_as_asked_for_or_by_class_and_place():
    def layers():
        return [Layer(w=ones(2)), Layer(n=3), Layer(w=ones(2))]

    assert list(names_of(layers())) == ["layer0", "layer2"]
    assert list(names_of(layers(), names=["a", "b", "c"])) == ["a", "c"]
    assert list(names_of(Layer(w=ones(2)), names="alone")) == ["alone"]
    assert list(names_of(tuple(layers()), frozen="layer0.*")) == ["layer0", "layer2"]


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        ("mean", ("w", "inner.mean", "inner.w")),
        ("*mean", ("w", "inner.w")),
        ("layer0.inner.mean", ("w", "mean", "inner.w")),
        (["inner"], ("w", "mean")),
        (("inner.*", "mean"), ("w",)),
    ],
)
def test_what_is_ignored_stays(ignored, left):
    layer = Layer(w=ones(2), mean=ones(1), inner=Layer(mean=ones(1), w=ones(2)))
    assert names_of(layer, ignored=ignored)["layer0"] == left
    for name in {"mean", "inner.mean", "inner.w"} - set(left):
        *way, last = name.split(".")
        assert_array_equal(getattr(layer.inner if way else layer, last), 1)


def test_frozen_parameters_are_sharded_and_stay_as_they_are():
    def body(backend):
        layer = Layer(w=ones(5), v=ones(3))
        found = once(layer, backend, frozen=["v"])
        assert not hasattr(layer, "dv")
        assert not hasattr(layer, "v")
        return found

    for found in launch(body, 2):
        assert_array_equal(found["layer0.w"], 1 - X.size)
        assert_array_equal(found["layer0.v"], 1)


def test_deferred_parameters_are_made_by_the_engine():
    def body(backend):
        layer = Layer(w=fc.Spec(6, init=fc.initializers.constant(2.0)))
        found = once(layer, backend)["layer0.w"]
        assert_array_equal(found, 2 - X.size)
        sharded = fc.fully_shard(Layer(w=fc.Spec((2, 3))), backend)
        sharded.restore()
        return sharded.layers[0].w.shape

    assert launch(body, 2) == [(2, 3)] * 2


@dataclasses.dataclass
class Data:
    w: np.ndarray
    scale: float = 2.0

    def forward(self, x):
        return x * self.w * self.scale

    def backward(self, dy):
        self.dw = dy.sum(axis=0) * 0 + 1
        return dy


class Slots:
    __slots__ = ("dw", "unset", "w")

    def __init__(self):
        self.w = ones(4)

    def forward(self, x):
        return x * self.w

    def backward(self, dy):
        self.dw = dy.sum(axis=0) * 0 + 1
        return dy


class Both(Slots):
    """Slots, and a dict."""


class Defaults(Slots):
    """Attributes of the class have the names, too, and hide slots."""

    w = None
    dw = None

    def __init__(self):
        self.w = ones(4)


class Elsewhere(Slots):
    """Finds other names somewhere else."""

    __slots__ = ("__dict__",)

    def __getattr__(self, name):
        return f"another {name}"


class Called:
    """The forward pass is a call; names of its own."""

    def __init__(self):
        self.w = ones(4)

    def __call__(self, x):
        return x * self.w

    def pull(self, dy):
        self.dw = dy.sum(axis=0) * 0 + 1
        return dy


@pytest.mark.parametrize(
    "make",
    [lambda: Data(ones(4)), Slots, Both, Defaults, Elsewhere],
    ids=["dataclass", "slots", "slots and dict", "hidden slots", "getattr"],
)
def test_classes_of_all_kinds(make):
    def body(backend):
        layer = make()
        kind = type(layer)
        assert_array_equal(once(layer, backend, names="u")["u.w"], 0)
        assert isinstance(layer, kind)
        assert type(layer) is not kind
        for name in ("w", "dw"):
            with pytest.raises(AttributeError, match=r"u\.w"):
                getattr(layer, name)
        with pytest.raises(fc.StateError, match="cannot be assigned"):
            layer.w = ones(4)
        with pytest.raises(fc.StateError, match="cannot be assigned"):
            del layer.w
        if kind is Elsewhere:
            assert layer.anything == "another anything"

    launch(body, 2)


def test_methods_may_have_other_names():
    def body(backend):
        layer = Called()
        sharded = fc.fully_shard(
            layer, backend, methods=("__call__", "pull"), optimizer=fc.optim.SGD(lr=1.0)
        )
        with sharded.step() as step:
            layer.pull(layer(X))
            step.update()
        sharded.restore()
        return layer.w

    for found in launch(body, 2):
        assert_array_equal(found, 0)


# Where gradients are.


class InDicts(Layer):
    def named(self):
        return list(self.params.items())

    def backward(self, dy):
        self.grads = {name: np.full(p.shape, dy.sum(), F32) for name, p in self.named()}
        return dy


class AddsUp(Layer):
    """As those write it that call a zero_grad() before: in place."""

    def __init__(self):
        self.w, self.dw = ones(3), np.full(3, 7, F32)
        self.v, self.dv = ones(2), 0.0

    def named(self):
        return [("w", self.w), ("v", self.v)]

    def backward(self, dy):
        self.dw += dy.sum()
        self.dw[...] += 0
        self.dv += np.full(2, dy.sum(), F32)
        return dy


class Doubles(Layer):
    def backward(self, dy):
        self.dw = np.full(self.w.shape, dy.sum(), np.float64)
        return dy


class Attribute(Layer):
    def __init__(self):
        self.w = ones(3)

    def backward(self, dy):
        self.w_grad = np.full(3, dy.sum(), F32)
        return dy


class ByName(Attribute):
    def backward(self, dy):
        self.grads = {"w": np.full(3, dy.sum(), F32)}
        return dy


class Buffers(Layer):
    """Dicts of both, made in the beginning, written in place."""

    def __init__(self):
        self.params = {"w": ones(2, 2)}
        self.grads = {"w": np.zeros((2, 2), F32)}

    def named(self):
        return list(self.params.items())

    def backward(self, dy):
        np.copyto(self.grads["w"], dy.sum())
        return dy


@pytest.mark.parametrize(
    ("make", "grads"),
    [
        (lambda: Layer(w=ones(3), v=ones(2, 2)), "d{}"),
        (lambda: InDicts(params={"w": ones(3), "v": ones(2)}), "grads"),
        (AddsUp, "d{}"),
        (lambda: Doubles(w=ones(3)), "d{}"),
        (Attribute, "{}_grad"),
        (ByName, "grads"),
        (Buffers, "grads"),
        (Attribute, lambda layer, name: getattr(layer, f"{name}_grad")),
    ],
    ids=["new", "dicts", "in place", "doubles", "suffix", "by name", "buffers", "function"],
)
def test_gradients_are_found(make, grads):
    def body(backend):
        layer = make()
        found = once(layer, backend, grads=grads)
        arrays = [v for v in vars(layer).values() if isinstance(v, np.ndarray)]
        return found, len(arrays), dict(getattr(layer, "grads", {}))

    for found, arrays, left in launch(body, 3):
        assert found
        for name, array in found.items():
            assert_array_equal(array, 1 - X.size, err_msg=name)
        assert arrays == (1 if callable(grads) else 0)  # a function's are where it found them
        assert not any(isinstance(value, np.ndarray) for value in left.values())


def test_a_function_may_tell_that_there_is_no_gradient():
    def body(backend):
        layer = Layer(w=ones(3), v=ones(3))
        return once(layer, backend, grads=lambda layer, name: layer.dw if name == "w" else None)

    for found in launch(body, 2):
        assert_array_equal(found["layer0.v"], 1)
        assert_array_equal(found["layer0.w"], 1 - X.size)


def test_restored_layers_have_zeros_for_gradients_where_they_had_arrays():
    def body(backend):
        layer, other = AddsUp(), Buffers()
        sharded = fc.fully_shard([layer, Layer(w=ones(2))], backend)
        with pytest.raises(AttributeError, match=r"the gradient of addsup0\.w is there inside"):
            _ = layer.dw
        sharded.restore()
        assert_array_equal(layer.dw, 0)
        assert layer.dv == 0.0
        assert not hasattr(sharded.layers[1], "dw")
        sharded = fc.fully_shard(other, backend, grads="grads")
        with pytest.raises(
            AttributeError, match=r"the gradient of buffers0\.params\.w is there in"
        ):
            other.grads["w"] + 1
        sharded.restore()
        assert_array_equal(other.grads["w"], 0)
        assert_array_equal(other.params["w"], 1)

    launch(body, 2)


# Ties and layers of layers.


def test_the_same_array_in_two_layers_is_one_parameter():
    def body(backend):
        shared = ones(3)
        layers = [Layer(w=shared), Layer(w=shared, v=ones(2))]
        found = once(layers, backend)
        sharded = fc.fully_shard([Layer(w=shared), Layer(w=shared)], backend)
        sharded.restore()
        assert sharded.layers[0].w is sharded.layers[1].w
        return found

    for found in launch(body, 2):
        assert_array_equal(found["layer0.w"], 1 - 2 * X.size)
        assert_array_equal(found["layer1.w"], 1 - 2 * X.size)
        assert_array_equal(found["layer1.v"], 1 - X.size)


class Embedding:
    def __init__(self):
        self.w = np.random.default_rng(0).standard_normal((4, 3)).astype(F32)

    def forward(self, x):
        self.x = x
        return x @ self.w

    def backward(self, dy):
        self.dw = self.x.T @ dy
        return dy @ self.w.T


class Head:
    """Has the embedding, and uses its array."""

    def __init__(self, embedding):
        self.embedding = embedding
        self.b = np.zeros(4, F32)

    def forward(self, x):
        self.x = x
        return x @ self.embedding.w.T + self.b

    def backward(self, dy):
        self.embedding.dw = dy.T @ self.x
        self.db = dy.sum(axis=0)
        return dy @ self.embedding.w


def test_a_layer_that_refers_to_another_one_has_its_parameters_along():
    def body(backend):
        embedding = Embedding()
        return once([embedding, Head(embedding)], backend)

    embedding = Embedding()
    head = Head(embedding)
    w = embedding.w.astype(np.float64)
    y = head.forward(embedding.forward(X))
    dy = head.backward(np.ones_like(y))
    gradient = embedding.dw.copy()
    embedding.backward(dy)
    for found in launch(body, 2):
        assert list(found) == ["embedding0.w", "head1.embedding.w", "head1.b"]
        assert_allclose(found["embedding0.w"], w - gradient - embedding.dw, rtol=1e-5, atol=1e-5)
        assert_array_equal(found["head1.embedding.w"], found["embedding0.w"])


class Around:
    """Calls the passes of a layer that it has."""

    def __init__(self, inner):
        self.inner = inner
        self.w = ones(2)

    def forward(self, x):
        return self.inner.forward(x) * self.w.mean()

    def backward(self, dy):
        self.dw = np.full(2, dy.sum(), F32)
        return self.inner.backward(dy)


def test_a_layer_may_call_a_layer_that_it_has():
    def body(backend):
        inner = Layer(w=ones(3))
        found = once([inner, Around(inner)], backend)  # inner is called twice
        alone = Around(Layer(w=ones(3)))
        again = once([alone], backend)
        return found, again

    for found, again in launch(body, 2):
        assert_array_equal(found["layer0.w"], 1 - 2 * X.size)
        assert_array_equal(found["around1.w"], 1 - X.size)
        assert_array_equal(again["around0.inner.w"], 1 - X.size)


# What is refused.


def test_what_is_sharded_says_so():
    class Shown(Layer):
        def __repr__(self):
            return f"Shown({self.w.shape})"

    def body(backend):
        layer = Shown(w=ones(3, 2), table=[ones(2), {"v": ones(1)}])
        fc.fully_shard(layer, backend)
        assert repr(layer) == "<Shown 'shown0', sharded>"
        with pytest.raises(AttributeError, match=r"shown0\.w \(shape \(3, 2\), float32\) is shard"):
            _ = layer.w
        says = r"shown0\.table\.0 .* is sharded"
        first = layer.table[0]
        for use in (
            lambda: X[:, :2] + first,
            lambda: first + 1,
            lambda: X[:, :2] @ first,
            lambda: first @ X.T,
            lambda: np.asarray(first),
            lambda: first.shape,
            lambda: first[0],
            lambda: bool(first),
            lambda: len(first),
            lambda: -first,
        ):
            with pytest.raises(fc.StateError, match=says):
                use()
        assert "table.1.v" in repr(layer.table[1]["v"])
        with pytest.raises(fc.StateError, match=r"table.* cannot be assigned"):
            layer.table = []
        for refused in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(fc.StateError, match="cannot be copied or pickled"):
                refused(layer)

    launch(body, 2)


BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift"),
    *("and_", "or_", "xor", "lt", "le", "eq", "ne", "gt", "ge"),
)
UNARY = (
    *(operator.neg, operator.pos, operator.abs, operator.invert, operator.index, operator.not_),
    *(bool, int, float, complex, round, math.floor, math.ceil, math.trunc, len, list, reversed),
    *(np.asarray, np.exp, copy.copy, pickle.dumps),
)


def test_nothing_can_be_computed_with_what_stands_for_an_array():
    """Not even a wrong result, such as that it is equal to nothing."""
    first = Placeholder("u.w is sharded")
    numbers = [2, 2.5, X, X[0, 0], [1.0]]
    uses = {
        **{use.__name__: partial(use, first) for use in UNARY},
        **{
            f"{name} {turned} {type(other).__name__}": partial(
                getattr(operator, name), *((other, first) if turned else (first, other))
            )
            for name in BINARY
            for turned in (False, True)
            for other in numbers
        },
        **{
            f"i{name}": partial(getattr(operator, f"i{name.strip('_')}"), first, 2)
            for name in BINARY[:13]
        },
        "divmod": lambda: divmod(first, 2),
        "turned divmod": lambda: divmod(2, first),
        "call": lambda: first(X),
        "contains": lambda: 2 in first,
        "item": lambda: first[0],
        "item set": lambda: operator.setitem(first, 0, 1),
        "item removed": lambda: operator.delitem(first, 0),
        "attribute": lambda: first.shape,
        "attribute set": lambda: setattr(first, "shape", 3),
    }
    other_errors = {}
    for name, use in uses.items():
        try:
            other_errors[name] = use()
        except Exception as error:
            if not (isinstance(error, fc.StateError) and str(error) == "u.w is sharded"):
                other_errors[name] = error
    assert not other_errors
    assert repr(first) == f"{first}" == "<u.w is sharded>"
    assert first in [first]
    assert {first: 1}[first] == 1


class Keeps(Layer):
    def forward(self, x):
        self.cache = (x, {"w": self.w[1:]})
        return x


class KeepsIn(Layer):
    """Keeps a view in what ``hold`` makes of it."""

    def __init__(self, hold, **attributes):
        super().__init__(**attributes)
        self.hold = hold

    def forward(self, x):
        self.cache = [self.hold(self.w[1:])]
        return x


@pytest.mark.parametrize(
    "hold",
    [
        lambda view: SimpleNamespace(view=view),
        lambda view: deque([view]),
        lambda view: partial(np.dot, view),
        lambda view: partial(np.dot, b=view),
        lambda view: lambda x: x @ view,
        lambda view: lambda x, w=view: x @ w,
    ],
)
def test_views_of_parameters_are_seen_in_namespaces_queues_and_functions(hold):
    def body(backend):
        with pytest.raises(fc.StateError, match=r"kept parameter 'w'.* in attribute 'cache'"):
            once(KeepsIn(hold, w=ones(3)), backend, names="u")

    launch(body, 1)


class Replaces(Layer):
    def forward(self, x):
        self.w = self.w * 2
        return x


class ReplacesItem(Layer):
    def forward(self, x):
        self.table[0] = self.table[0] * 2
        return x


class Forgets(Layer):
    def backward(self, dy):
        return dy


class WrongShape(Layer):
    def backward(self, dy):
        self.dw = ones(2)
        return dy


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: Keeps(w=ones(3)), "forward of 'u' has kept parameter 'w'.* in attribute 'cache'"),
        (lambda: Replaces(w=ones(3)), r"u\.w cannot be assigned to: it is a sharded parameter"),
        (lambda: ReplacesItem(table=[ones(3)]), r"forward has replaced an array: u\.table\.0 can"),
        (lambda: Forgets(w=ones(3)), r"no gradient of 'w' in Forgets\.dw; grads= says where"),
        (lambda: Forgets(w=ones(3), dw=None), r"no gradient of 'w' in Forgets\.dw; grads= says"),
        (lambda: WrongShape(w=ones(3)), r"gradient of u\.w must have shape \(3,\)"),
    ],
)
def test_passes_that_cannot_be_right_are_refused(layer, message):
    def body(backend):
        made = layer()
        with pytest.raises((fc.StateError, fc.ArgumentError), match=message):
            once(made, backend, names="u")
        assert not any(isinstance(value, np.ndarray) for value in vars(made).values())

    launch(body, 2)


class Pair(NamedTuple):
    first: object
    second: object


class Rows(list):
    """A list of the user's own."""


CONTAINERS = {
    "none": lambda w: w,
    "tuple": lambda w: (w[:6], 1),
    "list": lambda w: [[w]],
    "dict": lambda w: {"w": w},
    "named tuple": lambda w: Pair(1, w.reshape(3, 3)),
    "list of its own class": lambda w: Rows([w, "label"]),
    "dict of its own class": lambda w: OrderedDict(a=w[::2], b=None),
    "mapping": lambda w: MappingProxyType({"w": w}),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_outputs_that_are_views_of_parameters_are_copied(make):
    """Their memory is soon another unit's."""

    class Shows(Layer):
        def forward(self, x):
            return make(self.w)

        def backward(self, dy):
            self.dw = ones(9)
            return make(self.w)

    def body(backend):
        layer = Shows(w=np.arange(9, dtype=F32))
        sharded = fc.fully_shard(layer, backend, optimizer=fc.optim.SGD(lr=1.0))
        with sharded.step() as step:
            found = layer.forward(X), layer.backward(X)
            step.update()
        return found

    expected = make(np.arange(9, dtype=F32))
    kind = dict if isinstance(expected, MappingProxyType) else type(expected)
    for forward, backward in launch(body, 2):
        for found in forward, backward:
            assert type(found) is kind
            for leaf, wanted in zip(leaves_of(found), leaves_of(expected), strict=True):
                assert_array_equal(leaf, wanted)
                if isinstance(leaf, np.ndarray):
                    assert leaf.flags.owndata
                    assert leaf.flags.writeable


def leaves_of(value):
    if not isinstance(value, (Mapping, tuple, list)):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value
    return [leaf for item in items for leaf in leaves_of(item)]


def test_outputs_that_hold_no_parameters_stay_the_same_objects():
    class Returns(Layer):
        def forward(self, x):
            return self.kept

    def body(backend):
        layer = Returns(w=ones(3))
        layer.kept = Rows([{"x": X}, Pair(None, 2)])
        sharded = fc.fully_shard(layer, backend, ignored="kept")
        with sharded.evaluation():
            assert layer.forward(X) is layer.kept

    launch(body, 1)


class Bare:
    def __init__(self):
        self.w = ones(2)


class Instance(Layer):
    def __init__(self):
        self.w = ones(2)
        self.forward = lambda x: x


class Registered(Layer):
    def __init_subclass__(cls):
        raise RuntimeError("no classes of this")


class Same(Layer):
    def __init__(self):
        self.a, self.b = {"w": ones(1)}, {"w": ones(2)}


BAD = {
    "nothing": (list, {}, "have no parameters"),
    "no arrays": (lambda: [Layer(n=3), np.ones(3)], {}, "have no parameters"),
    "another library": (
        lambda: Layer(below={"w": SimpleNamespace(__dlpack__=None)}),
        {},
        "have arrays of types, of which fully_shard knows nothing",
    ),
    "method": (lambda: Bare(), {}, "'bare0', a Bare, has no method 'forward'"),
    "method of the object": (Instance, {}, "'forward' as an attribute of the object"),
    "methods": (lambda: Layer(w=ones(1)), {"methods": ("forward",)}, "names of two methods"),
    "names": (lambda: Layer(w=ones(1)), {"names": ["a", "b"]}, "2 names for 1 layers"),
    "same names": (
        lambda: [Layer(w=ones(1)), Layer(w=ones(1))],
        {"names": ["a", "a"]},
        "two units are named 'a'",
    ),
    "ignored": (lambda: Layer(w=ones(1)), {"ignored": "x"}, "ignored='x' matches nothing .*0.w"),
    "frozen": (lambda: Layer(w=ones(1)), {"frozen": ["w", "v"]}, "frozen='v' matches nothing"),
    "tuple": (lambda: Layer(w=(ones(1), 2)), {}, r"w\.0 is an array in a tuple"),
    "matrix": (lambda: Layer(w=np.asmatrix(ones(2, 2))), {}, "w is a matrix, of which only"),
    "box": (lambda: Layer(w=fc.BoxShard((4,), (0,), ones(2))), {}, "tensor"),
    "grads": (lambda: Layer(w=ones(1)), {"grads": "d{}{}"}, "says not where gradients are"),
    "no grads": (lambda: Layer(w=ones(1)), {"grads": "{}"}, "says not where gradients are"),
    "same place": (Same, {"grads": "grads"}, r"u?0?\.?a\.w and .*b\.w would leave their gradients"),
    "same name": (
        lambda: Layer(t={"1": ones(1), 1: ones(1)}),
        {},
        "two parameters that would both be named 't.1'",
    ),
    "class": (lambda: Registered(w=ones(1)), {}, "cannot be taken out of its attributes: no class"),
    "dtypes": (lambda: Layer(w=ones(1), v=ones(1, dtype=float)), {}, "must share one dtype"),
    "options": (lambda: Layer(w=ones(1)), {"prefetch": -1}, "prefetch"),
}


@pytest.mark.parametrize(("make", "options", "message"), BAD.values(), ids=BAD)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_bad_input_is_refused_before_anything_is_changed(make, options, message):
    def body(backend):
        layers = make()
        with pytest.raises(fc.ArgumentError, match=message):
            fc.fully_shard(layers, backend, **options)
        for layer in layers if isinstance(layers, list) else [layers]:
            assert type(layer).__name__[:7] != "Sharded"
            assert getattr(layer, "w", None) is getattr(layer, "__dict__", {}).get("w")

    launch(body, 1)


def test_layers_are_sharded_once():
    def body(backend):
        layer = Layer(w=ones(3))
        fc.fully_shard(layer, backend, names="first")
        with pytest.raises(fc.ArgumentError, match=r"it is sharded already, in 'first'; call rest"):
            fc.fully_shard(layer, backend)
        with pytest.raises(fc.ArgumentError, match=r"inner is sharded already, in 'first'"):
            fc.fully_shard(Layer(w=ones(1), inner=layer), backend)
        found = fc.fully_shard(Layer(w=ones(1), inner=layer), backend, ignored="inner")
        return found.engine.units[0].names

    assert launch(body, 2) == [("w",)] * 2


def test_ranks_that_are_threads_have_layers_of_their_own():
    layer = Layer(w=ones(3))
    assert "each rank" in str(cause_of(lambda backend: fc.fully_shard(layer, backend), 2)).lower()


def test_different_layers_on_different_ranks_are_a_mismatch():
    def body(backend):
        layer = Layer(w=np.full(3, backend.rank, F32))
        with pytest.raises(fc.MismatchError, match="unit 'layer0' differs"):
            fc.fully_shard(layer, backend)
        return layer.w[0]

    assert launch(body, 2) == [0, 1]


class Then(Layer):
    """Does something else in its forward pass."""

    def forward(self, x):
        self.then(x)
        return x


def test_passes_in_an_order_that_the_engine_does_not_know_are_refused():
    def body(backend):
        layer, other = Then(w=ones(3)), Layer(w=ones(3))
        sharded = fc.fully_shard([layer, other], backend, optimizer=fc.optim.SGD(lr=1.0))
        with sharded.step() as step:
            with pytest.raises(fc.StateError, match="without a forward pass"):
                layer.backward(X)
            layer.then = other.forward
            with pytest.raises(fc.StateError, match="inside the context of unit 'then0'"):
                layer.forward(X)
            layer.then = lambda x: layer.backward(x)
            with pytest.raises(fc.StateError, match="backward of 'then0' inside of a forward pass"):
                layer.forward(X)
            layer.then = lambda x: sharded.restore()
            with pytest.raises(fc.StateError, match=r"restore\(\) inside of a forward pass"):
                layer.forward(X)
            layer.then = lambda x: None
            layer.backward(layer.forward(X))
            step.update()

    launch(body, 1)


class Shift:
    def __init__(self):
        self.w, self.dw = ones(4), ones(4)

    def forward(self, x):
        return x + self.w

    def backward(self, dy):
        self.dw += dy.sum(axis=0)
        return dy


def trained_on_its_device(backend):
    embedding = Embedding()
    layers, xp = [embedding, Head(embedding), Shift()], backend.device.xp
    found = once(layers, backend, xp.asarray(X))
    kind = type(xp.asarray(X))
    sharded = fc.fully_shard(Positions(w=ones(9)), backend)
    y = sharded.layers[0].forward(xp.asarray(X))
    assert isinstance(y, kind)
    sharded.restore()
    assert isinstance(sharded.layers[0].w, np.ndarray)
    return {name: backend.device.to_host(array) for name, array in found.items()}


class Positions(Layer):
    def forward(self, x):
        return self.w[: len(x)]


def test_on_a_gpu_layers_find_arrays_of_it():
    expected = launch(trained_on_its_device, 2)
    for found, wanted in zip(nccl_ranks.results(trained_on_its_device, 2), expected, strict=True):
        assert list(found) == list(wanted)
        for name in found:
            assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)
