"""What is public is what these lists say: ``dir()`` shows that, ``help()`` explains all of it."""

from __future__ import annotations

import importlib
import inspect
import re
import types

import numpy as np
import pytest
from fsdpcore.transports.simulated.backend import SimBackend
from support import spmd

import fsdpcore as fc

OPERATIONS = """
    all_gather all_gather_object all_gather_v all_reduce all_reduce_many all_to_all all_to_all_v
    average_metrics barrier broadcast broadcast_object coalesce exscan gather gather_object
    gather_v recv_object reduce reduce_scatter reduce_scatter_v scan scatter scatter_object
    scatter_v send_object
"""

ERRORS = """
    ArgumentError CheckpointError CheckpointNotFoundError ClosedError CommTimeoutError
    CommunicationError ConfigError CorruptCheckpointError ElasticError FsdpcoreError MismatchError
    MissingDependencyError NonFiniteGradientError PeerFailedError ProtocolError RankFailedError
    RendezvousError StateError UnknownTransportError UnsupportedError
"""

MODULES = {
    "fsdpcore": f"""
        {OPERATIONS} {ERRORS}
        ANY ArrayPiece Backend Batch BoxShard Capabilities Chain Compression EngineState FSDP Layer
        LayerStack LossScale MemoryEstimate Mesh MessageStatus Offload OuterStep ParamTree Plan
        Precision Prefetch ReduceOp Report ShardedArray ShardedLayers Spec Step Strategy SubBackend
        Tied Unit UnitSize Work __version__ adapters checkpoint data dump_trace elastic errors
        fully_shard init initializers launch
        make_plan memory_estimate optim parallel train_step wait_all wait_any
    """,
    "fsdpcore.errors": ERRORS,
    "fsdpcore.checkpoint": """
        ArrayBox AsyncCheckpointer AsyncDistributedCheckpointer Box BoxShard CheckpointFuture
        Cleaned DcpLoaded Difference Exported Latest Loaded PerRank Problem Range Retention Saved
        ShardMetadata TensorShardSpec Verified clean compute_shard_sizes diff export_safetensors
        flat_shard_metadata flat_shard_sizes import_dcp import_safetensors latest load load_dcp
        load_distributed metrics read read_dcp reshard rewrite save save_distributed steps verify
    """,
    "fsdpcore.parallel": """
        BlockTraffic ColumnParallelLinear GatherSequence LayerNorm ParallelAttention ParallelBlock
        ParallelMLP PassTraffic PositionEmbedding RMSNorm RowParallelLinear ScatterSequence Scope
        VocabParallelEmbedding all_gather all_reduce bounds cross_entropy local_part prefixed
        reduce_scatter split
    """,
    "fsdpcore.adapters": "arrays autograd jax",
    "fsdpcore.adapters.arrays": "from_numpy function layer to_numpy",
    "fsdpcore.adapters.autograd": "layer loss loss_and_grads",
    "fsdpcore.adapters.jax": "fold_in layer loss loss_and_grads",
    "fsdpcore.data": "Batch Stream",
    "fsdpcore.elastic": "ElasticError ElasticThreads Job launch run",
    "fsdpcore.initializers": """
        Constant Initializer Normal Ones Uniform Zeros constant normal ones uniform zeros
    """,
    "fsdpcore.optim": """
        Adafactor Adagrad Adam AdamW Average Lion Muon NAdam Optax Optimizer OptimizerRange
        ParamGroups PieceSpec RAdam RMSprop Ranks Reduce SGD Schedule ShardPiece Torch
        WholeParameterOptimizer
        elementwise_ranges resolve schedules whole_parameter_specs
    """,
    "fsdpcore.optim.schedules": "Constant Cosine InverseSqrt Linear Schedule Step",
}

