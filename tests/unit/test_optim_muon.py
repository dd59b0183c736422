"""Muon: which rank owns which matrix, and what is refused. Its steps: properties/."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.fsdp_steps import launch
from support.fsdp_steps import one_pass as train_pass
from support.optimizers import muon_reference

import fsdpcore as fc
from fsdpcore.core.errors import ArgumentError, ConfigError, UnsupportedError
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.optim import AdamW, Muon, PieceSpec, ShardPiece
from fsdpcore.fsdp.units.owners import Dealing


def never(array: NDArray[Any]) -> None:
    raise AssertionError("Muon sums nothing")


def stepped(optimizer: Muon, param: NDArray[Any], grads: NDArray[Any]) -> NDArray[Any]:
    """All steps on one rank."""
    flat = param.reshape(-1).copy()
    spec = PieceSpec("u.w", param.shape, 0, param.size)
    (state,) = optimizer.init_pieces([spec], param.dtype).values()
    for step, grad in enumerate(grads, start=1):
        piece = ShardPiece("u.w", param.shape, 0, param.size, flat, grad.reshape(-1), state)
        optimizer.update_pieces([piece], step=step, reduce=never)
    return flat.reshape(param.shape)


def drawn(*shape: int) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(0)
    return rng.normal(size=shape), rng.normal(size=(2, *shape))


@pytest.mark.parametrize("shape", [(40, 3300), (3300, 40), (1, 3), (4, 0)])
def test_steps_of_large_matrices_are_those_on_singular_values(shape: tuple[int, int]) -> None:
    param, grads = drawn(*shape)  # larger than a block
    result = stepped(Muon(0.1), param, grads)
    if param.size:
        param, _ = muon_reference(Muon(0.1), param, list(grads), [0.1] * len(grads))
    np.testing.assert_allclose(result, param, 1e-9, 1e-11)


def test_zero_gradients_only_decay() -> None:
    param, grads = drawn(3, 4)
    result = stepped(Muon(0.1, weight_decay=0.5), param, 0 * grads)
    np.testing.assert_allclose(result, param * 0.95**2, 1e-14)


@pytest.mark.parametrize("adjusted", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(6, 9), (30, 8)])
def test_torch_takes_the_same_steps(shape: tuple[int, int], adjusted: str) -> None:
    torch = pytest.importorskip("torch")
    param, grads = drawn(*shape)
    optimizer = Muon(0.02, adjust_lr_fn=adjusted)
    options = {f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer)}
    theirs = torch.nn.Parameter(torch.tensor(param))
    policy = torch.optim.Muon([theirs], **options)
    for grad in grads:
        theirs.grad = torch.tensor(grad)
        policy.step()
    change = np.linalg.norm(theirs.detach().numpy() - param)
    off = np.linalg.norm(theirs.detach().numpy() - stepped(optimizer, param, grads))
    assert off < 0.02 * change  # theirs is computed in bfloat16


def test_owners_have_alike_much_to_do_and_exchange_little() -> None:
    shapes = {"q": (64, 64), "k": (64, 64), "up": (64, 256), "down": (256, 64), "o": (64, 64)}
    layout = FlatLayout.build({**shapes, "b": 7}, np.float32, 4)
    specs = [PieceSpec(name, shape, 0, 0) for name, shape in shapes.items()]
    loads = [0] * 4
    dealing = Dealing.of(layout, specs, loads)
    assert dealing.owners == (2, 3, 0, 1, 2)  # up and down cost 4, the others 1
    assert [load // 64**3 for load in loads] == [4, 4, 2, 1]
    assert Dealing.of(layout, specs, loads).owners == (0, 1, 3, 2, 0)  # of the next unit
    assert [load // 64**3 for load in loads] == [6, 5, 6, 5]
    assert sum(map(sum, dealing.sizes)) == sum(a * b for a, b in shapes.values())
    for rank in range(4):
        for other in range(4):
            assert dealing.given(rank)[other] == dealing.owned(other)[rank]
    sent = [sum(size for _, size in dealing.exchanges(rank)) for rank in range(4)]
    every = sum(map(sum, dealing.sizes))
    assert sum(sent) <= 2 * every  # having all everywhere would be 3 times all
    assert Dealing.of(dataclasses.replace(layout, world_size=1), specs, [0]).exchanges(0) == []


class Failing(Muon):
    """Fails on all ranks in the middle of an update, once it is told to."""

    failing = False

    def _apply(self, piece: ShardPiece, direction: NDArray[Any], rate: float) -> None:
        if Failing.failing and piece.name == "1":
            raise RuntimeError("half way")
        super()._apply(piece, direction, rate)


def test_units_of_one_matrix_are_dealt_out_and_a_failure_leaves_nothing_behind() -> None:
    def step(engine: fc.FSDP) -> None:
        with engine.step() as step:
            train_pass(step, engine.units)
            step.update()

    def body(backend: fc.Backend) -> bytes:
        units = [fc.Unit(f"u{i}", {str(i): np.full((4, 3), 1.0 + i)}) for i in range(6)]
        engine = fc.FSDP(units, backend, optimizer=Failing(0.1), window=False)
        owned = [
            ranks._dealing.owners  # type: ignore[union-attr]
            for unit in engine._model.units
            for ranks in unit.updater._owning.values()  # type: ignore[union-attr]
        ]
        assert owned == [(0,), (1,), (2,), (0,), (1,), (2,)]
        before = engine.state_dict(full=True)
        fc.all_reduce(1, backend)
        Failing.failing = True
        with pytest.raises(RuntimeError, match="half way"):
            step(engine)
        assert engine.held().buffers == 0
        assert engine.partially_updated
        fc.all_reduce(1, backend)
        Failing.failing = False
        engine.load_state_dict(before)
        step(engine)
        return engine.state_dict(full=True)["u5.5"].tobytes()  # type: ignore[union-attr]

    assert len(set(launch(body, 3))) == 1


def test_only_matrices_are_taken_and_advice_is_given() -> None:
    def body(backend: fc.Backend) -> None:
        units = [fc.Unit("u", {"w": np.ones((3, 2)), "b": np.ones(2)})]
        with pytest.raises(ArgumentError, match=r'u\.b has the shape \(2,\);.*"\*": AdamW\(lr='):
            fc.FSDP(units, backend, optimizer=Muon())
        units = [fc.Unit("u", {"w": np.ones((3, 2)), "b": np.ones(2)})]
        fc.FSDP(units, backend, optimizer={"*.w": Muon(), "*": AdamW()})
        units = [fc.Unit("u", {"w": np.ones((3, 2)), "b": np.ones(2)}, frozen="b")]
        fc.FSDP(units, backend, optimizer=Muon())

    launch(body, 2)
    cut = ShardPiece("w", (2, 3), 0, 4, np.ones(4), np.ones(4), {"momentum_buffer": np.zeros(4)})
    with pytest.raises(UnsupportedError, match="'w' is cut over ranks"):
        Muon().update_pieces([cut], step=1, reduce=never)
    with pytest.raises(UnsupportedError, match="use init_pieces"):
        Muon().init_state(3, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "lr of Muon must be at least 0"),
        ({"momentum": 1.0}, "momentum of Muon must be below 1"),
        ({"nesterov": 1}, "nesterov of Muon must be True or False"),
        ({"weight_decay": -0.1}, "weight_decay of Muon must be at least 0"),
        ({"eps": 0.0}, "eps of Muon must be above 0"),
        ({"ns_steps": 0}, "ns_steps of Muon must be from 1 to 99, got 0"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients of Muon must be three numbers"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn of Muon must be one of 'original', 'match_rms"),
    ],
)
def test_hyper_parameters_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Muon(**change)


def test_a_rate_that_is_given_to_update_counts_for_owners_too() -> None:
    def body(backend: fc.Backend, own: float, given: float | None) -> bytes:
        units = [fc.Unit(f"u{i}", {"w": np.full((4, 3), 1.0 + i)}) for i in range(3)]
        engine = fc.FSDP(units, backend, optimizer=fc.optim.Muon(own), window=False)
        with engine.step() as step:
            for unit in units:
                with step.forward(unit):
                    pass
            for unit in reversed(units):
                with step.backward(unit) as (_, grads):
                    grads["w"] = np.arange(12.0).reshape(4, 3)
            step.update(lr=given)
        arrays = engine.state_dict(full=True, optimizer=False).arrays
        return b"".join(array.tobytes() for array in arrays.values())

    assert launch(body, 2, args=(0.5, 0.1)) == launch(body, 2, args=(0.1, None))
