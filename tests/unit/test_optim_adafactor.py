"""Adafactor against whole arrays in float64, and sharded against unsharded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from support.rank_sums import Sum, run_ranks

from fsdpcore.core.errors import ArgumentError, ConfigError, UnsupportedError
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.optim import (
    Adafactor,
    PieceSpec,
    ShardPiece,
    schedules,
    whole_parameter_specs,
)
from fsdpcore.fsdp.optim.moments import BLOCK
from fsdpcore.fsdp.optim.pieces import AnyOrder

Array = NDArray[Any]
Model = dict[str, Array]

POLICIES = [
    Adafactor(),
    Adafactor(0.05, scale_parameter=False, clip_threshold=None),
    Adafactor(0.05, scale_parameter=False, beta1=0.9, weight_decay=0.1),
    Adafactor(schedules.Linear(0.1, 1, 9), clip_threshold=0.3, decay_rate=0.5, eps=(1e-12, 0.5)),
    Adafactor(beta1=0.5, weight_decay=0.2),
]
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "matrix": (3, 5),
    "bias": (7,),
    "row": (1, 9),
    "one": (1,),
    "column": (9, 1),
    "kernel": (4, 3, 2, 3),
    "empty": (0, 3),
    "batch": (5, 1, 2),
}
LARGE: dict[str, tuple[int, ...]] = {
    "rows": (130, 700),
    "wide": (2, BLOCK + 77),
    "long": (BLOCK + 77,),
    "batches": (700, 11, 13),
}


class Reference:
    """The formulas of the docstring on whole arrays."""

    def __init__(self, policy: Adafactor, model: Mapping[str, Array]) -> None:
        self.policy = policy
        self.model = {name: array.astype(np.float64) for name, array in model.items()}
        self.row: Model = {}
        self.column: Model = {}
        self.mean: Model = {name: np.zeros(array.shape) for name, array in self.model.items()}

    def step(self, grads: Mapping[str, Array], t: int, rate: float) -> None:
        o = self.policy
        beta2 = 1 - t**-o.decay_rate
        for name, p in self.model.items():
            if p.size == 0:
                continue
            g = grads[name].astype(np.float64)
            v = g**2 + o.eps[0]
            if p.ndim < 2:
                r = self.row[name] = beta2 * self.row.get(name, 0) + (1 - beta2) * v
                u = g / np.sqrt(r)
            else:
                r = beta2 * self.row.get(name, 0) + (1 - beta2) * v.mean(-1)
                c = beta2 * self.column.get(name, 0) + (1 - beta2) * v.mean(-2)
                self.row[name], self.column[name] = r, c
                outer = np.einsum("...r,...c->...rc", r, c)
                u = g / np.sqrt(outer / r.mean(-1)[..., None, None])
            if o.clip_threshold is not None:
                u = u / max(1, self._rms(u) / o.clip_threshold)
            u = u * rate
            if o.scale_parameter:
                u = u * max(o.eps[1], self._rms(p))
            if o.beta1 is not None:
                u = self.mean[name] = o.beta1 * self.mean[name] + (1 - o.beta1) * u
            self.model[name] = p * (1 - rate * o.weight_decay) - u

    @staticmethod
    def _rms(x: Array) -> float:
        return math.sqrt((x**2).sum() / x.size)


class Sharded:
    """A model cut into equal shards, whose ranks run one after the other.

    With ``exact`` the sums are to be the same bits in any order.
    """

    def __init__(
        self, policy: Adafactor, model: Model, world_size: int, *, exact: bool = False
    ) -> None:
        self.policy, self.exact = policy, exact
        dtype = next(iter(model.values())).dtype
        shapes = {name: array.shape for name, array in model.items()}
        self.layout = FlatLayout.build(shapes, dtype, world_size)
        self.specs: list[list[PieceSpec]] = []
        for rank in range(world_size):
            ((found, specs),) = whole_parameter_specs(
                self.layout, rank, dict.fromkeys(model, policy)
            ).items()
            assert found == policy
            self.specs.append(specs)
        self.shards = [self._cut(model, specs) for specs in self.specs]
        self.states = [policy.init_pieces(specs, dtype) for specs in self.specs]
        self.outs: list[Model] = [{} for _ in self.specs]

    def step(self, grads: Model, step: int, *, narrow: Any = None, **options: Any) -> int:
        """Take a step; return how many sums it took."""
        results: list[Any] = [None] * len(self.specs)

        def program(rank: int) -> Callable[[Sum], None]:
            def run(add: Sum) -> None:
                shard = {name: array.copy() for name, array in self.shards[rank].items()}
                state = {
                    name: {key: array.copy() for key, array in arrays.items()}
                    for name, arrays in self.states[rank].items()
                }
                grad = self._cut(grads, self.specs[rank])
                outs = {n: np.zeros(a.size, narrow) for n, a in shard.items()} if narrow else {}
                pieces = [
                    ShardPiece(
                        spec.name,
                        spec.shape,
                        spec.start,
                        spec.stop,
                        shard[spec.name],
                        grad[spec.name],
                        state[spec.name],
                        outs.get(spec.name),
                    )
                    for spec in self.specs[rank]
                ]
                exact = AnyOrder(add, functools.partial(add, join=np.maximum))
                reduce = exact if self.exact else add
                self.policy.update_pieces(pieces, step=step, reduce=reduce, **options)
                results[rank] = shard, state, outs

            return run

        sums = run_ranks([program(rank) for rank in range(len(self.specs))])
        for rank, (shard, state, outs) in enumerate(results):
            self.shards[rank], self.states[rank], self.outs[rank] = shard, state, outs
        return sums

    def model(self) -> Model:
        return self._joined(self.shards)

    def out(self) -> Model:
        return self._joined(self.outs)

    def _joined(self, shards: list[Model]) -> Model:
        return {
            param.name: np.concatenate([shard[param.name] for shard in shards]).reshape(param.shape)
            for param in self.layout.params
        }

    @staticmethod
    def _cut(model: Mapping[str, Array], specs: list[PieceSpec]) -> Model:
        return {s.name: model[s.name].reshape(-1)[s.start : s.stop].copy() for s in specs}


def random_model(shapes: Mapping[str, tuple[int, ...]], dtype: Any, seed: int = 0) -> Model:
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(rng.standard_normal(shape) * rng.choice([0.01, 1.0, 3.0])).astype(dtype)
        for name, shape in shapes.items()
    }


def assert_close(found: Model, expected: Model, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], tolerance, tolerance, err_msg=name)


TOLERANCE = {np.float64: 1e-12, np.float32: 3e-6}


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize(
    ("world_size", "dtype"), [*((size, np.float64) for size in range(1, 6)), (3, np.float32)]
)
def test_sharded_update_matches_the_formulas(
    policy: Adafactor, world_size: int, dtype: Any
) -> None:
    model = random_model(SHAPES, dtype)
    reference, sharded = Reference(policy, model), Sharded(policy, model, world_size)
    for step in range(1, 5):
        grads = random_model(SHAPES, dtype, seed=step)
        reference.step(grads, step, policy.learning_rate(step))
        sharded.step(grads, step)
        assert_close(sharded.model(), reference.model, TOLERANCE[dtype])


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[2]], ids=repr)
def test_parameters_larger_than_a_block(policy: Adafactor) -> None:
    model = random_model(LARGE, np.float64)
    reference, sharded = Reference(policy, model), Sharded(policy, model, 3)
    for step in range(1, 3):
        grads = random_model(LARGE, np.float64, seed=step)
        reference.step(grads, step, policy.learning_rate(step))
        sharded.step(grads, step)
    assert_close(sharded.model(), reference.model, 1e-11)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_rank_has_the_same_factors_and_needs_few_sums(policy: Adafactor) -> None:
    model = random_model(SHAPES, np.float32)
    sharded = Sharded(policy, model, 4)
    for step in range(1, 4):
        sums = sharded.step(random_model(SHAPES, np.float32, seed=step), step)
        assert sums == (1 if policy.clip_threshold is None else 2)
    for name in SHAPES:
        for key in {"row_var", "col_var"} & set(sharded.states[0][name]):
            bits = {states[name][key].tobytes() for states in sharded.states}
            assert len(bits) == 1


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_exact_sums_are_the_formulas_and_the_same_bits_on_any_ranks(policy: Adafactor) -> None:
    shapes = {**SHAPES, "rows": (70, 1000)}
    model = random_model(shapes, np.float64)  # in which the last bits of a sum are seen
    found = [Sharded(policy, model, ranks, exact=True) for ranks in (1, 2, 3, 5)]
    reference = Reference(policy, model)
    for step in range(1, 3):
        # Rows of very different sizes, beside which small ones must not vanish.
        grads = random_model(shapes, np.float64, seed=step)
        rng = np.random.default_rng(step)
        grads["rows"] *= 10.0 ** rng.uniform(-12, 4, (70, 1))
        grads["rows"][0, 0] = 1e7
        reference.step(grads, step, policy.learning_rate(step))
        sums = {each.step(grads, step) for each in found}
    assert_close(found[0].model(), reference.model, 1e-9)
    factors = [each.states[0]["rows"] for each in found]
    for each, state in zip(found[1:], factors[1:], strict=True):
        for name, array in each.model().items():
            assert array.tobytes() == found[0].model()[name].tobytes(), name
        for key in ("row_var", "col_var"):
            assert state[key].tobytes() == factors[0][key].tobytes()
    assert sums == {2 if policy.clip_threshold is None else 4}


def test_more_ranks_than_elements() -> None:
    model = random_model({"matrix": (1, 2)}, np.float64)
    policy = Adafactor(beta1=0.9)
    reference, sharded = Reference(policy, model), Sharded(policy, model, 5)
    for step in range(1, 4):
        grads = random_model({"matrix": (1, 2)}, np.float64, seed=step)
        reference.step(grads, step, policy.learning_rate(step))
        assert sharded.step(grads, step) == 2
    assert_close(sharded.model(), reference.model, 1e-12)


@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16])
def test_narrow_gradients_scale_and_rounded_copy(narrow: Any) -> None:
    model = random_model(SHAPES, np.float32)
    policy = Adafactor(0.05)
    reference, sharded = Reference(policy, model), Sharded(policy, model, 3)
    for step in range(1, 4):
        grads = {n: g.astype(narrow) for n, g in random_model(SHAPES, "f4", seed=step).items()}
        reference.step({n: g.astype(np.float64) / 4 for n, g in grads.items()}, step, 0.05)
        sharded.step(grads, step, narrow=narrow, grad_scale=0.25)
    assert_close(sharded.model(), reference.model, 3e-6)
    for name, array in sharded.out().items():
        assert array.tobytes() == sharded.model()[name].astype(narrow).tobytes()


def test_lr_of_the_step_replaces_the_relative_step() -> None:
    model = random_model(SHAPES, np.float64)
    reference, sharded = Reference(Adafactor(), model), Sharded(Adafactor(), model, 2)
    grads = random_model(SHAPES, np.float64, seed=1)
    reference.step(grads, 1, 0.25)
    sharded.step(grads, 1, lr=0.25)
    assert_close(sharded.model(), reference.model, 1e-12)


def test_relative_step_is_the_papers() -> None:
    rates = [Adafactor().learning_rate(step) for step in (1, 10_000, 40_000)]
    assert rates == pytest.approx([0.01, 0.01, 0.005])


def test_zero_gradients_change_nothing() -> None:
    model = random_model(SHAPES, np.float32)
    zeros = {name: np.zeros_like(array) for name, array in model.items()}
    sharded = Sharded(Adafactor(), model, 2)
    for step in range(1, 4):
        sharded.step(zeros, step)
    for name, array in sharded.model().items():
        np.testing.assert_array_equal(array, model[name])


# State


def test_state_is_sublinear_in_matrices() -> None:
    policy = Adafactor(beta1=0.9)
    assert policy.state_shapes((30, 50)) == {
        "row_var": (30,),
        "col_var": (50,),
        "exp_avg": (30, 50),
    }
    assert Adafactor().state_shapes((4, 3, 2, 5)) == {"row_var": (4, 3, 2), "col_var": (4, 3, 5)}
    assert Adafactor().state_shapes((7,)) == {"variance": (7,)}
    assert Adafactor().state_shapes(()) == {"variance": ()}
    assert Adafactor().state_shapes((0, 3)) == {"variance": (0, 3)}


def test_factors_are_whole_and_the_rest_is_sharded() -> None:
    specs = [PieceSpec("a", (3, 5), 4, 9), PieceSpec("b", (7,), 0, 2), PieceSpec("c", (2, 2), 0, 0)]
    states = Adafactor(beta1=0.9).init_pieces(specs, np.float32)
    sizes = {
        name: {key: array.size for key, array in state.items()} for name, state in states.items()
    }
    assert sizes == {
        "a": {"row_var": 3, "col_var": 5, "exp_avg": 5},
        "b": {"variance": 2, "exp_avg": 2},
        "c": {"row_var": 2, "col_var": 2, "exp_avg": 0},
    }
    for state in states.values():
        for array in state.values():
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, 0)
    with pytest.raises(ArgumentError, match="must be float32 or float64"):
        Adafactor().init_pieces(specs, np.float16)


# Errors


def never(array: Array) -> None:
    raise AssertionError("nothing may be summed before the arguments were checked")


def piece(**change: Any) -> ShardPiece:
    arguments: dict[str, Any] = {
        "name": "w",
        "shape": (2, 3),
        "start": 1,
        "stop": 5,
        "param": np.ones(4, np.float32),
        "grad": np.ones(4, np.float32),
        "state": {"row_var": np.zeros(2, np.float32), "col_var": np.zeros(3, np.float32)},
    }
    return ShardPiece(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop": 7}, r"'w' is \[1, 7\), but a parameter of shape \(2, 3\) has 6 elements"),
        ({"stop": 4}, r"'w' needs the 3 elements of \[1, 4\) as param, got \(4,\)"),
        ({"grad": np.ones(3, np.float32)}, "'w': grad has 3 elements"),
        ({"state": {}}, r"parameter 'w', needs the state arrays \['col_var', 'row_var'\], got"),
        (
            {"state": {"row_var": np.zeros(2, "f4"), "col_var": np.zeros(2, "f4")}},
            r"'w': state\['col_var'\] has 2 elements",
        ),
        ({"out": np.ones(4)}, "'w': out has 4 elements of float64"),
    ],
)
def test_bad_pieces_are_refused_before_anything_is_summed(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        Adafactor().update_pieces([piece(), piece(**change)], step=1, reduce=never)


@pytest.mark.parametrize("options", [{"step": 0}, {"lr": -1.0}, {"grad_scale": math.inf}])
def test_bad_numbers_are_refused_before_anything_is_summed(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Adafactor().update_pieces([piece()], **{"step": 1, "reduce": never} | options)


def test_nothing_is_summed_for_no_parameters() -> None:
    Adafactor().update_pieces([], step=1, reduce=never)


def test_it_is_not_elementwise() -> None:
    assert not Adafactor.elementwise
    with pytest.raises(UnsupportedError, match="use init_pieces"):
        Adafactor().init_state(3, np.float32)
    with pytest.raises(UnsupportedError, match="use update_pieces"):
        Adafactor().update(np.ones(3), np.ones(3), {}, step=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "lr of Adafactor must be at least 0"),
        ({"eps": 1e-30}, "eps of Adafactor must be two numbers"),
        ({"eps": (0.0, 1e-3)}, r"eps\[0\] of Adafactor must be at least 1e-37"),
        ({"eps": (1e-30, -1.0)}, r"eps\[1\] of Adafactor must be at least 0"),
        ({"clip_threshold": 0.0}, "clip_threshold of Adafactor must be above 0"),
        ({"decay_rate": 0.0}, "decay_rate of Adafactor must be above 0"),
        ({"beta1": 1.0}, "beta1 of Adafactor must be below 1"),
        ({"scale_parameter": 1}, "scale_parameter of Adafactor must be True or False"),
        ({"weight_decay": -0.1}, "weight_decay of Adafactor must be at least 0"),
    ],
)
def test_hyper_parameters_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Adafactor(**change)
