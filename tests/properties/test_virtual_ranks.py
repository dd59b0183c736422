"""Virtual ranks: no bit depends on how many ranks compute them, with which strategy, and where."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st
from support import spmd
from support.counting import CountingSim
from support.fsdp_device import needs_compiler, on_gpus
from support.leaf_programs import SCALE, LeafProgram

import fsdpcore as fc
from fsdpcore.core.geometry.leaf_tree import LeafTree
from fsdpcore.fsdp.sharding.virtual_ranks import LEAF_BLOCK
from fsdpcore.fsdp.step.norm import joined, local_part
from fsdpcore.fsdp.units import arithmetic

FEW = LeafProgram(
    leaves=8,
    sizes=(3000, 5, 1025),
    passes=2,
    absent=frozenset({(2, 1)}),
    whole=False,
    tied=True,
    kind="fp32",
    clip=1e3,
    optimizer=fc.optim.AdamW(lr=1e-2),
)


def canonical(leaves: int) -> dict[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Every node of the tree as its leaves, with its two children; built level by level."""
    level = [(leaf,) for leaf in range(leaves)]
    nodes: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = dict.fromkeys(level, ())
    while len(level) > 1:
        pairs = [*zip(level[::2], level[1::2], strict=False)]
        nodes.update({left + right: (left, right) for left, right in pairs})
        level = [left + right for left, right in pairs] + (level[-1:] if len(level) % 2 else [])
    return nodes


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 6, 7, 8, 11, 12, 16, 23])
def test_nodes_of_the_tree(leaves: int) -> None:
    tree, nodes = LeafTree(leaves), canonical(leaves)
    runs = [range(a, b) for a in range(leaves) for b in range(a + 1, leaves + 1)]
    for run in runs:
        assert tree.is_node(run) == (tuple(run) in nodes)
        for middle in run[1:]:
            left, right = range(run.start, middle), range(middle, run.stop)
            expected = nodes.get(tuple(run)) == (tuple(left), tuple(right))
            assert tree.are_children(left, right) == expected
        # The largest nodes in a run: no two of them have a parent in it.
        inside = [node for node in nodes if set(node) <= set(run)]
        largest = [n for n in inside if not any(set(n) < set(other) for other in inside)]
        assert [tuple(node) for node in tree.cover(run)] == sorted(largest)


