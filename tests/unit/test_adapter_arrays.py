"""Models written with arrays of other libraries: shared where that is possible, trained as NumPy's.

``array_api_strict`` is always there; the tests of PyTorch run where it is installed.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import mlp
from support.fsdp_steps import is_clean, launch, values_of
from support.spmd import run

import fsdpcore as fc
from fsdpcore.adapters import arrays
from fsdpcore.core.foreign import as_numpy, is_foreign
from fsdpcore.fsdp.units.views import read_only

STEPS = 20
LIBRARIES = ["array_api_strict", "torch", "jax.numpy"]
libraries = pytest.mark.parametrize("library", LIBRARIES)
# It compiles every operation, and has an adapter of its own, whose tests train with it.
without_jax = pytest.mark.parametrize("library", LIBRARIES[:2])


def module(library):
    return pytest.importorskip(library)


def locked(array):
    """As an engine gives its parameters."""
    return read_only(array)


# One array.


@libraries
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.bool_])
@pytest.mark.parametrize("shape", [(3, 5), (4,), (), (0, 3)])
@pytest.mark.parametrize("lock", [locked, np.array], ids=["read-only", "writable"])
def test_an_array_goes_there_and_back(library, dtype, shape, lock):
    xp = module(library)
    array = lock(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype))
    if library == "array_api_strict" and dtype is np.float16:
        with pytest.raises(
            fc.ArgumentError, match=r"array_api_strict makes no array of .* float16"
        ):
            arrays.from_numpy(array, xp)
        return
    theirs = arrays.from_numpy(array, xp)
    assert is_foreign(theirs)
    assert tuple(theirs.shape) == shape
    back = arrays.to_numpy(theirs)
    assert type(back) is np.ndarray
    assert (back.shape, back.dtype) == (shape, np.dtype(dtype))
    assert_array_equal(back, array)


def aligned(shape, boundary=64):
    """An array that begins at a multiple of so many bytes."""
    size = int(np.prod(shape))
    memory = np.empty(size + boundary, np.float32)
    skip = -memory.ctypes.data % boundary // 4
    found = memory[skip : skip + size].reshape(shape)
    found[...] = np.arange(size).reshape(shape)
    return found


@libraries
@pytest.mark.parametrize("lock", [locked, lambda array: array], ids=["read-only", "writable"])
def test_memory_is_shared_both_ways(library, lock):
    xp = module(library)
    array = lock(aligned((3, 4)))
    back = arrays.to_numpy(arrays.from_numpy(array, xp))
    assert np.shares_memory(back, array)
    assert back.ctypes.data == array.ctypes.data


@pytest.mark.parametrize("library", ["array_api_strict", "torch"])
def test_it_is_shared_wherever_it_begins_and_however_it_is_strided(library):
    xp = module(library)
    memory = aligned((7, 9)).reshape(-1)
    for array in (memory[1:13], memory[:60].reshape(6, 10).T, memory[::3]):
        assert np.shares_memory(arrays.to_numpy(arrays.from_numpy(array, xp)), array)
    backwards = memory[::-1]
    theirs = arrays.from_numpy(backwards, xp)
    assert_array_equal(arrays.to_numpy(theirs), backwards)


def test_what_numpy_shares_as_read_only_stays_so():
    back = arrays.to_numpy(arrays.from_numpy(locked(np.zeros(3)), array_api_strict))
    assert not back.flags.writeable


def test_numpy_itself_gets_the_array_itself():
    array = locked(np.zeros(3))
    assert arrays.from_numpy(array, np) is array
    assert arrays.to_numpy(array).base is array.base


def library_of(**functions):
    return SimpleNamespace(__name__="lib", **functions)


def refuse(array):
    raise BufferError("read-only arrays are unknown here")


def test_a_library_that_takes_no_read_only_arrays_gets_the_memory_nevertheless():
    """As JAX, and older releases of PyTorch and NumPy."""

    def from_dlpack(array):
        return array if array.flags.writeable else refuse(array)

    for dtype in (np.float32, np.complex64, np.int64):
        array = locked(np.arange(6).reshape(2, 3).astype(dtype))
        theirs = arrays.from_numpy(array, library_of(from_dlpack=from_dlpack))
        assert np.shares_memory(theirs, array)
        assert_array_equal(theirs, array)
        assert not array.flags.writeable


def test_a_library_that_shares_nothing_gets_a_copy():
    array = np.arange(3.0)
    for xp in (library_of(asarray=np.asarray), library_of(asarray=np.asarray, from_dlpack=refuse)):
        theirs = arrays.from_numpy(array, xp)
        assert_array_equal(theirs, array)
        assert not np.shares_memory(theirs, array)


def test_what_a_library_has_no_dtype_for_is_refused_with_its_reason():
    with pytest.raises(
        fc.ArgumentError, match=r"lib makes no array .* dtype float64 and shape \(3,"
    ):
        arrays.from_numpy(np.zeros(3), library_of(from_dlpack=refuse, asarray=refuse))
    with pytest.raises(fc.ArgumentError, match="from_numpy takes arrays of NumPy, got list"):
        arrays.from_numpy([1.0], array_api_strict)


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_bfloat16_keeps_its_bits(library):
    xp = module(library)
    array = locked(np.array([1.5, -2.25, np.inf], ml_dtypes.bfloat16))
    theirs = arrays.from_numpy(array, xp)
    assert theirs.dtype == xp.bfloat16
    back = arrays.to_numpy(theirs)
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


class Exports:
    """Has its values by DLPack only, as arrays of smaller libraries."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_an_array_may_have_either_protocol():
    array = np.arange(4.0)
    for theirs in (Exports(array), SimpleNamespace(__array__=array.__array__), Refusing(array)):
        assert is_foreign(theirs) or isinstance(theirs, SimpleNamespace)
    assert np.shares_memory(as_numpy(Exports(array), "it"), array)
    assert np.shares_memory(as_numpy(Refusing(array), "it"), array)


