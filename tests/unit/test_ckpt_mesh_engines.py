"""Engines on meshes with tensor-parallel layers: saved on one, loaded on another, they go on."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from support.ckpt_mesh_engines import (
    HYBRID,
    MORE,
    STEPS,
    Training,
    Way,
    everything,
    go_on,
    save,
    save_in_background,
    uninterrupted,
)
from support.fsdp_steps import cause_of, launch

import fsdpcore as fc
from fsdpcore.checkpoint import diff, read, rewrite, verify

ALONE = Way(1, 0)
MESH = Way(2, 2)
OTHERS = [
    ALONE,
    Way(2, 1, fc.Strategy("no_shard")),
    Way(1, 4, fc.Strategy("shard_grad_op")),
    Way(1, 3, fc.Strategy("shard_optimizer")),
    Way(3, 2, fc.Strategy(reshard_after_forward=False)),
    Way(4, 2, HYBRID),
]


def on(way, body, *args):
    return launch(lambda backend: body(backend, way, *args), way.ranks)


def check_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def check_close(found, expected, dtype):
    # Sums over other ranks are in another order; Adam divides by roots of small second moments.
    rtol, atol = (1e-9, 1e-12) if dtype == np.float64 else (2e-3, 2e-5)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol, atol, err_msg=name)


@pytest.fixture(scope="module")
def reference():
    """One rank that never stopped: losses and everything at the end."""
    return launch(lambda backend: uninterrupted(backend, ALONE, np.float64), 1)[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the mesh saved, and where."""
    path = tmp_path_factory.mktemp("mesh")
    return on(MESH, save, np.float64, path)[0], path


def check_goes_on(way, saved, path, reference, dtype=np.float64):
    losses, end = reference
    for found, after, finally_ in on(way, go_on, dtype, path):
        check_bits(found, saved)
        np.testing.assert_allclose(after, losses[STEPS:], 1e-9)
        check_close(finally_, end, dtype)


def test_the_mesh_saves_whole_arrays_once(run):
    saved, path = run
    check_bits(read(path), saved)
    assert verify(path).problems == ()
    folder = path / f"step_{STEPS:08d}"
    nbytes = sum(array.nbytes for array in saved.values())
    files = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    assert nbytes < files < nbytes + 4 * 8192  # with headers and checksums


@pytest.mark.parametrize("way", OTHERS, ids=str)
def test_a_mesh_is_loaded_anywhere_and_goes_on(run, reference, way):
    check_goes_on(way, *run, reference)


@pytest.mark.parametrize("way", [Way(4, 2, HYBRID), Way(1, 3)], ids=str)
def test_a_mesh_loads_what_others_saved_and_goes_on(tmp_path, reference, way):
    saved = on(way, save, np.float64, tmp_path)[0]
    check_bits(read(tmp_path), saved)
    check_goes_on(MESH, saved, tmp_path, reference)


def test_saved_in_the_background(tmp_path, reference):
    saved = on(MESH, save_in_background, np.float64, tmp_path)[0]
    check_goes_on(Way(2, 3), saved, tmp_path, reference)


def test_offloaded_and_in_half_precision(tmp_path):
    half = {"precision": fc.Precision(ml_dtypes.bfloat16)}
    options = {"offload": fc.Offload(tmp_path, what="all"), "window": False}
    one = Way(2, 2, options={**half, **options})
    saved = on(one, save, np.float32, tmp_path / "run")[0]
    check_bits(read(tmp_path / "run"), saved)
    for found, _, _ in on(Way(1, 3, options=half), go_on, np.float32, tmp_path / "run"):
        check_bits(found, saved)


# What else an engine can hold.


