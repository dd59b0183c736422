"""Updates by any module of arrays, NumPy or CuPy, with what comes out on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.fsdp.optim import Optimizer, ShardPiece, WholeParameterOptimizer

Host = NDArray[Any]


def placed(xp: Any, values: Host, start: int = 0) -> Any:
    """A contiguous array of these values that begins ``start`` elements behind a buffer's begin."""
    part = xp.empty(start + values.size, values.dtype)[start:].reshape(values.shape)
    if xp is np:
        part[...] = values
    else:
        part.set(np.ascontiguousarray(values))
    return part


def fetched(array: Any) -> Host:
    """Its values on the host."""
    values: Host = array if isinstance(array, np.ndarray) else array.get()
    return values


def stepped(
    xp: Any,
    optimizer: Optimizer,
    param: Host,
    grads: Sequence[Host],
    *,
    starts: Sequence[int] = (0, 0, 0, 0),
    out: Any = None,
    grad_scale: float = 1.0,
) -> dict[str, Host]:
    """One step for each of ``grads``: what all written arrays are then.

    ``starts`` are those of the parameter, the gradient, the state and ``out``, a dtype.
    """
    moved = placed(xp, param, starts[0])
    state = {
        name: placed(xp, array, starts[2])
        for name, array in optimizer.init_state(param.size, param.dtype).items()
    }
    rounded = None if out is None else placed(xp, np.zeros(param.size, out), starts[3])
    with np.errstate(all="ignore"):
        for step, grad in enumerate(grads, start=1):
            given = placed(xp, grad, starts[1])
            optimizer.update(moved, given, state, step=step, grad_scale=grad_scale, out=rounded)
    written = {"param": moved, **state} | ({} if rounded is None else {"out": rounded})
    return {name: fetched(array) for name, array in written.items()}


def stepped_whole(
    xp: Any,
    optimizer: WholeParameterOptimizer,
    params: dict[str, Host],
    steps: int,
    reductions: list[Host],
) -> dict[str, Host]:
    """Steps of an optimizer of whole parameters, of which this is the only rank."""
    rng = np.random.default_rng(5)
    pieces = []
    for name, param in params.items():
        shapes = optimizer.state_shapes(param.shape)
        state = {
            key: placed(xp, np.zeros(int(np.prod(shape)), param.dtype), 1)
            for key, shape in shapes.items()
        }
        flat = param.reshape(-1)
        grad = rng.standard_normal(flat.size).astype(flat.dtype)
        pieces.append(
            ShardPiece(
                name=name,
                shape=param.shape,
                start=0,
                stop=flat.size,
                param=placed(xp, flat, 3),
                grad=placed(xp, grad),
                state=state,
                out=placed(xp, np.zeros(flat.size, np.float16), 2),
            )
        )

    def reduce(array: Host) -> None:
        reductions.append(array.copy())

    for step in range(1, steps + 1):
        optimizer.update_pieces(pieces, step=step, reduce=reduce, grad_scale=0.7)
    return {
        f"{piece.name} {name}": fetched(array)
        for piece in pieces
        for name, array in {"param": piece.param, "out": piece.out, **piece.state}.items()
    }


def bits(array: Host) -> bytes:
    """The bytes, with all nans made one."""
    plain = array.astype(np.float64)  # exact
    plain[np.isnan(plain)] = np.nan
    return plain.tobytes()