@settings(max_examples=25)
@given(st.data())
def test_sums_are_those_of_the_tree_on_any_number_of_ranks(data: st.DataObject) -> None:
    draw = data.draw
    leaves = draw(st.integers(1, 9))
    sizes = tuple(draw(st.lists(st.sampled_from([1, 7, 1024, 1030, 3000]), min_size=1, max_size=3)))
    program = LeafProgram(
        leaves=leaves,
        sizes=sizes,
        passes=draw(st.integers(1, 2)),
        absent=draw(
            st.frozensets(st.tuples(st.integers(0, leaves - 1), st.integers(0, len(sizes) - 1)))
        ),
        whole=draw(st.booleans()),
        tied=draw(st.booleans()),
        kind=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        clip=None,
        optimizer=fc.optim.SGD(lr=1.0),
        steps=1,
        divisor=draw(st.sampled_from([None, 3.0])),
    )
    ranks = draw(st.integers(1, leaves))
    shards = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    kept = draw(st.sampled_from([True, False, shards]))
    strategy = draw(
        st.sampled_from(
            [
                *("shard_grad_op", "shard_optimizer", "no_shard"),
                fc.Strategy("full_shard", reshard_after_forward=kept),
                fc.Strategy("hybrid_shard", bool(kept), shard_group_size=shards),
            ]
        )
    )
    options = {
        "strategy": strategy,
        "window": draw(st.booleans()),
        "prefetch": draw(st.sampled_from([0, fc.Prefetch(1, reductions=1)])),
    }
    found = fc.launch(lambda backend: program.train(backend, **options), world_size=ranks)[0]
    sums, initial = program.sums(), program.initial()
    divisor = np.float32(program.divisor or leaves)
    scale = np.float32(SCALE if program.kind == "fp16" else 1.0)
    for unit in program.names:
        expected = initial[unit] - sums[unit] / divisor / scale
        np.testing.assert_array_equal(found[f"{unit}.w"], expected)


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
    st.sampled_from([1.0, 2.0, 3.0, math.inf]),
    st.sampled_from([1.0, 1e-160, 1e160]),
)
def test_a_norm_is_the_same_however_its_blocks_are_dealt(
    seed: int, blocks: list[int], p: float, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    size = sum(blocks) * LEAF_BLOCK - int(rng.integers(0, LEAF_BLOCK))
    values = rng.standard_normal(size) * 10.0 ** rng.uniform(-9, 9, size) * scale
    bounds = [0, *np.cumsum(blocks) * LEAF_BLOCK]
    parts = [local_part([values[a:b]], p) for a, b in pairwise(bounds)]
    whole = joined([local_part([values], p)], p, single=False)
    assert joined(parts, p, single=False) == joined(parts[::-1], p, single=False) == whole
    largest = np.abs(values).max()
    expected = np.linalg.norm(values / largest, p) * largest
    np.testing.assert_allclose(whole, expected, rtol=1e-13)


def equal_bits(states: list[dict[str, Any]]) -> None:
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for name, value in state.items():
            np.testing.assert_array_equal(value, states[0][name], err_msg=name)


@pytest.mark.parametrize(
    "optimizer",
    [
        fc.optim.AdamW(lr=1e-2),
        fc.optim.Average(fc.optim.NAdam(lr=1e-2), ema=0.9),
        fc.optim.Lion(lr=1e-3),
        fc.optim.RMSprop(lr=1e-3, momentum=0.9),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_bits_of_a_training_are_those_of_one_rank(optimizer: Any) -> None:
    # Of the second step, the update is skipped on all ranks.
    changes = {"optimizer": optimizer, "kind": "fp16", "steps": 3, "overflows": 1}
    program = LeafProgram(**{**vars(FEW), **changes})

    def main(backend: fc.Backend) -> dict[str, Any]:
        return program.train(backend, strategy="full_shard", window=False)

    found = [fc.launch(main, world_size=ranks)[0] for ranks in (1, 2, 3, 7)]
    assert list(np.isfinite(found[0]["norms"])) == [True, False, True]
    equal_bits(found)


def test_bits_of_adafactor_are_those_of_one_rank() -> None:
    shapes = ((60, 51), 5, (3, 41, 25))
    optimizer = fc.optim.Adafactor(beta1=0.9)
    options = {"sizes": shapes, "optimizer": optimizer, "kind": "fp64", "steps": 3}
    program = LeafProgram(**{**vars(FEW), **options})

    def main(backend: fc.Backend, strategy: str) -> dict[str, Any]:
        return program.train(backend, strategy=strategy)

    cases = [(1, "full_shard"), (2, "no_shard"), (2, "full_shard"), (5, "shard_optimizer")]
    equal_bits([fc.launch(main, world_size=ranks, args=(name,))[0] for ranks, name in cases])


def test_bits_do_not_depend_on_the_ranks_that_share_boxes() -> None:
    """Of two tensor-parallel ranks, each has a half of one parameter and all of the other."""

    def drawn(*seed: int) -> tuple[Any, Any]:
        rng = np.random.default_rng(seed)
        return rng.standard_normal((150, 90)), rng.standard_normal(1500)

    def main(backend: fc.Backend, strategy: str) -> dict[str, Any]:
        mesh = fc.Mesh(backend, {"shard": backend.world_size // 2, "tensor": 2})
        first = 45 * mesh["tensor"].rank
        half = (slice(None), slice(first, first + 45))
        whole, bias = drawn(7)
        box = fc.BoxShard((150, 90), (0, first), np.ascontiguousarray(whole[half]))
        engine = fc.FSDP(
            [fc.Unit("u", {"b": bias, "w": box})],
            mesh["shard"],
            tensor=mesh["tensor"],
            strategy=strategy,
            optimizer=fc.optim.Adafactor(beta1=0.9),
            virtual_ranks=6,
        )
        norms = []
        for number in range(3):
            with engine.step() as step:
                for leaf in step.leaves():
                    with step.forward("u"):
                        pass
                    with step.backward("u") as (_, grads):
                        grad, grads["b"] = drawn(number, leaf)
                        grads["w"] = grad[half]
                norms += [step.grad_norm(norm_type=1.0), step.update(clip=10.0)]
        return {**engine.state_dict(full=True), "norms": np.array(norms)}

    cases = [(2, "full_shard"), (4, "full_shard"), (4, "no_shard"), (6, "shard_grad_op")]
    equal_bits([each for n, name in cases for each in fc.launch(main, world_size=n, args=(name,))])


@needs_compiler
def test_bits_on_gpus_are_those_of_one_rank() -> None:
    options = {"sizes": ((60, 51), 1025), "kind": "fp64", "clip": 10.0}
    program = LeafProgram(**{**vars(FEW), **options, "optimizer": fc.optim.Adafactor()})

    values = np.random.default_rng(1).standard_normal(9 * LEAF_BLOCK - 1)

    def main(backend: fc.Backend) -> dict[str, Any]:
        state = program.train(backend, strategy="full_shard")
        given = backend.device.xp.asarray(values)
        bounds = [n * LEAF_BLOCK for n in range(backend.world_size)] + [values.size]
        cut = [given[a:b] for a, b in pairwise(bounds)]
        for p in (1.0, 2.0, 3.0, math.inf):
            parts = [local_part([each], p, by_blocks=True) for each in cut]
            state[f"norm {p}"] = joined(parts, p, single=False)
            np.testing.assert_allclose(state[f"norm {p}"], np.linalg.norm(values, p), 1e-12)
        return state

    equal_bits([on_gpus(main, ranks)[0] for ranks in (1, 3)])


def train_few(backend: fc.Backend, strategy: str) -> dict[str, Any]:
    return FEW.train(backend, strategy=strategy)


def test_blas_of_another_package_is_no_difference() -> None:
    """Ranks that have loaded it compute with NumPy's all the same."""
    pytest.importorskip("scipy.linalg")
    found = arithmetic._with_one_thread()
    loaded = [each for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"]
    assert len(found) == 1 < len(loaded)
    assert all("numpy" in each["filepath"] for each in found)


@pytest.mark.parametrize("transport", ["zmq", "mpi", "virtual"])
def test_bits_are_those_of_threads_on_every_transport(transport: str) -> None:
    alone = fc.launch(train_few, world_size=1, args=("no_shard",))[0]
    for strategy in ("full_shard", "no_shard"):
        found = spmd.run(train_few, transport=transport, world_size=3, args=(strategy,))
        equal_bits([alone, *found])


def bytes_of_a_step(backend: fc.Backend, size: int, strategy: Any, leaves: int) -> tuple[int, int]:
    """What a rank has sent, and what the engine says of that."""
    units = [fc.Unit("u", {"w": fc.Spec((size,))})]
    engine = fc.FSDP(
        units,
        backend,
        strategy=strategy,
        optimizer=fc.optim.SGD(lr=1.0),
        window=False,
        virtual_ranks=leaves,
        algorithm="direct",
    )
    before = sum(backend.sent)  # type: ignore[attr-defined]
    with engine.step() as step:
        for _ in step.leaves():
            with step.forward("u"):
                pass
            with step.backward("u"):
                pass
        step.update()
    return sum(backend.sent) - before, engine.stats.bytes_sent  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("strategy", "ranks", "leaves", "formula"),
    [
        # Powers of two: what is sent without virtual ranks.
        ("full_shard", 4, 8, lambda n, rank: 2 * 2 * 3 * n // 4 + 3 * n // 4),
        ("no_shard", 4, 16, lambda n, rank: 2 * 3 * n // 4),
        # Runs of 3, 3 and 2 leaves, which are 2, 2 and 1 nodes of the tree.
        ("full_shard", 3, 8, lambda n, rank: 3 * 2 * 2 * n // 3 + [2, 2, 1][rank] * 2 * n // 3),
        ("no_shard", 3, 8, lambda n, rank: [2, 2, 1][rank] * 2 * n // 3 + 2 * n // 3),
        # Groups of 4 and 3 leaves, each of which is a node.
        (
            fc.Strategy("hybrid_shard", shard_group_size=2),
            4,
            7,
            lambda n, rank: 2 * 2 * n // 2 + n // 2 + n // 4 + n // 4,
        ),
    ],
)
def test_a_step_sends_what_the_formulas_say(
    strategy: Any, ranks: int, leaves: int, formula: Any
) -> None:
    # Where there is one shard, not even its end is padded.
    size = 12 * LEAF_BLOCK + (12 if strategy == "no_shard" else 0)

    def run(elements: int) -> list[Any]:
        args = (elements, strategy, leaves)
        return spmd.run_on(CountingSim, bytes_of_a_step, world_size=ranks, args=args, shm="off")

    control, found = run(0), run(size)
    for rank, ((sent, told), (agreed, told_too)) in enumerate(zip(found, control, strict=True)):
        assert sent - agreed == told - told_too == 4 * formula(size, rank), rank


@pytest.mark.parametrize("ranks", [1, 2])
def test_blas_has_one_thread_however_many_the_rank_had(ranks: int) -> None:
    def threads() -> set[int]:
        found = threadpoolctl.threadpool_info()
        return {each["num_threads"] for each in found if each["user_api"] == "blas"}

    def main(backend: fc.Backend) -> tuple[set[int], set[int]]:
        given = threads()
        backend.barrier()
        FEW.train(backend)
        return given, threads()

    before = threads()
    # A thread that is not the one that has limited BLAS before.
    assert fc.launch(main, world_size=ranks, blas_threads=3) == [({3}, {1})] * ranks
    assert threads() == before


def refused(words: str, *, algorithm: str = "auto", **options: Any) -> None:
    def main(backend: fc.Backend) -> None:
        program = LeafProgram(**{**vars(FEW), **options})
        with pytest.raises((fc.ArgumentError, fc.StateError), match=words):
            program.train(backend, algorithm=algorithm)

    fc.launch(main, world_size=3)


def test_what_would_depend_on_the_ranks_is_refused() -> None:
    refused("2 virtual ranks are too few for 3 ranks", leaves=2)
    refused("virtual_ranks must be an integer", leaves=1.5)
    refused("order of its own", algorithm="ring")

    def main(backend: fc.Backend) -> None:
        params = {"w": np.zeros(4, np.float32)}
        half = fc.Precision(np.float16)
        with pytest.raises(fc.ArgumentError, match=r"reduce_dtype=np\.float32"):
            fc.FSDP([fc.Unit("u", params)], backend, precision=half, virtual_ranks=4)
        engine = fc.FSDP(
            [fc.Unit("u", params)], backend, virtual_ranks=4, optimizer=fc.optim.SGD(lr=1.0)
        )
        assert list(engine.leaves) == [[0, 1], [2], [3]][backend.rank]
        with engine.step() as step:
            with (
                pytest.raises(fc.StateError, match=r"for leaf in step\.leaves"),
                step.forward("u"),
            ):
                pass
            leaves = step.leaves()
            next(leaves)
            with step.forward("u"):
                pass
            with pytest.raises(fc.StateError, match="without its backward"):
                next(leaves)
        with engine.step() as step:
            for _ in step.leaves():
                with step.forward("u"):
                    pass
                with step.backward("u") as (_, grads):
                    grads["w"] = np.ones(4, np.float32)
                with pytest.raises(fc.StateError, match="before all virtual ranks"):
                    step.update()
            with pytest.raises(fc.StateError, match="gone through once"):
                next(step.leaves())
            step.update()
        with engine.evaluation() as step, step.forward("u") as found:
            np.testing.assert_array_equal(found["w"], -1.0)

    fc.launch(main, world_size=3)
