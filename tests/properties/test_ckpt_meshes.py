"""Any mesh of tensor, shard and replicate ranks loads what any other saved, and so does none."""

from __future__ import annotations

import tempfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.arrays import array_of
from support.ckpt_mesh import Cut, Grid, box_of, check_whole, load_on, save_on
from support.ckpt_regions import boxes, elements, mask, regions, shapes
from support.fsdp_random import take_a_step

import fsdpcore as fc
from fsdpcore.core.geometry.regions import Box, Range, bounding_box, regions_inside

Array = NDArray[Any]
DTYPES = [np.dtype(each) for each in (np.float32, np.float64, ml_dtypes.bfloat16, np.uint8)]


@st.composite
def models(draw: st.DrawFn) -> dict[str, Array]:
    arrays = {}
    for number in range(draw(st.integers(1, 5))):
        ndim = draw(st.sampled_from([2, 2, 2, 1, 3, 4, 0]))
        most = {0: 1, 1: 60, 2: 30, 3: 9, 4: 5}[ndim]
        shape = tuple(draw(st.integers(0 if ndim == 1 else 1, most)) for _ in range(ndim))
        arrays[f"u{number}.w"] = array_of(number, shape, draw(st.sampled_from(DTYPES)))
    return arrays


@st.composite
def grids(draw: st.DrawFn, arrays: dict[str, Array]) -> Grid:
    """A mesh of at most 8 ranks, boxes cut anywhere, arrays spread over buffers in any order."""
    tensor = draw(st.integers(1, 4))
    shard = draw(st.integers(1, max(1, 8 // tensor // 2)))
    replicate = draw(st.integers(1, 8 // (tensor * shard)))
    cuts = {}
    for name, array in arrays.items():
        if array.ndim and draw(st.integers(0, 3)):
            axis = draw(st.integers(0, array.ndim - 1))
            extent = array.shape[axis]
            inner = sorted(draw(st.integers(0, extent)) for _ in range(tensor - 1))
            cuts[name] = Cut(axis, (0, *inner, extent))
    names = draw(st.permutations(sorted(arrays)))
    split = draw(st.integers(0, len(names)))
    buffers = tuple(tuple(each) for each in (names[:split], names[split:]) if each)
    return Grid(replicate, shard, tensor, cuts, buffers)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Array], Grid, Grid]:
    arrays = draw(models())
    return arrays, draw(grids(arrays)), draw(grids(arrays))


@settings(
    max_examples=16,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=cases())
def test_any_mesh_loads_what_any_other_saved(case: tuple[dict[str, Array], Grid, Grid]) -> None:
    check(*case)


@pytest.mark.campaign
def test_any_mesh_loads_what_any_other_saved_at_length() -> None:

    @settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases())
    def at_length(case: tuple[dict[str, Array], Grid, Grid]) -> None:
        check(*case)

    at_length()


def check(arrays: dict[str, Array], one: Grid, other: Grid) -> None:
    """All bits are where they belong, each stored once, and hardly any read in vain."""
    with tempfile.TemporaryDirectory() as path:
        save_on(path, arrays, one)
        check_whole(arrays, fc.checkpoint.read(path))
        reports = load_on(path, arrays, other)
        assert fc.checkpoint.verify(path).problems == ()
    nbytes = sum(array.nbytes for array in arrays.values())
    needed = sum(each.bytes_needed for each in reports)
    assert needed >= nbytes
    assert sum(each.bytes_read for each in reports) <= 1.02 * needed


# Engines.


@st.composite
def engines(draw: st.DrawFn) -> tuple[dict[str, Array], Grid, Grid]:
    """Arrays that can be trained, and two meshes."""
    arrays = {
        name: array.astype(np.float64) if array.itemsize < 4 else array
        for name, array in draw(models()).items()
    }
    return arrays, draw(grids(arrays)), draw(grids(arrays))


def engine_of(backend: fc.Backend, arrays: dict[str, Array], grid: Grid, factor: int) -> fc.FSDP:
    sizes = {"replicate": grid.replicate, "shard": grid.shard, "tensor": grid.tensor}
    mesh = fc.Mesh(backend, sizes)
    rank = mesh.coordinates["tensor"]
    units = []
    for name, whole in arrays.items():
        cut = grid.cuts.get(name)
        box = box_of(whole.shape, cut, rank)
        part = (factor * whole)[box.slices]
        shard = part if cut is None else fc.BoxShard(whole.shape, box.start, part)
        unit, param = name.split(".")
        bias = np.full(3, factor, whole.dtype)  # whole on every rank
        units.append(fc.Unit(unit, {param: shard, "b": bias}))
    strategy = fc.Strategy("hybrid_shard", shard_group_size=grid.shard)
    optimizer = fc.optim.AdamW(lr=0.1)
    data = mesh["replicate", "shard"]
    engine = fc.FSDP(units, data, strategy=strategy, optimizer=optimizer, tensor=mesh["tensor"])
    take_a_step(engine)
    return engine


@settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=engines())
def test_an_engine_on_any_mesh_loads_what_any_other_saved(
    case: tuple[dict[str, Array], Grid, Grid],
) -> None:
    arrays, one, other = case

    def save(backend: fc.Backend) -> Any:
        engine = engine_of(backend, arrays, one, 1)
        fc.checkpoint.save(path, engine, backend)
        return dict(engine.state_dict(full=True).arrays)  # by collectives, of no checkpoint

    def load(backend: fc.Backend) -> Any:
        engine = engine_of(backend, arrays, other, -2)
        fc.checkpoint.load(path, engine, backend)
        return dict(engine.state_dict(full=True).arrays)

    with tempfile.TemporaryDirectory() as path:
        expected = fc.launch(save, world_size=one.ranks, transport="sim", timeout=30)[0]
        check_whole(expected, fc.checkpoint.read(path))
        for found in fc.launch(load, world_size=other.ranks, transport="sim", timeout=30):
            check_whole(expected, found)


# The geometry below.


@settings(max_examples=100, derandomize=True, deadline=None)
@given(data=st.data())
def test_a_run_of_a_box_is_found_in_the_array(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    box = data.draw(boxes(shape))
    bounds = st.integers(0, box.size)
    start, stop = sorted((data.draw(bounds), data.draw(bounds)))
    expected = elements(box, shape)[start:stop]
    found = regions_inside(box, Range(start, stop), shape)
    assert [element for each in found for element in elements(each, shape)] == expected
    assert len(found) <= max(1, 2 * len(shape) - 1)
    is_run = expected == list(range(expected[0], expected[-1] + 1)) if expected else True
    assert is_run or all(isinstance(each, Box) for each in found)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(data=st.data())
def test_the_box_around_a_region_is_the_smallest(data: st.DataObject) -> None:
    shape = data.draw(shapes().filter(lambda shape: 0 not in shape))
    region = data.draw(regions(shape).filter(lambda region: region.size > 0))
    around = bounding_box(region, shape)
    where = np.argwhere(mask(region, shape))
    assert (around.start, around.stop) == (
        tuple(where.min(axis=0).tolist()),
        tuple((where.max(axis=0) + 1).tolist()),
    )