class Refusing(Exports):
    """Is no array to NumPy, but to DLPack."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("not without DLPack")


class Elsewhere:
    """On a device that nobody can reach."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("it is far away")

    def __dlpack_device__(self):
        return (99, 0)

    def __dlpack__(self, **options):
        raise BufferError("nor this way")


def test_what_cannot_be_taken_over_is_refused_with_its_reason():
    with pytest.raises(fc.ArgumentError, match=r"of type .*Elsewhere, cannot become .* far away"):
        arrays.to_numpy(Elsewhere())
    with pytest.raises(fc.ArgumentError, match="it is no array: "):
        as_numpy([[1], [2, 3]], "it")


class Lazy(Exports):
    """A view that is negated, or conjugated, when it is read: as PyTorch's, DLPack tells not so."""

    def __init__(self, array, resolved):
        super().__init__(array)
        self.resolve_neg = lambda: Exports(resolved)

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that has negative bit set")


def test_what_is_negated_when_it_is_read_is_so():
    array = np.arange(3.0)
    assert_array_equal(arrays.to_numpy(Lazy(array, -array)), -array)


def test_tensors_that_torch_negates_when_they_are_read_are_so():
    torch = pytest.importorskip("torch")
    view = torch.view_as_complex(torch.ones(3, 2))
    assert_array_equal(arrays.to_numpy(view.conj()), np.full(3, 1 - 1j))
    assert_array_equal(arrays.to_numpy(view.conj().imag), -np.ones(3))


def test_masked_arrays_are_no_gradients():
    def body(backend):
        start = {"w": np.ones(2, np.float32)}
        engine = fc.FSDP([fc.Unit("u", start)], backend, optimizer=fc.optim.SGD(lr=1.0))
        masked = np.ma.array(np.ones(2, np.float32), mask=[True, False])
        with pytest.raises(fc.ArgumentError, match=r"gradient of u\.w is a masked array"):
            fc.train_step(engine, lambda params: (0.0, {"u": {"w": masked}}))

    fc.launch(body, world_size=1, transport="sim")