# What instances show, attributes included.
BACKEND = """
    abort barrier capabilities clock close device empty host_group hosts iprobe irecv isend probe
    rank ranks recv root send sendrecv shared_window split sub timeout world_size
"""
ENGINE = """
    algorithm all_windowed averaged backend close device evaluation everyone full_params
    full_tree gathered gathered_peak has_pending_prefetch held host_algorithm leaves load_full
    load_info load_state_dict loss_scale num_parameters offload offload_stats on_step
    partially_updated
    plan precision prefetch prefetching release report reshard state_dict stats step steps strategy
    tensor tree units unshard virtual_ranks
    update_shards windowed writing_state xp
"""
UNIT = """
    begin_gradients build device drop_gradients dtype dtypes frozen gathered_bytes grad_shard
    grad_state has_pending_prefetch ignored keep_gradients layout load name names
    optimizer_state params reduce_gradients reshard shard shard_rank split state ties trainable
    trained unshard update update_shards valid_size writing
"""
OBJECTS = {
    "engine": ENGINE,
    "unit": UNIT,
    "declared unit": UNIT,
    "step": """
        backward clip_grad_norm divisor forward grad_norm gradients ignored keeps_params leaves
        no_sync nonfinite skipped tokens training update whole
    """,
    "backend": BACKEND,
    "group": BACKEND,
    "mesh": "axes backend close coordinates ranks shape",
    "work": "done result wait",
    "batch": "all_gather all_reduce all_to_all broadcast gather reduce reduce_scatter",
}


def module(name):
    """The object of a dotted name: modules are reached as a user reaches them, by attributes."""
    first, *rest = name.split(".")
    found = importlib.import_module(first)
    for each in rest:
        found = getattr(found, each)
    return found


@pytest.mark.parametrize("name", MODULES)
def test_dir_of_a_module_is_what_is_public(name):
    found = module(name)
    assert sorted(dir(found)) == sorted(MODULES[name].split())
    assert set(found.__all__) == set(dir(found))
    for each in dir(found):
        public = getattr(found, each)
        if isinstance(public, types.ModuleType):
            public_name = f"{name}.{each}"
            assert public_name in MODULES, f"{public_name} is public: list what it shows"


def shown(value):
    return " ".join(name for name in dir(value) if not name.startswith("_"))


@pytest.mark.parametrize(
    ("kind", "listed"),
    [
        (fc.Backend, "backend"),
        (fc.SubBackend, "group"),
        (fc.Mesh, "mesh"),
        (fc.Work, "work"),
        (fc.Batch, "batch"),
        (fc.FSDP, "engine"),
        (fc.Unit, "unit"),
        (fc.Step, "step"),
    ],
)
def test_help_of_a_class_shows_what_its_instances_show(kind, listed):
    """But for attributes, which its docstring lists."""
    methods, public = set(shown(kind).split()), set(OBJECTS[listed].split())
    assert methods <= public
    words = "\n".join(inspect.getdoc(each) or "" for each in kind.__mro__)
    for name in public - methods:
        assert re.search(rf"^ *(\w+, )*{name}(, \w+)*:", words, re.MULTILINE), name


def _shown(backend):
    x = np.ones(4, np.float32)
    with fc.coalesce(backend) as batch:
        batch.all_reduce(x)
    work = fc.all_reduce(x, backend, async_op=True)
    work.wait()
    mesh = fc.Mesh(backend, {"rank": -1})
    engine = fc.FSDP([fc.Unit("u", {"w": x})], backend)
    found = {"backend": backend, "group": mesh["rank"], "mesh": mesh, "work": work, "batch": batch}
    found |= {"engine": engine, "unit": engine.units[0], "step": engine.step()}
    found |= {"declared unit": fc.Unit("u", {"w": x})}
    return {name: shown(value) for name, value in found.items()}


def test_dir_of_an_object_is_what_is_public():
    for found in spmd.run(_shown, transport="sim", world_size=2):
        assert found == {name: " ".join(sorted(OBJECTS[name].split())) for name in found}


def _backends(backend):
    group = backend.sub([2, 1, 0])
    texts = [repr(backend), repr(group)]
    group.close()
    texts.append(repr(group))
    backend.barrier()
    if backend.rank == 0:
        backend.abort("a reason\nof two lines")
    else:
        with pytest.raises(fc.PeerFailedError):
            backend.recv(np.empty(1), 0, timeout=60)
    texts.append(repr(backend))
    backend.close()
    return [*texts, repr(backend), repr(group)]


