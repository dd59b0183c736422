"""Every public argument that is an integer takes NumPy's as well, and no bool."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fsdpcore as fc
from fsdpcore import checkpoint as ck
from fsdpcore import parallel as pa
from fsdpcore.core.quantities import as_rate
from fsdpcore.simulation.network import Level

Of = Callable[[Callable[[int], Any]], Any]
ONES = np.ones((4, 4), np.float32)
SIZES = [fc.UnitSize("a", 100), fc.UnitSize("b", 50)]
WHOLE = ck.ArrayBox((4, 4), (0, 0), (4, 4))


def _engine(backend: fc.Backend, **options: Any) -> fc.FSDP:
    return fc.FSDP([fc.Unit("u", {"w": ONES})], backend, optimizer=fc.optim.SGD(lr=1.0), **options)


def _stepped(engine: fc.FSDP, value: Any) -> Any:
    engine.steps = value
    return engine.steps


def _message(b: fc.Backend, tag: Any) -> Any:
    work = b.isend(ONES, 0, tag=tag)
    got = b.recv(np.empty_like(ONES), 0, tag=tag)
    work.wait()
    return got


def _saved(b: fc.Backend, folders: Iterator[Path], step: Any) -> Any:
    saved = ck.save(next(folders), {"m": ONES}, b, step=step)
    return saved.step, type(saved.step)


def _read(b: fc.Backend, folder: Path, **options: Any) -> Any:
    ck.save(folder, {"m": ONES}, b, step=1)
    return ck.read(folder, **options)


def _specs(**options: Any) -> Any:
    made = ck.TensorShardSpec("m", "f4", (4, 4), **options)
    return made, [type(each) for each in (made.replica, made.replicas)]


def _size(backend: fc.Backend) -> int:
    return backend.world_size


def _params(layer: Any) -> Any:
    return layer.init(np.random.default_rng(0))


def arguments(b: fc.Backend, folders: Iterator[Path]) -> Iterator[tuple[str, Of]]:
    """Give the name of each, and what calls it with ``i(number)`` in place of a number."""
    yield "root", lambda i: fc.broadcast(ONES, b, root=i(0))
    yield "root of ragged", lambda i: fc.gather_v(ONES, b, root=i(0))
    yield "root of scatter", lambda i: fc.scatter(ONES, b, root=i(0))
    yield "counts", lambda i: fc.reduce_scatter_v(ONES[:1], b, [i(1)])
    yield "send_counts", lambda i: fc.all_to_all_v(ONES[:1], b, [i(1)], recv_counts=[i(1)])
    yield "bucket_bytes", lambda i: fc.all_reduce_many([ONES], b, bucket_bytes=i(1))
    yield "tag", lambda i: _message(b, i(1))
    yield "dst", lambda i: b.isend(ONES, i(0), tag=9) and b.recv(np.empty_like(ONES), 0, tag=9)
    yield "iprobe", lambda i: b.iprobe(i(0), tag=77)
    yield "sub", lambda i: b.sub([i(0)]).ranks
    yield "split", lambda i: b.split(i(1), i(1)).ranks
    yield "empty", lambda i: b.empty(i(1)).shape
    yield "mesh", lambda i: fc.Mesh(b, {"data": i(1)})["data"].ranks
    yield "Spec", lambda i: fc.Spec(i(1)).shape
    yield "UnitSize", lambda i: fc.UnitSize("u", i(1), frozen=i(1), ties=(("v", "a", i(1)),))
    yield "make_plan", lambda i: fc.make_plan(SIZES, i(1), prefetch=i(1), microbatches=i(1))
    yield (
        "make_plan, more",
        lambda i: fc.make_plan(
            SIZES, 2, rank=i(1), optimizer_states=i(1), prefetch_bytes=i(1), tensor=i(1)
        ),
    )
    yield (
        "memory_estimate",
        lambda i: fc.memory_estimate(SIZES, i(1), prefetch=i(1)),
    )
    yield "memory_estimate of a number", lambda i: fc.memory_estimate(i(1), 2, layers=i(1))
    yield "reshard_after_forward", lambda i: fc.Strategy("full_shard", reshard_after_forward=i(2))
    yield "shard_group_size", lambda i: fc.Strategy("hybrid_shard", shard_group_size=i(1))
    yield "Prefetch", lambda i: fc.Prefetch(i(1), max_bytes=i(1), reductions=i(1))
    yield "prefetch", lambda i: _engine(b, prefetch=i(1)).prefetching
    yield "seed", lambda i: _engine(b, seed=i(1))
    yield "LossScale", lambda i: fc.LossScale(interval=i(1))
    yield "Offload", lambda i: fc.Offload(ahead=i(1))
    yield "steps", lambda i: _stepped(_engine(b), i(1))
    yield "src", lambda i: _engine(b).load_full({"u.w": ONES}, src=i(0))
    yield "to", lambda i: _engine(b).state_dict(full=True, to=i(0)).arrays["u.w"]
    yield "plan", lambda i: _engine(b).plan(microbatches=i(1))
    yield "ShardedArray", lambda i: fc.ShardedArray((i(1),), np.dtype("f4"), (), i(0), i(1))
    yield (
        "ArrayPiece",
        lambda i: fc.ShardedArray((4,), np.dtype("f4"), (fc.ArrayPiece(i(1), i(2), ONES[0, :1]),)),
    )
    yield "rate", lambda i: as_rate(i(5), "a rate")
    yield "level", lambda i: Level("host", i(2), 1e9, 0.0)
    yield "BoxShard", lambda i: fc.BoxShard((4, i(1)), (i(1), i(0)), ONES[:1, :1]).box
    yield "ArrayBox", lambda i: ck.ArrayBox((4, i(1)), (i(1), i(0)), (i(1), i(1)))
    yield "Range", lambda i: _specs(regions=(ck.Range(i(1), i(1)),))
    yield "Range, more", lambda i: _specs(regions=(ck.Range(i(1), i(7)),))
    yield "Box", lambda i: _specs(regions=(ck.Box((i(1), i(1)), (i(3), i(4))),))
    yield "replicas", lambda i: _specs(replica=i(0), replicas=i(1))
    yield "Retention", lambda i: ck.Retention(last=i(1), every=i(1))
    yield "save", lambda i: _saved(b, folders, i(1))
    yield "read", lambda i: _read(b, next(folders), step=i(1), threads=i(1))
    yield "compute_shard_sizes", lambda i: ck.compute_shard_sizes(i(1), i(1))
    yield (
        "flat_shard_metadata",
        lambda i: ck.flat_shard_metadata({"m": i(1)}, "f4", i(1), step=i(1), save_id="x"),
    )
    yield "bounds", lambda i: pa.bounds(i(1), i(1))
    yield "parallel.split", lambda i: pa.split(i(1), i(1), i(0))
    yield "Linear", lambda i: _params(pa.ColumnParallelLinear(i(1), i(1), b))
    yield "Attention", lambda i: _params(pa.ParallelAttention(i(1), i(1), b))
    yield "MLP", lambda i: _params(pa.ParallelMLP(i(1), i(1), b))
    yield "Embedding", lambda i: _params(pa.VocabParallelEmbedding(i(1), i(1), b))
    yield "PositionEmbedding", lambda i: _params(pa.PositionEmbedding(i(1), i(1)))
    yield "LayerNorm", lambda i: _params(pa.LayerNorm(i(1)))
    yield "axis", lambda i: pa.local_part(ONES, b, i(1))
    yield "axis of all_gather", lambda i: pa.all_gather(ONES, b, i(1))
    yield "axis of reduce_scatter", lambda i: pa.reduce_scatter(ONES, b, i(1))
    yield "vocab", lambda i: pa.cross_entropy(ONES[:, :1], np.zeros(4, int), b, vocab=i(1))
    yield "warmup", lambda i: fc.optim.schedules.Cosine(1.0, i(1), i(10))
    yield (
        "world_size",
        lambda i: fc.launch(_size, world_size=i(1), transport="sim"),
    )


def test_numpy_integers_are_taken_and_bools_are_not(tmp_path: Path) -> None:
    folders = (tmp_path / str(n) for n in itertools.count())
    wrong: list[str] = []

    def main(backend: fc.Backend) -> None:
        for name, call in arguments(backend, folders):
            expected = repr(call(int))
            for kind in (np.int64, np.uint8):
                try:
                    found = repr(call(kind))
                except Exception as error:
                    found = repr(error)
                if found != expected:
                    wrong.append(f"{name} of {kind.__name__}: {found:.300}, not {expected:.300}")
            if name == "reshard_after_forward":  # which may be a bool as well
                continue
            try:
                call(bool)
            except (fc.ArgumentError, fc.ConfigError):
                continue
            except Exception as error:
                wrong.append(f"{name} raises {error!r:.300} for a bool")
                continue
            wrong.append(f"{name} takes a bool")

    fc.launch(main, world_size=1, transport="sim")
    assert not wrong, "\n".join(wrong)