def test_an_array_of_a_gpu_is_copied_to_the_host():
    class OnGPU(Elsewhere):
        @property
        def __cuda_array_interface__(self):
            return {}

        def get(self):
            return np.arange(3)

    assert_array_equal(arrays.to_numpy(OnGPU()), [0, 1, 2])


# What the engine takes.


@libraries
def test_units_begin_with_such_arrays_and_gradients_may_be_some(library):
    xp = module(library)

    def body(backend):
        values = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}
        theirs = {name: arrays.from_numpy(array, xp) for name, array in values.items()}
        units = [
            fc.Unit("a", theirs),
            fc.Unit("b", {"w": theirs["w"]}),  # which is that of "a"
        ]
        engine = fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=1.0))
        assert str(units[1].ties["w"]) == "a.w"
        with engine.step() as step:
            for unit in "ab":
                with step.forward(unit):
                    pass
            for unit in "ba":
                with step.backward(unit) as (_, grads):
                    grads["w"] = arrays.from_numpy(np.full((2, 3), 2, np.float32), xp)
            with step.whole() as (_, grads):
                grads["a"] = {"b": arrays.from_numpy(np.ones(3, np.float32), xp)}
            step.update()
        assert is_clean(engine)
        return values_of(engine)

    for values in launch(body, 2):
        assert_array_equal(values["a"]["w"], np.arange(6).reshape(2, 3) - 4)
        assert_array_equal(values["a"]["b"], [0, 0, 0])


def test_what_is_no_array_is_named():
    with pytest.raises(
        fc.ArgumentError, match=r"parameter a\.w, of type .*Elsewhere, cannot become"
    ):
        fc.Unit("a", {"w": Elsewhere()})


# Training.


def loss_and_grads_in(xp):
    """The perceptron, by what the array API has."""

    def loss_and_grads(params, x, wanted):
        assert isinstance(x, type(xp.asarray([1.0])))
        names = sorted(params)
        activations = [x]
        for name in names:
            y = xp.matmul(activations[-1], params[name]["w"]) + params[name]["b"]
            activations.append(y if name == names[-1] else xp.tanh(y))
        dy = activations[-1] - wanted
        loss = xp.sum(dy * dy) / 2
        grads = {}
        for i in reversed(range(len(names))):
            if i < len(names) - 1:
                dy = dy * (1 - activations[i + 1] ** 2)
            grads[names[i]] = {
                "w": xp.matmul(activations[i].T, dy),
                "b": xp.sum(dy, axis=0),
            }
            dy = xp.matmul(dy, params[names[i]]["w"].T)
        return loss, grads

    return loss_and_grads


def by_autograd_of_torch(params, x, wanted):
    import torch

    leaves = {
        unit: {name: tensor.requires_grad_() for name, tensor in named.items()}
        for unit, named in params.items()
    }
    y = x
    for unit in leaves:
        y = y @ leaves[unit]["w"] + leaves[unit]["b"]
        y = y if unit == list(leaves)[-1] else torch.tanh(y)
    loss = ((y - wanted) ** 2).sum() / 2
    loss.backward()
    return loss, {u: {n: tensor.grad for n, tensor in p.items()} for u, p in leaves.items()}


def train_function(backend, library, by_autograd=False):
    xp = module(library)
    units = [fc.Unit(name, params) for name, params in mlp.initial().items()]
    optimizer = fc.optim.SGD(lr=mlp.LR, momentum=mlp.MOMENTUM)
    engine = fc.FSDP(units, backend, optimizer=optimizer)
    theirs = arrays.function(by_autograd_of_torch if by_autograd else loss_and_grads_in(xp), xp)
    rows = mlp.rows_of(backend)
    losses = []
    for number in range(STEPS):
        x, wanted = mlp.batch(number)
        loss = fc.train_step(engine, theirs, x[rows], wanted[rows], divisor=mlp.BATCH)
        assert isinstance(loss, np.floating)
        losses.append(float(fc.all_reduce(np.float64(loss), backend)) / mlp.BATCH)
    return losses, values_of(engine), is_clean(engine)