def test_repr_of_a_backend_says_which_ranks_and_whether_it_works():
    for rank, found in enumerate(spmd.run_on(SimBackend, _backends, world_size=3)):
        name = f"<SimBackend sim rank {rank} of 3"
        group = f"<SubBackend sim rank {2 - rank} of 3 (ranks 2, 1, 0 of the job)"
        assert found[:3] == [f"{name}>", f"{group}>", f"{group}, closed>"]
        assert re.fullmatch(rf"{name}, broken: .*a reason>", found[3])
        assert "\n" not in "".join(found)


def _works(backend):
    x = np.ones(4, np.float32)
    batch = fc.coalesce(backend, label="losses")
    texts = [repr(batch)]
    with batch:
        one = batch.all_reduce(x)
        texts += [repr(batch), repr(one)]
    texts += [repr(batch), repr(one)]
    work = fc.all_reduce(x, backend, async_op=True)
    work.wait()
    message = backend.isend(x, 1, tag=3) if backend.rank == 0 else backend.irecv(x, 0, tag=3)
    message.wait()
    return [*texts, repr(work), repr(message)]


def test_repr_says_what_it_is_in_a_line():
    first, second = spmd.run(_works, transport="sim", world_size=2)
    assert first[:5] == [
        "<Batch 'losses' of 0 calls, new>",
        "<Batch 'losses' of 1 calls, open>",
        "<BatchedWork: call 0 of <Batch 'losses' of 1 calls, open>, under way>",
        "<Batch 'losses' of 1 calls, ended>",
        "<BatchedWork: call 0 of <Batch 'losses' of 1 calls, ended>, ended>",
    ]
    assert re.fullmatch(r"<TaskWork: all_reduce.*, ended>", first[5])
    assert re.fullmatch(r"<MessageWork: send.* to rank 1.*, ended>", first[6])
    assert re.fullmatch(r"<MessageWork: recv.* from rank 0.*, ended>", second[6])


def _engine(backend):
    params = {"w": np.ones((4, 2), np.float32), "v": np.ones(2000, np.float32)}
    unit = fc.Unit("a", params, frozen="v")
    texts = [repr(unit)]
    engine = fc.FSDP([unit], backend, optimizer=fc.optim.SGD(lr=0.1), window=False)
    texts.append(repr(engine))
    step = engine.step()
    texts.append(repr(step))
    with step:
        texts.append(repr(step))
        with step.forward("a"):
            texts += [repr(step), repr(unit)]
        with step.backward("a"):
            pass
        step.update()
        texts.append(repr(step))
    engine.close()
    texts += [repr(step), repr(unit)]
    backend.close()
    return [*texts, repr(engine)]


def test_repr_of_an_engine_says_how_far_it_is():
    for rank, found in enumerate(spmd.run_on(SimBackend, _engine, world_size=2)):
        name, sharded = "<FSDP of 1 unit, 2,008 parameters:", "<Unit 'a' sharded, gradients none>"
        name += " full_shard over 2 ranks, SGD, step"
        assert found == [
            sharded,
            f"{name} 0, on <SimBackend sim rank {rank} of 2>>",
            "<Step: training step, not entered>",
            "<Step: training step, open>",
            "<Step: training step, inside the context of unit 'a'>",
            "<Unit 'a' unsharded, gradients none>",
            "<Step: training step, updated>",
            "<Step: training step, ended>",
            sharded,
            f"{name} 1, on <SimBackend sim rank {rank} of 2, closed>>",
        ]


