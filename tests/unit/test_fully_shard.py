"""Layers with arrays in attributes: trained sharded as their own plain loop trains them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import plain_layers
from support.fsdp_steps import STRATEGIES, by_strategy, is_clean, launch, strategies_in_turn

import fsdpcore as fc

STEPS = 20
FEW = 6  # where it is the way there that differs, not the numbers
ROUNDING = {"rtol": 2e-5, "atol": 2e-6}


@functools.cache
def expected(steps=STEPS):
    layers = plain_layers.model()
    losses = plain_layers.plain(layers, steps)
    return losses, plain_layers.values(layers)


def sgd():
    return fc.optim.SGD(lr=plain_layers.LR, momentum=plain_layers.MOMENTUM)


def rows_of(backend):
    return np.array_split(np.arange(plain_layers.BATCH), backend.world_size)[backend.rank]


def steps_of(sharded, backend, numbers):
    """Train on this rank's rows; the losses of all rows."""
    rows, losses = rows_of(backend), []
    for number in numbers:
        x, wanted = plain_layers.batch(number)
        with sharded.step(divisor=plain_layers.BATCH) as step:
            loss, _ = plain_layers.run(sharded.layers, x[rows], wanted[rows])
            step.update()
        losses.append(float(fc.all_reduce(np.float64(loss), backend)))
    return losses


def train(backend, steps=STEPS, **options):
    layers = plain_layers.model()
    sharded = fc.fully_shard(layers, backend, optimizer=sgd(), **options)
    losses = steps_of(sharded, backend, range(steps))
    assert is_clean(sharded.engine)
    with sharded.engine.full_params() as whole:
        return losses, {name: array.copy() for name, array in whole.items()}


