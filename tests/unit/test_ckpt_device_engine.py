"""Checkpoints of engines whose arrays are on GPUs, with NCCL: both of them the stand-in's."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support import gpu_checkpoints
from support.ckpt_engines import STEPS, Bits, all_of, load, save, train, way
from support.fsdp_device import Way, engine_of, on_gpus, on_host

import fsdpcore as fc
from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage

GRADIENTS, NONE = fc.Strategy("shard_grad_op"), fc.Strategy("no_shard")


@pytest.mark.parametrize("saves_on", ["host", "gpus"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (way(2), way(3)),
        (way(3, strategy=GRADIENTS, optimizer="two"), way(1, optimizer="two")),
        (way(2, precision="bf16"), way(2, precision="bf16", strategy=NONE)),
    ],
    ids=["2 to 3", "3 to 1", "strategies"],
)
def test_an_engine_goes_on_wherever_it_was_saved(tmp_path, saves_on, first, second):
    saves, loads = (on_host, on_gpus) if saves_on == "host" else (on_gpus, on_host)
    check(tmp_path, saves(save, first.ranks, first, tmp_path), loads, second)


def test_arrays_that_were_offloaded_are_saved_and_loaded(tmp_path):
    for offload, folder in (("parameters", "a"), ("all", "b")):
        path = tmp_path / folder
        saved = on_gpus(save, 2, way(2, offload=offload), path)
        check(path, saved, on_gpus, way(2))
        check(path, saved, on_gpus, way(2, offload=offload))


def test_arrays_without_an_engine_are_saved_and_loaded_over_nccl(tmp_path, monkeypatch):
    """What ``tests/gpu`` does on a GPU."""
    monkeypatch.setattr(gpu_checkpoints, "ROUNDS", 3)
    monkeypatch.setattr(gpu_checkpoints, "SHAPE", (250, 200))
    monkeypatch.delitem(gpu_checkpoints.ARRAYS, "large")
    one, two = tmp_path / "one", tmp_path / "two"
    on_gpus(gpu_checkpoints.save, 2, one)
    on_host(gpu_checkpoints.load, 3, one)
    on_host(gpu_checkpoints.save, 2, two)
    on_gpus(gpu_checkpoints.load, 3, two)
    on_gpus(_while_it_computes, 1, two)
    for step in (4, 5):
        arrays = fc.checkpoint.read(two, step=step)
        assert all((array == 3).all() for array in arrays.values())


def _while_it_computes(backend: fc.Backend, path: Any) -> None:
    gpu_checkpoints.save_while_it_computes(backend, path, own_stream=True)


def check(path: Any, saved: list[Bits], loads: Any, second: Way) -> None:
    """Raise unless an engine elsewhere has the same after a load."""
    for loaded in loads(load, second.ranks, second, path):
        assert loaded == saved[0]


class Gate(Files):
    """Nothing is written to a file of arrays until it is opened."""

    def __init__(self) -> None:
        self.open_now = threading.Event()
        self.reached = threading.Event()

    def writev(self, fd: int, buffers: Any) -> int:
        self.reached.set()
        assert self.open_now.wait(60)
        return super().writev(fd, buffers)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    gate = Gate()
    storage = LocalStorage(str(tmp_path), gate)

    def body(backend: fc.Backend) -> Bits:
        engine = engine_of(backend, way(2))
        train(engine, STEPS)
        then = all_of(engine)
        with fc.checkpoint.AsyncCheckpointer(storage, backend) as checkpointer:
            future = checkpointer.save(engine)
            assert gate.reached.wait(60)
            train(engine, 2)
            assert not future.done()
            backend.barrier()
            gate.open_now.set()
            assert future.wait().step == STEPS
        assert all_of(engine) != then
        return then

    check(tmp_path, on_gpus(body, 2), on_host, way(1))