class DenseIn:
    """``mlp.Dense`` with arrays of another library."""

    def __init__(self, dense, xp, in_place):
        self.dense = dense
        self.xp = xp
        self.in_place = in_place

    def init(self, rng):
        ours = self.dense.init(rng)
        return {"w": arrays.from_numpy(ours["w"], self.xp), "b": ours["b"]}

    def forward(self, params, x):
        y = self.xp.matmul(x, params["w"]) + params["b"]
        y = self.xp.tanh(y) if self.dense.tanh else y
        return y, (x, y)

    def backward(self, params, saved, dy, grads):
        x, y = saved
        if self.dense.tanh:
            dy = dy * (1 - y * y)
        assert list(grads) == ["w", "b"]
        dw = self.xp.matmul(x.T, dy)
        if self.in_place:
            grads["w"][...] = dw
        else:
            grads["w"] = dw
        grads["b"] = self.xp.sum(dy, axis=0)
        return self.xp.matmul(dy, params["w"].T)


def train_layers(backend, library, in_place):
    """The first layer by NumPy, the others by another library."""
    xp = module(library)
    (first, *others) = mlp.layers()
    wrapped = [(name, arrays.layer(DenseIn(dense, xp, in_place), xp)) for name, dense in others]
    stack = fc.LayerStack([first, *wrapped])
    engine = fc.FSDP(
        stack.units(np.random.default_rng(5)),
        backend,
        optimizer=fc.optim.SGD(lr=mlp.LR, momentum=mlp.MOMENTUM),
        window=False,
    )
    rows = mlp.rows_of(backend)
    losses = []
    for number in range(STEPS):
        x, wanted = mlp.batch(number)
        with engine.step(divisor=mlp.BATCH) as step:
            y, saved = stack.forward(step, x[rows])
            loss, dy = mlp.square_loss(y, wanted[rows])
            stack.backward(step, saved, dy)
            step.update()
        losses.append(float(fc.all_reduce(np.float64(loss), backend)) / mlp.BATCH)
    return losses, values_of(engine), is_clean(engine)


def assert_as_unsharded(results):
    """Twenty steps of sums in another order differ by some units of the last place in each."""
    want_losses, want = mlp.trained(STEPS)
    for losses, params, clean in results:
        assert clean
        assert_allclose(losses, want_losses, rtol=2e-5)
        for unit, named in want.items():
            for name, array in named.items():
                assert_allclose(params[unit][name], array, atol=2e-5)


@without_jax
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_function_trains_as_numpy_does_unsharded(library, world_size):
    module(library)
    assert_as_unsharded(
        run(train_function, transport="sim", world_size=world_size, args=(library,))
    )


def test_so_does_what_torch_differentiates():
    module("torch")
    assert_as_unsharded(run(train_function, transport="sim", world_size=2, args=("torch", True)))


@pytest.mark.parametrize(
    ("library", "in_place"),
    [(library, in_place) for library in LIBRARIES[:2] for in_place in (False, True)],
)
def test_layers_train_as_numpy_does_unsharded(library, in_place):
    module(library)
    if in_place and library == "array_api_strict" and np.__version__.startswith("2.0."):
        pytest.skip("NumPy 2.0 takes over what others share as read-only")
    results = run(train_layers, transport="sim", world_size=3, args=(library, in_place))
    assert_as_unsharded(results)


# What leaves a layer or a function.


class Pair(NamedTuple):
    first: object
    second: object