def assert_as_plain(results, steps=STEPS):
    losses, params = expected(steps)
    for found_losses, found in results:
        assert_allclose(found_losses, losses, **ROUNDING)
        assert list(found) == [name for name in found if name in params]
        assert set(found) == set(params)
        for name in params:
            assert_allclose(found[name], params[name], **ROUNDING, err_msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_is_that_of_the_plain_loop_on_any_number_of_ranks(world_size):
    assert_as_plain(launch(train, world_size))


@strategies_in_turn(1)
def test_training_is_that_of_the_plain_loop_with_every_strategy(strategy, window):
    options = {"strategy": strategy, "window": window, "prefetch": 2}
    assert_as_plain(launch(lambda backend: train(backend, FEW, **options)), FEW)


class Square:
    def __init__(self, rng):
        self.w = rng.standard_normal((10, 10)).astype(np.float32)

    def forward(self, x):
        self.x = x
        return np.tanh(x @ self.w)

    def backward(self, dy):
        self.dw = self.x.T @ dy
        return dy @ self.w.T


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_so_many_units_are_gathered_as_the_engine_is_told(depth):
    def body(backend):
        rng = np.random.default_rng(0)
        layers = [Square(rng) for _ in range(5)]
        prefetch = fc.Prefetch(depth, reductions=0)
        sharded = fc.fully_shard(layers, backend, optimizer=sgd(), window=False, prefetch=prefetch)
        x = np.ones((2, 10), np.float32)
        with sharded.evaluation():
            for layer in layers:
                x = layer.forward(x)
        forward = sharded.engine.gathered_peak
        with sharded.step() as step:
            plain_layers.run(layers, x, x)
            step.update()
        whole, held = sharded.engine.gathered_peak, sharded.engine.held().parameters
        return forward, whole, sharded.engine.plan().peak_live_bytes, held

    for forward, whole, planned, held in launch(body, 2):
        assert forward == (depth + 1) * 400
        assert whole == planned == (depth + 2) * 400  # and the gradients of one unit
        assert held == 5 * 200


def test_layers_hold_nothing_between_passes():
    def body(backend):
        layers = plain_layers.model()
        arrays = [layers[0].w, layers[2].more[0].w, layers[2].scales[1], layers[2].table["shift"]]
        shapes = [array.shape for array in arrays]
        del arrays
        fc.fully_shard(layers, backend, optimizer=sgd())
        found = [
            value
            for layer in (*layers, layers[2].up, layers[2].more[0])
            for value in (*vars(layer).values(), *getattr(layer, "scales", ()))
            if isinstance(value, np.ndarray) and value.dtype == np.float32
        ]
        return shapes, found

    for shapes, found in launch(body, 2):
        assert len(shapes) == 4
        assert found == []


def test_what_is_no_parameter_stays():
    def body(backend):
        layers = plain_layers.model()
        sharded = fc.fully_shard(layers, backend, optimizer=sgd())
        steps_of(sharded, backend, range(2))
        residual = layers[2]
        assert residual.seen.tolist() == [0, 1, 2]
        assert residual.me is residual
        assert residual.table["name"] == "residual"
        assert type(residual.act) is plain_layers.Tanh
        assert type(layers[1]) is plain_layers.Tanh
        return layers[0].calls, isinstance(layers[0], plain_layers.Dense)

    assert launch(body, 2) == [(2, True)] * 2


def test_layers_get_their_arrays_and_their_class_back():
    params = expected()[1]

    def body(backend):
        layers = plain_layers.model()
        sharded = fc.fully_shard(layers, backend, optimizer=sgd(), strategy="shard_grad_op")
        steps_of(sharded, backend, range(STEPS))
        sharded.restore()
        assert [type(layer).__name__ for layer in layers] == ["Dense", "Tanh", "Residual", "Dense"]
        with pytest.raises(fc.StateError, match="after restore"):
            sharded.step()
        with pytest.raises(fc.StateError, match="after restore"):
            sharded.restore()
        assert not hasattr(layers[0], "dw")
        # They are as they were before, and can be trained, or sharded again.
        plain_layers.run(layers, *plain_layers.batch(STEPS))
        found = plain_layers.values(layers)
        layers[0].w -= 1
        kept = ["x", "y", "*.x", "*.y", "inputs", "inner"]  # by the passes before
        again = fc.fully_shard(layers, backend, optimizer=sgd(), ignored=kept)
        steps_of(again, backend, [0])
        return found

    for found in launch(body, 3):
        for name in params:
            assert_allclose(found[name], params[name], **ROUNDING, err_msg=name)


def test_sharding_again_finds_the_same_parameters_and_no_gradients():
    def body(backend):
        layers = plain_layers.model()
        plain_layers.run(layers, *plain_layers.batch(0))  # leaves gradients, x and inputs
        patterns = ["*x", "*.y", "inputs", "inner", "y"]
        return [
            unit.names for unit in fc.fully_shard(layers, backend, ignored=patterns).engine.units
        ]

    dense = ("w", "b")
    residual = ("up.w", "up.b", "more.0.w", "more.0.b", "scales.0", "scales.1", "table.shift")
    assert launch(body, 1) == [[dense, residual, dense]]


def test_forward_without_a_step_is_for_inference():
    def body(backend):
        layers, plain = plain_layers.model(), plain_layers.model()
        sharded = fc.fully_shard(layers, backend)
        x, _ = plain_layers.batch(0)
        found = wanted = x
        for layer, other in zip(layers, plain, strict=True):
            found, wanted = layer.forward(found), other.forward(wanted)
        assert_array_equal(found, wanted)
        assert_array_equal(layers[0](x), plain[0](x))
        assert is_clean(sharded.engine)
        unit = sharded.engine["dense0"]
        unit.unshard()
        for _ in range(2):  # whoever has gathered it frees it
            assert_array_equal(layers[0].forward(x), plain[0].forward(x))
            assert unit.state.value == "unsharded"
        unit.reshard()
        assert is_clean(sharded.engine)
        with pytest.raises(fc.StateError, match=r"backward of 'dense3' outside of a step"):
            layers[3].backward(found)

    launch(body, 2)


def test_everything_can_be_gathered_at_once():
    def body(backend):
        layers, plain = plain_layers.model(), plain_layers.model()
        sharded = fc.fully_shard(layers, backend, optimizer=sgd())
        x, _ = plain_layers.batch(0)
        with sharded.gathered():
            assert_array_equal(layers[0].w, plain[0].w)
            assert_array_equal(layers[2].scales[1], plain[2].scales[1])
            if backend.rank == 0:  # it needs no other rank
                assert_array_equal(layers[0].forward(x), plain[0].forward(x))
            with pytest.raises(ValueError, match="read-only"):
                layers[0].w -= 1
            for refused in (sharded.step, sharded.gathered().__enter__, sharded.restore):
                with pytest.raises(fc.StateError, match=r"inside of gathered\(\)"):
                    refused()
            with pytest.raises(fc.StateError, match=r"of a step inside of gathered\(\)"):
                layers[0].backward(x)
            with (
                sharded.engine.step(),
                pytest.raises(fc.StateError, match=r"forward of 'dense0' of a step inside of gath"),
            ):
                layers[0].forward(x)
        assert not hasattr(layers[0], "w")
        with sharded.step(), pytest.raises(fc.StateError, match=r"gathered\(\) inside of a step"):
            sharded.gathered().__enter__()
        assert is_clean(sharded.engine)

    launch(body, 2)


class Trap(Exception):
    pass


class Fragile(plain_layers.Dense):
    where = ""

    def forward(self, x):
        self.y = super().forward(x)
        if self.where == "forward":
            raise Trap
        return self.y

    def backward(self, dy):
        dx = super().backward(dy)
        if self.where == "backward":
            raise Trap
        return dx


@by_strategy
@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_an_exception_leaves_layers_sharded_and_the_engine_as_it_was(where, strategy):
    def body(backend):
        rng = np.random.default_rng(3)
        layers = [plain_layers.Dense(rng, 5, 4), Fragile(rng, 4, 3)]
        rng = np.random.default_rng(3)
        untouched = [plain_layers.Dense(rng, 5, 4), Fragile(rng, 4, 3)]
        sharded = fc.fully_shard(layers, backend, optimizer=sgd(), strategy=strategy)
        x, wanted = plain_layers.batch(0)
        layers[1].where = where
        with pytest.raises(Trap), sharded.step():
            plain_layers.run(layers, x, wanted)
            raise Trap
        assert not any(hasattr(layer, name) for layer in layers for name in ("w", "b", "dw", "db"))
        assert is_clean(sharded.engine)
        layers[1].where = ""
        with sharded.gathered():
            assert_array_equal(layers[0].w, untouched[0].w)
        with sharded.step(divisor=plain_layers.BATCH) as step:
            plain_layers.run(layers, x, wanted)
            step.update()
        plain_layers.run(untouched, x, wanted)
        sharded.restore()
        return layers[1].b, untouched[1].b - plain_layers.LR * 4 * untouched[1].db / 12

    for found, wanted in launch(body):
        assert_allclose(found, wanted, **ROUNDING)


def test_a_pass_that_failed_can_be_tried_again_in_its_step():
    def body(backend):
        rng = np.random.default_rng(3)
        layer = Fragile(rng, 5, 3)
        plain = plain_layers.Dense(np.random.default_rng(3), 5, 3)
        sharded = fc.fully_shard(layer, backend, optimizer=fc.optim.SGD(lr=1.0))
        x, wanted = plain_layers.batch(0)
        plain_layers.run([plain], x, wanted)
        with sharded.step() as step:
            for where in ("forward", "backward"):
                layer.where = where
                with pytest.raises(Trap):
                    plain_layers.run([layer], x, wanted)
            layer.where = ""  # the forward pass was there the second time
            layer.backward(layer.y - wanted)
            step.update()
        sharded.restore()
        return layer.b, plain.b - plain.db

    for found, wanted in launch(body, 2):
        assert_allclose(found, wanted, **ROUNDING)


def test_a_layer_is_used_twice_in_a_step_and_has_two_backward_passes():
    class Stacked(plain_layers.Dense):
        """Keeps its inputs on a stack."""

        def __init__(self, rng, inputs, outputs):
            super().__init__(rng, inputs, outputs)
            self.kept = []

        def forward(self, x):
            self.kept.append(x)
            return x @ self.w + self.b

        def backward(self, dy):
            self.x = self.kept.pop()
            return super().backward(dy)

    def body(backend):
        layer = Stacked(np.random.default_rng(0), 5, 5)
        plain = Stacked(np.random.default_rng(0), 5, 5)
        sharded = fc.fully_shard([layer, layer], backend, optimizer=fc.optim.SGD(lr=1.0))
        assert [unit.name for unit in sharded.engine.units] == ["stacked0"]
        x = np.random.default_rng(1).standard_normal((4, 5)).astype(np.float32)
        with sharded.step() as step:
            dx = layer.backward(layer.backward(layer.forward(layer.forward(x))))
            with pytest.raises(fc.StateError, match="without a forward pass"):
                layer.backward(dx)
            step.update()
        plain.forward(plain.forward(x))
        dy = plain.backward(plain.forward(plain.kept[1]))
        gradient = plain.dw.copy()
        plain.kept.pop()
        plain.backward(dy)
        sharded.restore()
        return layer.w, plain.w - gradient - plain.dw

    for found, wanted in launch(body, 2):
        assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_checkpoints_are_those_of_the_engine(tmp_path):
    def save(backend):
        sharded = fc.fully_shard(plain_layers.model(), backend, optimizer=sgd())
        steps_of(sharded, backend, range(STEPS // 2))
        fc.checkpoint.save(tmp_path, sharded.engine, backend)

    def resume(backend):
        sharded = fc.fully_shard(plain_layers.model(seed=5), backend, optimizer=sgd())
        fc.checkpoint.load(tmp_path, sharded.engine, backend)
        losses = steps_of(sharded, backend, range(STEPS // 2, STEPS))
        with sharded.engine.full_params() as whole:
            return losses, {name: array.copy() for name, array in whole.items()}

    launch(save, 3)
    losses, params = expected()
    for found_losses, found in launch(resume, 2):
        assert_allclose(found_losses, losses[STEPS // 2 :], **ROUNDING)
        for name in params:
            assert_allclose(found[name], params[name], **ROUNDING)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_parameters_come_in_the_dtype_of_computation(strategy):
    def body(backend):
        layers = plain_layers.model()
        precision = fc.Precision(param_dtype=np.float16)
        sharded = fc.fully_shard(
            layers, backend, optimizer=sgd(), precision=precision, strategy=STRATEGIES[strategy]
        )
        x, _ = plain_layers.batch(0)
        with sharded.step() as step:
            loss, dx = plain_layers.run(layers, x[:2].astype(np.float16), np.float16(0))
            step.update()
        sharded.restore()
        return dx.dtype, layers[0].w.dtype, layers[2].scales[0].dtype, np.isfinite(loss)

    assert launch(body, 2) == [(np.float16, np.float32, np.float32, True)] * 2


class Parallel:
    """Two matrices, by columns and by rows, over the ranks of a group."""

    def __init__(self, group, rng):
        own = np.array_split(np.arange(9), group.world_size)[group.rank]
        up = rng.standard_normal((5, 9)).astype(np.float32)
        self.group = group
        self.up = fc.BoxShard(up.shape, (0, int(own[0])), up[:, own])
        self.down = fc.Spec((9, 3), init=fc.initializers.normal(std=0.3))[own[0] : own[-1] + 1]
        self.b = np.zeros(3, np.float32)

    def forward(self, x):
        self.x, self.h = x, np.tanh(x @ self.up)
        return fc.all_reduce(self.h @ self.down, self.group) + self.b

    def backward(self, dy):
        dh = (dy @ self.down.T) * (1 - self.h**2)
        self.dup, self.ddown, self.db = self.x.T @ dh, self.h.T @ dy, dy.sum(axis=0)
        return fc.all_reduce(dh @ self.up.T, self.group)


def test_boxes_of_tensor_parallel_layers_train_as_whole_arrays():
    def body(backend, tensor):
        mesh = fc.Mesh(backend, {"shard": backend.world_size // tensor, "tensor": tensor})
        group = mesh["tensor"]
        layer = Parallel(group, np.random.default_rng(0))
        sharded = fc.fully_shard(layer, mesh["shard"], optimizer=sgd(), tensor=group, seed=3)
        rows = rows_of(mesh["shard"])
        for number in range(STEPS):
            x, wanted = plain_layers.batch(number)
            with sharded.step(divisor=plain_layers.BATCH) as step:
                plain_layers.run([layer], x[rows], wanted[rows])
                step.update(clip=0.7)
        with sharded.engine.full_params() as whole:
            found = {name: array.copy() for name, array in whole.items()}
        sharded.restore()
        return found, layer.up.shape, layer.down.shape, layer.b.shape

    ((wanted, *shapes),) = launch(lambda backend: body(backend, 1), 1)
    assert shapes == [(5, 9), (9, 3), (3,)]
    for rank, (found, *shapes) in enumerate(launch(lambda backend: body(backend, 2), 4)):
        assert shapes == [(5, 5 - rank % 2), (5 - rank % 2, 3), (3,)]
        for name in wanted:
            assert_allclose(found[name], wanted[name], **ROUNDING, err_msg=name)


def test_gradients_of_microbatches_are_reduced_together():
    def body(backend):
        layers, plain = plain_layers.model(), plain_layers.model()
        sharded = fc.fully_shard(layers, backend, optimizer=sgd())
        x, wanted = plain_layers.batch(0)
        first, second = np.array_split(rows_of(backend), 2)
        with sharded.step(divisor=plain_layers.BATCH) as step:
            with step.no_sync():
                plain_layers.run(layers, x[first], wanted[first])
            plain_layers.run(layers, x[second], wanted[second])
            assert sharded.engine.stats.reductions == 3
            step.update()
        plain_layers.plain(plain, 1)
        with sharded.gathered():
            assert_allclose(layers[0].w, plain[0].w, **ROUNDING)
            assert_allclose(layers[2].scales[1], plain[2].scales[1], **ROUNDING)

    launch(body, 2)
