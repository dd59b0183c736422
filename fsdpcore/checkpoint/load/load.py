"""``load``: any number of ranks reads what it needs of a checkpoint, straight into its arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsdpcore.checkpoint.format.generators import Generators
from fsdpcore.checkpoint.load.step_loader import Loaded as Loaded
from fsdpcore.checkpoint.load.step_loader import LoadRequest, StepLoader
from fsdpcore.checkpoint.plan.describe import StatefulEngine
from fsdpcore.checkpoint.plan.kinds import Stateful
from fsdpcore.checkpoint.storage.opening import DISK_TIMEOUT, StoragePath
from fsdpcore.checkpoint.storage.ranking import Step
from fsdpcore.comm.backend import Backend
from fsdpcore.core.checks import as_instance, as_positive


def load(
    path: StoragePath,
    target: StatefulEngine | Stateful | Mapping[str, Any],
    backend: Backend,
    *,
    step: Step = None,
    strict: bool = True,
    optimizer: bool = True,
    cast: bool = False,
    generators: Generators | None = None,
    names: str | Iterable[str] | None = None,
    threads: int | None = None,
    timeout: float | None = None,
) -> Loaded:
    """Load a checkpoint, however it was sharded when it was saved; a collective, which blocks.

    Ranks, strategy and mesh may be others than those that saved it, or none. ::

        loaded = fc.checkpoint.load("run", engine, backend)
        position = loaded.extra["position"]

        target = {"model": engine, "ema": {"w": average}, "epoch": None, "rng": PerRank(rng)}
        epoch = fc.checkpoint.load("run", target, backend).state["epoch"]

    Every rank reads the bytes that it needs, straight into its arrays, or by way of a window of
    the host's memory to those on a GPU, and checks them. What
    several ranks need small parts of is read by one of them and passed on. All ranks first check
    that everything fits; then they read. Beyond the arrays a rank needs less than 64 MiB, and what
    the names of all arrays take.

    Args:
        path: where ``save`` put it; or the folder of one step.
        target: an engine, or a mapping of the same structure as ``save`` was given. In place are
            changed engines, writable arrays of NumPy, PyTorch and ``backend.device``, parts of
            arrays, random generators, and objects with ``load_state_dict``. Of all else there are
            new values in ``Loaded.state``: numbers, text, arrays and keys of JAX, and the
            containers that hold them. In place of None comes whatever was saved there, made anew,
            of NumPy's arrays unless they were JAX's or PyTorch's. Ranks may have different
            arrays, and parts of arrays that overlap or leave something out; but no two of a rank
            share memory. Numbers of ranks and ``PerRank``: see there.
        backend: all ranks that call; with a mesh those of all its axes, the tensor-parallel ones
            included.
        step: the number of a step, else it is an error; by default, or "latest", the newest that is
            valid. If the arrays of that turn out to be damaged, the next older one is loaded; but
            none is passed over that the system cannot read at the moment. "best:loss" is the one
            with the smallest of the metrics ``loss``, "best:-accuracy" the one with the largest
            ``accuracy``; of equal ones the newer. If that is damaged, the next best is loaded.
        strict: names that are missing or unexpected, and elements that are not stored, are an
            error; else they are returned.
        optimizer: False leaves optimizer state, number of steps and loss scale as they are.
        cast: round values to the dtypes of the target; else another dtype is an error.
        generators: random generators by name, to go on as those that were saved; a rank takes
            the state of the same rank. See ``generators.restore`` for more ranks than saved.
        names: patterns (of the shell) of the arrays to load; the others, the number of steps and
            the loss scale stay as they are.
        threads: that read, on this rank; by default as many as there are cores for it, at most 4.
        timeout: seconds to wait for the slowest rank's disk; by default 1800.

    Returns:
        Which step it was, its ``state`` and ``extra``, what was missing, unexpected or skipped.

    Raises:
        ArgumentError: something does not fit, on some rank; on all ranks, and nothing was changed
            unless the message says so.
        StateError: inside of a step of the engine.
        CheckpointNotFoundError: there is no checkpoint, or not that one.
        CorruptCheckpointError: none is valid, or not that one. On all ranks, as is CheckpointError.
        CheckpointError: it could not be read, or one that may be newer; or it does not have what is
            wanted, or not all that was read of a newer one which is damaged. Where arrays may be
            half overwritten the message says so, and ``engine.partially_updated`` is set.
        CommunicationError: a rank is gone.
    """
    as_instance(backend, Backend, "backend", "a Backend", "load takes (path, target, backend)")
    request = LoadRequest(step, strict, optimizer, cast, names, generators, threads)
    limit = DISK_TIMEOUT if timeout is None else as_positive(timeout, "timeout")
    return StepLoader(backend, request, limit).run(path, target)
