"""Checkpoints of arrays on a GPU: from there to the host and back, in the order of its streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ckpt_engines, gpu_checkpoints
from support.ckpt_engines import way
from support.gpu_ranks import Together, alone

import fsdpcore as fc


def on_host(body: Any, ranks: int, *args: Any) -> list[Any]:
    return fc.launch(body, world_size=ranks, transport="sim", args=args, timeout=60)


def test_memory_that_is_copied_to_is_page_locked() -> None:
    alone(_page_locked)


def _page_locked(backend: fc.Backend) -> None:
    from cupy.cuda import pinned_memory

    memory = backend.device.page_locked(1 << 20)
    assert pinned_memory.is_memory_pinned(memory.ctypes.data)
    assert (memory.shape, memory.dtype, memory.flags.writeable) == ((1 << 20,), np.uint8, True)
    source = backend.device.xp.arange(1 << 18, dtype=np.int32)
    with backend.device.background() as copied:
        backend.device.fetch(memory.view(np.int32), source)
    assert copied.block(60)
    assert (memory.view(np.int32) == np.arange(1 << 18)).all()


def test_arrays_go_from_a_gpu_to_hosts_and_back(tmp_path: Path) -> None:
    alone(gpu_checkpoints.save, str(tmp_path / "gpu"))
    on_host(gpu_checkpoints.load, 3, str(tmp_path / "gpu"))
    alone(gpu_checkpoints.load, str(tmp_path / "gpu"))
    on_host(gpu_checkpoints.save, 2, str(tmp_path / "host"))
    alone(gpu_checkpoints.load, str(tmp_path / "host"))


def test_two_ranks(two_ranks: Together, tmp_path: Path) -> None:
    two_ranks.run(gpu_checkpoints.save, 2, str(tmp_path))
    two_ranks.run(gpu_checkpoints.load, 2, str(tmp_path))
    alone(gpu_checkpoints.load, str(tmp_path))


@pytest.mark.parametrize("own_stream", [False, True])
def test_what_is_saved_is_what_was_enqueued_before(tmp_path: Path, own_stream: bool) -> None:
    alone(_while_it_computes, str(tmp_path), own_stream)
    for step in (4, 5):
        found = fc.checkpoint.read(tmp_path, step=step)
        assert all((array == gpu_checkpoints.ROUNDS).all() for array in found.values()), step


def _while_it_computes(backend: fc.Backend, path: str, own_stream: bool) -> None:
    gpu_checkpoints.save_while_it_computes(backend, path, own_stream=own_stream)


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"optimizer": "adafactor"}], ids=str
)
@pytest.mark.parametrize("save", [ckpt_engines.save, ckpt_engines.save_in_background])
def test_engines(tmp_path: Path, save: Any, options: dict[str, str]) -> None:
    saved = alone(save, way(1, **options), str(tmp_path))
    for loaded in (
        alone(ckpt_engines.load, way(1, **options), str(tmp_path)),
        *on_host(ckpt_engines.load, 2, way(2, **options), str(tmp_path)),
    ):
        assert loaded == saved


def test_an_engine_with_arrays_in_pinned_memory(tmp_path: Path) -> None:
    saved = alone(ckpt_engines.save, way(1, offload="all"), str(tmp_path))
    assert alone(ckpt_engines.load, way(1), str(tmp_path)) == saved
    assert alone(ckpt_engines.load, way(1, offload="all"), str(tmp_path)) == saved


def test_an_engine_of_two_ranks(two_ranks: Together, tmp_path: Path) -> None:
    saved = two_ranks.run(ckpt_engines.save_in_background, 2, way(2), str(tmp_path))
    assert alone(ckpt_engines.load, way(1), str(tmp_path)) == saved[0]
    assert on_host(ckpt_engines.load, 3, way(3), str(tmp_path)) == [saved[0]] * 3