def special(backend, data, tensor, factor=1.0):
    """Frozen boxes, boxes of specs, arrays that are ignored, and ties, after one update."""
    mesh = fc.Mesh(backend, {"data": data, "tensor": tensor})
    group = mesh["tensor"]
    low, high = (9 * each // group.world_size for each in (group.rank, group.rank + 1))
    whole = factor * np.arange(45, dtype=np.float64).reshape(5, 9)

    def columns(array):
        return fc.BoxShard(array.shape, (0, low), array[:, low:high].copy())

    u = {"w": columns(whole / 3), "b": np.full(7, factor), "f": columns(whole)}
    drawn = fc.Spec((5, 9), np.float64, fc.initializers.normal(factor))
    v = {"t": fc.Tied("u", "w"), "i": factor * np.arange(4), "s": drawn[:, low:high]}
    units = [fc.Unit("u", u, frozen="f"), fc.Unit("v", v, ignored="i")]
    engine = fc.FSDP(units, mesh["data"], tensor=group, optimizer=fc.optim.AdamW())
    with engine.step() as step:
        for unit in engine.units:
            with step.forward(unit):
                pass
        for unit in reversed(engine.units):
            with step.backward(unit) as (params, grads):
                for name in grads:
                    grads[name] = params[name]
        step.update()
    return engine


def test_frozen_boxes_specs_ignored_arrays_and_ties(tmp_path):
    def first(backend):
        engine = special(backend, 2, 2)
        fc.checkpoint.save(tmp_path, engine, backend)
        return everything(engine)

    saved = launch(first, 4)[0]
    assert saved["u.f"].tolist() == np.arange(45).reshape(5, 9).tolist()
    assert saved["v.i"].tolist() == [0, 1, 2, 3]
    check_bits(read(tmp_path), saved)

    def second(backend):
        engine = special(backend, 1, 3, factor=-2.0)
        before = everything(engine)
        assert all(before[name].tobytes() != array.tobytes() for name, array in saved.items())
        fc.checkpoint.load(tmp_path, engine, backend)
        return everything(engine)

    for found in launch(second, 3):
        check_bits(found, saved)


# Who takes part.


@pytest.mark.parametrize("verb", ["save", "load"])
def test_the_ranks_that_shard_alone_are_refused(run, verb):
    def body(backend):
        engine = Training(backend, MESH, np.float64).engine
        getattr(fc.checkpoint, verb)(run[1], engine, engine.backend)

    error = cause_of(body, MESH.ranks)
    assert isinstance(error, fc.ArgumentError)
    assert "are on ranks [0, 1, 2, 3], of which" in str(error)
    assert "the backend that the mesh was made of" in str(error)


@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_backend_of_another_job_is_refused(run, verb):
    """Whether all ranks of the mesh take part, nobody could tell."""

    def body(backend):
        engine = Training(backend, Way(1, 2), np.float64).engine
        verb_of = getattr(fc.checkpoint, verb)
        return cause_of(lambda other: verb_of(run[1], engine, other))

    for error in launch(body, 2):
        assert isinstance(error, fc.ArgumentError)
        assert "belongs to another job than the backend" in str(error)


def test_a_damaged_file_makes_all_ranks_of_the_mesh_load_the_step_before(tmp_path):
    def body(backend):
        training = Training(backend, MESH, np.float64)
        for _ in range(2):
            training.train(1)
            fc.checkpoint.save(tmp_path, training.engine, backend)
        backend.barrier()
        if backend.rank == 0:  # of which not all ranks read something
            path = tmp_path / "step_00000002" / "rank_3.safetensors"
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        backend.barrier()
        loaded = fc.checkpoint.load(tmp_path, training.engine, backend)
        return loaded.step, training.engine.steps

    assert launch(body, MESH.ranks) == [(1, 1)] * MESH.ranks


# Tools.


def test_written_anew_by_a_tool_it_is_loaded_by_a_mesh(run, tmp_path, reference):
    saved, path = run
    folder = tmp_path / rewrite(path, tmp_path, 3).name
    told = json.loads((folder / "metadata.json").read_text("utf-8"))
    assert told["info"]["world_size"] == told["world_size"] == 3
    assert diff(path, tmp_path).equal
    check_goes_on(Way(2, 3), saved, tmp_path, reference)


def test_one_rank_follows_in_single_precision(tmp_path):
    """As a user would have it: float32, saved on the mesh, looked at on one rank."""
    saved = on(MESH, save, np.float32, tmp_path)[0]
    losses, end = launch(lambda backend: uninterrupted(backend, ALONE, np.float32), 1)[0]
    ((found, after, finally_),) = on(ALONE, go_on, np.float32, tmp_path)
    check_bits(found, saved)
    np.testing.assert_allclose(after, losses[STEPS:], 1e-4)
    assert len(after) == MORE
    check_close(finally_, end, np.float32)
