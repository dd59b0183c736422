"""Updates and norms of arrays on a GPU, on a stand-in for CuPy: the kernels run on the host.

Their very source is compiled with g++, so that the bits are compared with those of NumPy; and with
nvcc where there is one, which runs nothing.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fake_cuda, kernel_text
from support.device_updates import bits, fetched, placed, stepped, stepped_whole
from support.optimizers import ADAMW, ELEMENTWISE, random_data
from support.quantised import KINDS, values_of

from fsdpcore.bench.device_optimizer import COPY, measure
from fsdpcore.compress.on_gpu import GpuQuantiser
from fsdpcore.compress.quantiser import Format, Quantiser
from fsdpcore.core.buffers import BFLOAT16
from fsdpcore.core.errors import ArgumentError, MissingDependencyError
from fsdpcore.fsdp.gpu.kernel import LANES, run_pass
from fsdpcore.fsdp.optim import SGD, Adafactor, AdamW, Optimizer, RMSprop, formulas, kernels
from fsdpcore.fsdp.optim.arrays import round_into
from fsdpcore.fsdp.step.norm import all_finite, joined, local_part
from fsdpcore.fsdp.step.update import _cut
from fsdpcore.fsdp.units.gradients import _add_into, _divide

HALF, SINGLE, DOUBLE = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)


@pytest.fixture
def machine() -> Iterator[Any]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernels with")
    with fake_cuda.installed(2) as machine:
        yield machine


def launched(machine: Any) -> list[Any]:
    """All kernels that our own sources made."""
    return [entry for entry in machine.log if entry.name.startswith("kernel ")]


# Compiling


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc to compile the kernels with")
def test_nvcc_compiles_every_kernel(tmp_path: Path) -> None:
    made, source = tmp_path / "kernels.ptx", tmp_path / "kernels.cu"
    source.write_text(kernel_text.text())
    command = ["nvcc", "-ptx", "-arch=sm_90", "-std=c++17", "-fmad=false", "-o"]
    subprocess.run([*command, str(made), str(source)], check=True, capture_output=True)
    entries = [text.split("\n}")[0] for text in made.read_text().split(".entry")[1:]]
    assert len(entries) == len(list(kernel_text.kernels()))
    for entry, (kernel, dtypes) in zip(entries, kernel_text.kernels(), strict=True):
        assert f"{kernel.name}_" in entry
        if "codes" in dtypes:  # a thread has a block
            continue
        # Four elements are read, and written, as one.
        if "float32" in {dtype.name for name, dtype in dtypes.items() if name != "out"}:
            assert "ld.global.v4.f32" in entry
        if kernel.name != "add_power":  # where some of the library's pow may be
            assert "fma" not in entry


# Elementwise optimizers


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
def test_one_kernel_gives_the_bits_of_the_host(
    optimizer: Optimizer, machine: Any, cupy: Any
) -> None:
    param, grads = random_data(1003, 7, np.float32)  # RAdam's formula is another one from step 6 on
    given = {"starts": (1, 5, 9, 1), "grad_scale": 0.7}
    expected = stepped(np, optimizer, param, list(grads), **given)
    result = stepped(cupy, optimizer, param, list(grads), **given)
    assert {name: bits(array) for name, array in result.items()} == {
        name: bits(array) for name, array in expected.items()
    }
    # All begin one element behind a multiple of four: there are that many groups of four.
    assert [entry.args["size"] for entry in launched(machine)] == [251] * 7


_SPECIAL = [0.0, -0.0, 1e-3, 3e4, -7e4, 1e20, 3e38, math.inf, -math.inf, math.nan]
_KINDS = [  # param, grad, out
    (SINGLE, SINGLE, HALF),
    (SINGLE, HALF, None),
    (SINGLE, BFLOAT16, BFLOAT16),
    (DOUBLE, DOUBLE, HALF),
    (DOUBLE, BFLOAT16, SINGLE),
    (DOUBLE, SINGLE, DOUBLE),
]


def test_any_dtypes_sizes_and_beginnings_give_the_bits_of_the_host(cupy: Any) -> None:
    @settings(max_examples=40)
    @given(
        kind=st.sampled_from(_KINDS),
        size=st.integers(0, 40),
        starts=st.one_of(
            st.integers(0, 7).map(lambda start: (start,) * 4),
            st.tuples(*[st.integers(0, 7)] * 4),
        ),
        grad_scale=st.sampled_from([1.0, 0.3, -2.0]),
        data=st.data(),
    )
    def check(
        kind: tuple[Any, Any, Any],
        size: int,
        starts: tuple[int, ...],
        grad_scale: float,
        data: Any,
    ) -> None:
        values = st.one_of(st.sampled_from(_SPECIAL), st.floats(-4, 4, width=16))
        numbers = st.lists(values, min_size=size, max_size=size)
        with np.errstate(over="ignore"):
            param = np.array(data.draw(numbers), kind[0])
            grads = [np.array(data.draw(numbers)).astype(kind[1]) for _ in range(2)]
        given: dict[str, Any] = {"starts": starts, "out": kind[2], "grad_scale": grad_scale}
        expected = stepped(np, ADAMW, param, grads, **given)
        result = stepped(cupy, ADAMW, param, grads, **given)
        for name, array in expected.items():
            assert array.dtype == result[name].dtype
            assert bits(array) == bits(result[name]), name

    check()


def test_one_element_to_a_thread_gives_the_same(machine: Any, cupy: Any) -> None:
    param, grads = random_data(50, 1, np.float32)
    made = formulas.formula(formulas.SGD, rounded=False)
    results = []
    for lanes in (1, LANES):
        arrays = {"param": placed(cupy, param, 1), "grad": placed(cupy, grads[0], 1)}
        run_pass(made, arrays, (1.0, 0.1, 0.0), SINGLE, lanes=lanes)
        results.append(bits(fetched(arrays["param"])))
    assert results[0] == results[1]
    assert [entry.args["size"] for entry in launched(machine)] == [50, 13]


def test_nothing_is_launched_for_nothing(machine: Any, cupy: Any) -> None:
    stepped(cupy, AdamW(), np.empty(0, np.float32), [np.empty(0, np.float32)])
    assert launched(machine) == []


@dataclass(frozen=True)
class Signs(Optimizer):
    """Somebody's own, without a kernel."""

    lr: float = 0.1

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("seen",)

    def update_block(
        self, param: Any, grad: Any, state: Mapping[str, Any], scratch: Any, *, step: int, lr: float
    ) -> None:
        np.add(state["seen"], grad, out=state["seen"])
        np.sign(state["seen"], out=scratch[1])
        np.multiply(scratch[1], lr, out=scratch[1])
        np.subtract(param, scratch[1], out=param)


