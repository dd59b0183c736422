"""``save``: every rank writes its share, then rank 0 commits. All ranks succeed, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdpcore.checkpoint.format.generators import Generators
from fsdpcore.checkpoint.plan.describe import StatefulEngine
from fsdpcore.checkpoint.plan.kinds import Stateful
from fsdpcore.checkpoint.save.saver import Saver, refuse
from fsdpcore.checkpoint.save.step_folder import Saved
from fsdpcore.checkpoint.storage.opening import DISK_TIMEOUT, StoragePath
from fsdpcore.checkpoint.storage.retention import Retention
from fsdpcore.comm.backend import Backend
from fsdpcore.core.checks import as_instance


def save(
    path: StoragePath,
    state: StatefulEngine | Stateful | Mapping[str, Any],
    backend: Backend,
    *,
    step: int | None = None,
    extra: Any = None,
    generators: Generators | None = None,
    metrics: Mapping[str, float] | None = None,
    retention: Retention | None = None,
    timeout: float = DISK_TIMEOUT,
) -> Saved:
    """Save a checkpoint of a step; a collective, which blocks until it is on the disk.

    Each rank writes its own part into a file; what several ranks have is written once. Until all
    of it is there, and synced, the checkpoint does not exist for any reader: whatever happens,
    ``load`` finds the one before or this one. ::

        saved = fc.checkpoint.save("run", engine, backend, extra={"position": 12})

        state = {"model": engine, "ema": {"w": average}, "epoch": 3, "rng": PerRank(rng)}
        saved = fc.checkpoint.save("run", state, backend)

    Args:
        path: a folder that all ranks see, or a URL of fsspec. It may hold other steps; saving a
            step again replaces it once that is done.
        state: an engine, or a mapping from names to anything of these:

            - engines, several too;
            - arrays of NumPy, JAX, PyTorch, or of ``backend.device``, of which each rank has all,
              as they are after all that this thread has enqueued there. Only read, and stored as
              arrays;
            - ``ShardedArray`` (flat ranges, of all or of a box) and ``BoxShard`` (boxes). Ranks
              have the same parts, or none that overlap; those of different replicas of a
              ``ShardedArray`` may: then the first replica's are written;
            - random generators: ``np.random.Generator``, ``np.random.RandomState``,
              ``random.Random``, ``torch.Generator``, keys of JAX;
            - None, bool, int, float, str, numbers of NumPy: at most 16 MiB of them as JSON;
            - objects with ``state_dict`` and ``load_state_dict``, whose state is made of these;
            - containers of these: dicts (with keys of str or int), lists, tuples, dataclasses, and
              what JAX's users have registered;
            - ``PerRank(value)`` for what each rank has of its own, at most 1 MiB of it as JSON.

            All but engines, parts of arrays and ``PerRank`` is equal on all ranks, which is
            checked: each rank reads its whole arrays once, and compares a digest.
        backend: all ranks that call; with a mesh those of all its axes, the tensor-parallel ones
            included.
        step: by default the number of updates of the engine, or of all engines.
        extra: anything that JSON can hold, equal on all ranks: the position in the data, options.
            ``load`` returns it; what is to be found by its name belongs into ``state``.
        generators: generators of NumPy by name, beside an engine that is all of ``state``. Each
            rank's is saved; ``load`` gives those that were equal on all ranks to every rank, and of
            others each rank its own, as those in a ``PerRank``.
        metrics: numbers by name, equal on all ranks, for ``Retention(best=...)``. One that is NaN
            or infinite is not kept, so that the checkpoint is not among the best.
        retention: which steps to keep; without it, all. ``metrics`` needs the one it ranks by.
        timeout: seconds to wait for the slowest rank's disk.

    Returns:
        The step, the name of its folder, and what went wrong besides.

    Raises:
        ArgumentError: the state makes no sense, or the ranks disagree about an array. Nothing was
            written. On all ranks.
        MismatchError: the ranks give different ``extra``, ``step`` or ``metrics``, or values that
            should be equal, with the entry's name; likewise.
        CheckpointError: a rank could not write. On all ranks. Earlier checkpoints are intact.
        CommunicationError: a rank is gone.
    """
    as_instance(backend, Backend, "backend", "a Backend", "save takes (path, state, backend)")
    try:
        saver = Saver(path, backend, retention=retention, timeout=timeout)
    except Exception as error:
        refuse(backend, error)
        raise
    own = saver.describe(state, step=step, extra=extra, generators=generators, metrics=metrics)
    return saver.write(saver.prepare(own), backend)