class Passing:
    """Gives its parameter and its input on."""

    holds_params = True

    def init(self, rng):
        return {"w": np.ones(3, np.float32), "s": fc.Spec(2)}

    def forward(self, params, x):
        assert {is_foreign(array) for array in params.values()} == {True}
        return {"w": params["w"][1:], "x": Pair(x["x"][0], "label"), "none": None}, None

    def backward(self, params, saved, dy, grads):
        assert is_foreign(dy[0])
        return [params["w"], grads["w"], *dy]


def test_outputs_may_be_nested_and_never_lie_in_the_parameters():
    layer = arrays.layer(Passing(), array_api_strict)
    assert layer.holds_params
    assert isinstance(layer.init(np.random.default_rng(0))["s"], fc.Spec)
    params = {"w": locked(np.arange(3, dtype=np.float32)), "s": np.zeros(2, np.float32)}
    x = np.ones(4)
    y, _ = layer.forward(params, {"x": [x]})
    assert_array_equal(y["w"], [1, 2])
    assert not np.shares_memory(y["w"], params["w"])
    assert y["none"] is None
    assert type(y["x"]) is Pair
    assert y["x"].second == "label"
    assert np.shares_memory(y["x"].first, x)
    grads = {"w": np.zeros(3, np.float32)}
    dw, written, dy = layer.backward(params, None, (x,), grads)
    assert_array_equal(dw, params["w"])
    assert not np.shares_memory(dw, params["w"])
    assert not np.shares_memory(written, grads["w"])
    assert np.shares_memory(dy, x)


def test_what_is_computed_in_the_background_has_ended_before_the_parameters_go():
    waited = []

    class Later:
        def block_until_ready(self):
            waited.append(self)

    later = Later()

    class Saving(Passing):
        def forward(self, params, x):
            return None, [(later, 1), {"more": later}]

    arrays.layer(Saving(), array_api_strict).forward({}, None)
    assert waited == [later, later]


def test_a_loss_that_is_a_parameter_outlives_it():
    def first(params):
        return params["u"]["w"][0], {"u": {"w": None}}

    params = {"u": {"w": np.ones(2, np.float32)}}
    loss, grads = arrays.function(first, array_api_strict)(params)
    params["u"]["w"][0] = 5
    assert loss == 1
    assert grads == {"u": {"w": None}}
    with pytest.raises(fc.ArgumentError, match="must return the loss, and gradients nested like"):
        arrays.function(lambda params: 1.0, array_api_strict)(params)


def test_gradients_that_cannot_be_written_in_place_say_so():
    class InPlace(Passing):
        def backward(self, params, saved, dy, grads):
            grads["w"][...] = 1

    copies = library_of(asarray=np.asarray, from_dlpack=refuse)
    layer = arrays.layer(InPlace(), copies)
    with pytest.raises(
        fc.ArgumentError, match=r"lib does not share its memory; assign it: grads\["
    ):
        layer.backward({}, None, None, {"w": np.zeros(3, np.float32)})


def test_arguments_in_another_order_are_refused():
    xp = module("array_api_strict")
    with pytest.raises(fc.ArgumentError, match=r"needs a function of \(params, \*batch\), got mod"):
        arrays.function(xp, lambda params: None)
    with pytest.raises(fc.ArgumentError, match=r"needs a library's module, .* got math"):
        arrays.function(lambda params: None, math)
    with pytest.raises(fc.ArgumentError, match="a function has no init"):
        arrays.layer(lambda params, x: x, xp)
    with pytest.raises(fc.ArgumentError, match="needs a library's module"):
        arrays.layer(DenseIn(None, xp, in_place=False), None)


def test_a_unit_without_a_mapping_of_gradients_is_refused():
    def body(backend):
        start = {"w": np.ones(2, np.float32)}
        engine = fc.FSDP([fc.Unit("u", start)], backend, optimizer=fc.optim.SGD(lr=1.0))
        function = arrays.function(lambda params: (0.0, {"u": None}), module("array_api_strict"))
        with pytest.raises(fc.ArgumentError, match=r"unit 'u' must be a mapping .* got NoneType"):
            fc.train_step(engine, function)

    fc.launch(body, world_size=1, transport="sim")