@dataclass(frozen=True)
class Halved(AdamW):
    """An own formula on top of one that has a kernel, which must not be taken for it."""

    def update_block(
        self, param: Any, grad: Any, state: Any, scratch: Any, *, step: int, lr: float
    ) -> None:
        super().update_block(param, grad, state, scratch, step=step, lr=lr / 2)


@pytest.mark.parametrize("optimizer", [Signs(), Halved(0.1)], ids=repr)
@pytest.mark.parametrize("grad", [np.float16, np.float32])
def test_an_optimizer_of_ones_own_works_by_array_functions(
    optimizer: Optimizer, grad: Any, machine: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpcore.fsdp.optim.bound.GPU_BLOCK_ELEMENTS", 100)
    param, grads = random_data(250, 2, np.float32)
    narrow = [each.astype(grad) for each in grads]
    given: dict[str, Any] = {"out": np.float16, "grad_scale": 0.5}
    expected = stepped(np, optimizer, param, narrow, **given)
    result = stepped(cupy, optimizer, param, narrow, **given)
    assert {name: bits(array) for name, array in result.items()} == {
        name: bits(array) for name, array in expected.items()
    }
    assert launched(machine) == []


def test_every_formula_is_of_an_optimizer() -> None:
    used = {each.gpu_update(step=1, lr=0.1)[0] for each in ELEMENTWISE}  # type: ignore[index]
    used.add(RMSprop(momentum=0.5).gpu_update(step=1, lr=0.1)[0])
    assert used == set(formulas.ALL)
    for each in ELEMENTWISE:
        found = each.gpu_update(step=3, lr=0.1)
        assert found is not None
        assert set(found[0].state) == set(each.state_names)
        assert len(found[0].scalars) == len(found[1])


def test_fused_needs_no_numba_on_a_gpu(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    kernels.adam.cache_clear()
    param, grads = random_data(10, 1, np.float32)
    fused = AdamW(fused=True)
    expected = stepped(np, AdamW(), param, list(grads))
    assert bits(stepped(cupy, fused, param, list(grads))["param"]) == bits(expected["param"])
    with pytest.raises(MissingDependencyError, match=r"pip install 'fsdpcore\[numba\]'"):
        stepped(np, fused, param, list(grads))


def _refusals(cupy: Any) -> dict[str, tuple[dict[str, Any], str]]:
    one, other = cupy.zeros(8, np.float32), cupy.zeros(4, np.float32)
    with cupy.cuda.Device(1):
        elsewhere = cupy.zeros(4, np.float32)
    return {
        "host": ({"grad": np.zeros(4, np.float32)}, "param is on cuda:0, but .* on the host|"
                 "grad is on the host, but param on cuda:0"),
        "device": ({"out": elsewhere}, "out is on cuda:1, but param on cuda:0"),
        "strided": ({"param": one[::2]}, "param must be 1-D and contiguous"),
        "dtype": ({"grad": other.astype(np.int32)}, "grad has 4 elements of int32"),
        "overlap": ({"param": one[:4], "grad": one[3:7]}, "param and grad share memory"),
        "size": ({"out": one}, "out has 8 elements"),
    }  # fmt: skip


@pytest.mark.parametrize("case", ["host", "device", "strided", "dtype", "overlap", "size"])
def test_update_refuses_as_on_the_host(case: str, machine: Any, cupy: Any) -> None:
    changed, message = _refusals(cupy)[case]
    arrays: dict[str, Any] = {
        "param": cupy.zeros(4, np.float32),
        "grad": cupy.zeros(4, np.float32),
        "state": {"momentum_buffer": cupy.zeros(4, np.float32)},
    }
    with pytest.raises(ArgumentError, match=message):
        SGD(0.1, momentum=0.9).update(**{**arrays, **changed}, step=1)
    assert launched(machine) == []


def test_neighbours_do_not_overlap(cupy: Any) -> None:
    flat = cupy.zeros(12, np.float32)
    SGD(0.1).update(flat[:6], flat[6:], {}, step=1, out=cupy.zeros(6, np.float16))
    assert not fetched(flat).any()


# Adafactor


@pytest.mark.parametrize(
    ("optimizer", "waits"),
    [
        (Adafactor(), 2),
        (Adafactor(clip_threshold=None), 1),
        (Adafactor(0.1, scale_parameter=False, clip_threshold=None, beta1=0.9), 1),
        (Adafactor(0.1, beta1=0.9, weight_decay=0.1), 2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_adafactor_on_a_gpu(
    optimizer: Adafactor, waits: int, dtype: Any, machine: Any, cupy: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("fsdpcore.fsdp.optim.moments.GPU_BLOCK", 64)
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {"m": (9, 11), "v": (70,), "t": (3, 4, 5), "none": (0, 4)}
    params = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    sums: list[Any] = []
    expected = stepped_whole(np, optimizer, params, 2, sums)
    before = len(machine.calls("get"))
    gpu_sums: list[Any] = []
    result = stepped_whole(cupy, optimizer, params, 2, gpu_sums)
    fetched_after = sum(array.size > 0 for array in result.values())
    assert len(machine.calls("get")) - before == 2 * waits + fetched_after
    for mine, theirs in zip(sums, gpu_sums, strict=True):
        np.testing.assert_allclose(theirs, mine, 1e-12, 1e-300)
    tolerance = 1e-6 if dtype is SINGLE else 1e-12
    for name, array in expected.items():
        rtol = 2e-3 if name.endswith("out") else tolerance
        np.testing.assert_allclose(result[name], array, rtol, rtol, err_msg=name)


# Norms

_POWERS = [1.0, 2.0, 3.5, math.inf]


def _arrays(dtype: Any, scale: float) -> list[Any]:
    rng = np.random.default_rng(7)
    sizes = [1, 0, 7, 1000, 70_001]
    return [(rng.standard_normal(size) * scale).astype(dtype) for size in sizes]


@pytest.mark.parametrize(
    ("dtype", "scale", "p"),
    [
        (HALF, 1.0, 2.0),
        (BFLOAT16, 1e30, 2.0),
        *((SINGLE, 1.0, p) for p in _POWERS),
        *((DOUBLE, scale, p) for scale in (1e200, 1e-200, 0.0) for p in _POWERS),
    ],
    ids=str,
)
def test_norms_are_those_of_the_host(
    p: float, dtype: Any, scale: float, machine: Any, cupy: Any
) -> None:
    arrays = _arrays(dtype, scale)
    moved = [placed(cupy, array, start) for start, array in enumerate(arrays)]
    expected, before = local_part(arrays, p), len(machine.calls("get"))
    result = local_part(iter(moved) if p in (2.0, math.inf) and scale == 1 else moved, p)
    norm = joined([expected], p, single=False)
    assert joined([result], p, single=False) == pytest.approx(norm, rel=1e-12)
    again = p in (1.0, 2.0) and result.largest != 1.0
    assert len(machine.calls("get")) - before == 1 + again
    assert all_finite(moved)


@pytest.mark.parametrize("start", range(5))
def test_every_element_is_counted_once(start: int, cupy: Any) -> None:
    for size in range(10):
        array = 2.0 ** np.arange(size, dtype=np.float32)
        assert local_part([placed(cupy, array, start)], 1.0).total == 2.0**size - 1


@pytest.mark.parametrize("p", _POWERS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_found(p: float, value: float, machine: Any, cupy: Any) -> None:
    arrays = _arrays(SINGLE, 1.0)
    arrays[3][517] = value
    moved = [placed(cupy, array) for array in arrays]
    with np.errstate(invalid="ignore"):
        expected = local_part(arrays, p)
    assert bits(np.array(local_part(moved, p))) == bits(np.array(expected))
    before = len(machine.calls("get"))
    assert not all_finite(moved)
    assert all_finite(moved[:3])
    assert len(machine.calls("get")) - before == 2


# In place


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, SINGLE], ids=str)
def test_gradients_are_added_divided_and_cut_in_place(dtype: Any, machine: Any, cupy: Any) -> None:
    rng = np.random.default_rng(2)
    with np.errstate(over="ignore"):
        first, second = (rng.standard_normal((2, 77)) * 1e4).astype(dtype)
    first[:4] = [math.inf, math.nan, -math.inf, 0.0]
    mine, theirs = placed(cupy, first, 2), placed(cupy, second, 6)
    address = mine.data.ptr
    for one, other in ((first, second), (mine, theirs)):
        _add_into(one, other)
        _divide(one, 3.0)
        _cut([one], 1.7e3)
    assert bits(fetched(mine)) == bits(first)
    assert mine.data.ptr == address
    names = [entry.name for entry in launched(machine)]
    assert names == ["kernel add_into", "kernel divide", "kernel cut"]


@pytest.mark.parametrize("source", [HALF, BFLOAT16, SINGLE], ids=str)
@pytest.mark.parametrize("target", [HALF, BFLOAT16, SINGLE], ids=str)
def test_rounding_on_a_gpu(target: Any, source: Any, cupy: Any) -> None:
    with np.errstate(over="ignore"):
        values = np.array([1.0, 1.001, 7e4, -1e38, math.inf, 1e-7]).astype(source)
    expected, result = np.zeros(6, target), cupy.zeros(6, target)
    round_into(expected, values)
    round_into(result, placed(cupy, values))
    assert bits(fetched(result)) == bits(expected)
    assert re.fullmatch(r"b?float16|float32", str(result.dtype))


# Quantising


@pytest.mark.parametrize(
    "form",
    [Format(8, 64, False), Format(4, 64, True), Format(4, 8, True), Format(8, 512, True)],
    ids=str,
)
def test_quantised_blocks_have_the_bits_of_numpy(form: Format, cupy: Any) -> None:
    parts = [values_of(kind, 999, 5) for kind in KINDS]
    values = np.concatenate([*parts, np.float32([math.nan, 1, -math.inf])])
    host, gpu = Quantiser(form, compiled=False), GpuQuantiser(cupy, form)
    packed = np.zeros(form.nbytes(values.size), np.uint8)
    theirs, back, again = placed(cupy, packed, 4), np.empty_like(values), placed(cupy, values, 1)
    half = values.size // 2 // form.block * form.block
    host.encode(values, packed)
    host.decode(packed, back)
    for start, stop in ((half, values.size), (0, half), (0, 0)):
        gpu.encode(placed(cupy, values[start:stop], 3), theirs, start)
    assert bits(fetched(theirs)) == bits(packed)
    again.fill(0)
    for start, stop in ((half, values.size), (0, half)):
        gpu.decode(theirs, again[start:stop], start)
    assert bits(fetched(again)) == bits(back)


# The bench


def test_the_bench_has_a_row_for_each_contestant(machine: Any, cupy: Any) -> None:
    rows = {row["name"]: row for row in measure(cupy, elements=1001, rounds=2, iterations=3)}
    assert rows[COPY]["share_of_copy"] == 1.0
    assert rows[COPY]["bytes"] == 8 * 1001
    assert rows["adamw float32"]["bytes"] == 28 * 1001
    assert [row["name"] for row in rows.values() if row.get("target")] == [
        "adamw float32",
        "adamw float32, bfloat16 in and out",
    ]
    assert all(len(row["samples"]) == 2 for row in rows.values())
    # Beside two rounds of three, those that come first.
    assert len(machine.calls("memcpyAsync")) == 9