@pytest.mark.parametrize(
    ("strategy", "held"),
    [
        ("full_shard", "sharded"),
        ("shard_grad_op", "replicated"),
        ("shard_optimizer", "replicated"),
        (fc.Strategy("hybrid_shard", shard_group_size=2), "sharded"),
        (fc.Strategy("hybrid_shard", shard_group_size=1), "replicated"),
        ("no_shard", "replicated"),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [False, True])
def test_repr_of_a_unit_says_what_its_strategy_makes_of_it(strategy, held, window):
    def body(backend):
        unit = fc.Unit("a", {"w": np.ones((4, 2), np.float32)})
        fc.FSDP([unit], backend, strategy=strategy, window=window)
        texts = [repr(unit)]
        unit.unshard()
        texts.append(repr(unit))
        unit.reshard()
        return [*texts, repr(unit)]

    between, used = (f"<Unit 'a' {word}, gradients none>" for word in (held, "unsharded"))
    assert spmd.run_on(SimBackend, body, world_size=2) == [[between, used, between]] * 2


def test_repr_of_what_holds_arrays_is_a_line():
    array = np.zeros((100, 100), np.float32)
    piece = fc.ArrayPiece(0, 100, array[0])
    sharded = fc.ShardedArray((100, 100), array.dtype, (piece,))
    assert repr(sharded) == "<ShardedArray float32 (100, 100): [0, 100), replica 0 of 1>"
    box = fc.BoxShard((200, 100), (100, 0), array)
    assert repr(box) == "<BoxShard float32 (100, 100) at (100, 0) of (200, 100)>"
    state = fc.EngineState({"a.w": array}, {"step": 3})
    assert repr(state) == "<EngineState of 1 arrays, step 3>"
    plan = fc.make_plan([fc.UnitSize("a", 1000)], world_size=4)
    assert re.fullmatch(
        r"<Plan of a step with 'full_shard' on rank 0 of 4: 1 units, \d+ operations, at most "
        r"\d+ bytes>",
        repr(plan),
    )
    spec = fc.Spec((1000, 64), init=fc.initializers.normal(std=0.02))
    assert "\n" not in repr(spec)
    assert "(1000, 64)" in repr(spec)


def documented():
    """Public functions, classes and their public methods by name; errors speak for themselves."""
    for place in MODULES:
        for name in MODULES[place].split():
            found = getattr(module(place), name)
            if isinstance(found, types.FunctionType):
                yield f"{place}.{name}", (found, None)
            elif isinstance(found, type) and not issubclass(found, BaseException):
                yield f"{place}.{name}", (found, None)
                for each, method in inspect.getmembers(found, inspect.isroutine):
                    own = str(getattr(method, "__module__", "")).startswith("fsdpcore")
                    if own and not each.startswith("_"):
                        yield f"{place}.{name}.{each}", (method, found)


# What users get from functions, and do not make themselves: their docstrings say from which.
MADE_BY = {
    fc.Backend: "fc.launch",
    fc.Batch: "coalesce",
    fc.ShardedLayers: "fully_shard",
    fc.Step: "engine.step",
    fc.SubBackend: "Backend.sub",
    fc.checkpoint.CheckpointFuture: "AsyncCheckpointer.save",
    fc.data.Batch: "Stream",
    fc.elastic.ElasticThreads: "launch",
    fc.elastic.Job: "run",
}
NOT_CALLED = (fc.Layer, fc.ReduceOp)  # a protocol, an enumeration


def words_for(public, owner):
    """The docstrings that say what arguments mean: its own, and of a method those of the bases."""
    bases = [] if owner is None else [*owner.__mro__]
    if owner is not None and "``fc.Layer``" in (inspect.getdoc(owner) or ""):
        bases.append(fc.Layer)  # a protocol, which layers need not derive from
    methods = [getattr(each, public.__name__, None) for each in bases]
    return "\n".join(inspect.getdoc(each) or "" for each in (public, *methods))


def told(name, words):
    """Whether a section has an entry for this argument, maybe together with others."""
    return re.search(rf"^ {{4}}(\S+, )*\**{name}(, \S+)*:", words, re.MULTILINE)


DOCUMENTED = dict(documented())


def test_help_has_words_for_it_and_an_entry_for_each_argument():
    found = {name: missing(*each) for name, each in DOCUMENTED.items()}
    assert {name: what for name, what in found.items() if what} == {}


def missing(public, owner):
    """What help should say of it, and does not."""
    if not inspect.getdoc(public):
        return {"any word"}
    if public in MADE_BY:
        return set() if MADE_BY[public] in inspect.getdoc(public) else {MADE_BY[public]}
    if public in NOT_CALLED:
        return set()
    words = words_for(public, owner)
    skipped = {"self", "cls"} if owner is not None else set()
    signature = inspect.signature(public)
    if signature.return_annotation == "NoReturn":  # it refuses whatever it is given
        return set()
    arguments = set(signature.parameters) - skipped
    return {each for each in arguments if not told(each, words)}
