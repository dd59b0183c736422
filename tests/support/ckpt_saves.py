"""Small states whose every element says which save it is of, and how to save and find them."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.fsdp_steps import launch

import fsdpcore as fc
from fsdpcore.checkpoint.storage.storage import Storage

ROWS, COLUMNS = 5, 7


def whole(mark: int) -> dict[str, np.ndarray]:
    """All arrays of a save, as one process would have them."""
    return {
        "w": np.full((ROWS, COLUMNS), mark, np.float32),
        "optimizer/exp_avg/w": np.full((ROWS, COLUMNS), -mark, np.float64),
        "replicated": np.full(3, mark, np.int16),
        "scalar": np.array(mark, np.int64),
        "rows": np.full((ROWS, 2), mark, np.uint8),
    }


def state_of(rank: int, world_size: int, mark: int) -> dict[str, Any]:
    """A rank's part: flat ranges, rows, and what every rank has."""
    arrays = whole(mark)
    state: dict[str, Any] = dict(arrays)
    size = ROWS * COLUMNS
    start, stop = (size * each // world_size for each in (rank, rank + 1))
    for name in ("w", "optimizer/exp_avg/w"):
        flat = arrays[name].reshape(-1)
        pieces = [fc.ArrayPiece(start, stop, flat[start:stop])] if start < stop else []
        state[name] = fc.ShardedArray((ROWS, COLUMNS), flat.dtype, tuple(pieces))
    first, last = (ROWS * each // world_size for each in (rank, rank + 1))
    rows = arrays["rows"][first:last]
    state["rows"] = fc.checkpoint.BoxShard((ROWS, 2), (first, 0), rows)
    return state


def mixed_state(rank: int, world_size: int, mark: int) -> dict[str, Any]:
    """The same beside values that are no arrays, equal on all ranks or not."""
    rng = np.random.default_rng([mark, rank])
    values = {"epoch": mark, "words": [f"save {mark}"], "own": fc.checkpoint.PerRank(rng)}
    return {**state_of(rank, world_size, mark), **values}


def check_mixed(storage: Any, mark: int) -> None:
    """Check that all of what two ranks load is of that save."""

    def body(backend: fc.Backend) -> None:
        target = mixed_state(backend.rank, backend.world_size, 0)
        state = fc.checkpoint.load(storage, target, backend).state
        assert (state["epoch"], state["words"]) == (mark, [f"save {mark}"])
        expected = np.random.default_rng([mark, backend.rank])
        assert target["own"].value.integers(1 << 60) == expected.integers(1 << 60)
        assert (target["w"].pieces[0].array == mark).all()

    launch(body, 2)


def save(
    storage: Any, step: int, mark: int, *, ranks: int = 2, state: Any = state_of, **options: Any
) -> list[Any]:
    """Save on ranks that are threads."""
    make = state

    def body(backend: fc.Backend) -> Any:
        state = make(backend.rank, backend.world_size, mark)
        return fc.checkpoint.save(storage, state, backend, step=step, **options)

    return launch(body, ranks)


def found(storage: Storage, step: int | None = None) -> int | None:
    """The mark of what is loaded, after checking that all of it has that; None if nothing is."""
    try:
        arrays = fc.checkpoint.read(storage, step=step)
    except fc.CheckpointNotFoundError:
        return None
    mark = int(arrays["scalar"])
    expected = whole(mark)
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
        assert arrays[name].tobytes() == array.tobytes(), name
    return mark
