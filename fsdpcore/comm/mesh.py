"""``Mesh``: the ranks of a backend as a grid with named axes, and a group for every axis."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fsdpcore.comm.backend import Backend, SubBackend
from fsdpcore.core.errors import ArgumentError


class Mesh:
    """Ranks arranged as a grid, for hybrid sharding, tensor parallelism and their like.

    ``mesh["shard"]`` is the group of the ranks that differ from this one along that axis only,
    numbered by their position on it. The arrangement is row-major: the last axis has neighbouring
    ranks, as in ``numpy.unravel_index`` and PyTorch's ``DeviceMesh``; put the axis with the most
    traffic last, where its ranks share a host.

    All ranks of ``backend`` make the mesh, with the same axes in the same order, and in the same
    order as other meshes of that backend. Making it does not communicate, nor does taking a group.
    Groups are made when they are first asked for, which each rank may do in an order of its own. ::

        mesh = fc.Mesh(backend, {"replicate": 2, "shard": -1})   # 8 ranks: 2 x 4
        whole = fc.all_gather(part, mesh["shard"])               # among 4 neighbours
        both = mesh["replicate", "shard"]                        # all 8, as one group

    Args:
        backend: the ranks; its ``world_size`` is the product of the sizes.
        axes: name and size of every axis; one size may be -1, for what the others leave.

    Attributes:
        backend: as given.
        axes: names of the axes.
        shape: sizes of the axes.
        ranks: integer array of that shape with the ranks (of ``backend``) at their positions.
        coordinates: this rank's position on every axis, by name.

    Raises:
        ArgumentError: names or sizes that make no grid of this backend's ranks.
    """

    def __init__(self, backend: Backend, axes: Mapping[str, int]) -> None:
        if not isinstance(backend, Backend):
            raise ArgumentError(f"Mesh: expected a backend, got {type(backend).__name__}")
        self.backend = backend
        self.shape = _sizes(axes, backend.world_size)
        self.axes = tuple(axes)
        self.ranks: NDArray[np.intp] = np.arange(backend.world_size).reshape(self.shape)
        self.ranks.flags.writeable = False
        place = np.unravel_index(backend.rank, self.shape)
        self.coordinates = {name: int(index) for name, index in zip(self.axes, place, strict=True)}
        # A parent of its own, and a name for each: so that groups are told apart by what they are
        # for, and not by the order in which a rank first takes them.
        self._whole = backend.sub(range(backend.world_size), name="mesh")
        self._groups: dict[tuple[str, ...], SubBackend] = {}
        self._lock = threading.Lock()

    def __getitem__(self, axes: str | tuple[str, ...]) -> SubBackend:
        """Return this rank's group along an axis, or along several as one.

        ``mesh["replicate", "shard"]`` has the ranks that differ along those axes only, numbered
        row-major in the order in which the axes are named. The same names give the same group.

        Raises:
            ArgumentError: no such axis, or one is named twice.
        """
        names = (axes,) if isinstance(axes, str) else axes
        places = [self._place(name) for name in self._checked(names)]
        with self._lock:
            if names not in self._groups:
                here = [slice(index, index + 1) for index in self.coordinates.values()]
                for place in places:
                    here[place] = slice(None)
                others = [place for place in range(len(self.axes)) if place not in places]
                members = self.ranks[tuple(here)].transpose(places + others).reshape(-1)
                name = repr(names)
                self._groups[names] = self._whole.sub(members.tolist(), name=name)
            return self._groups[names]

    def close(self) -> None:
        """Close the groups; the backend stays open."""
        with self._lock:
            for group in self._groups.values():
                group.close()

    def _checked(self, names: object) -> tuple[str, ...]:
        if not isinstance(names, tuple) or not names:
            raise ArgumentError(f"Mesh: name one axis or several, got {names!r}")
        if len(set(map(repr, names))) != len(names):
            raise ArgumentError(f"Mesh: an axis is named twice in {names}")
        return names

    def _place(self, name: object) -> int:
        if name not in self.axes:
            raise ArgumentError(f"Mesh: there is no axis {name!r}; there are {list(self.axes)}")
        return self.axes.index(name)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n}={s}" for n, s in zip(self.axes, self.shape, strict=True))
        return f"<Mesh {sizes}, rank {self.backend.rank}>"


def _sizes(axes: object, world_size: int) -> tuple[int, ...]:
    """Return the sizes of the axes, with the open one filled in."""
    if not isinstance(axes, Mapping) or not axes:
        raise ArgumentError(f"Mesh: axes are given as {{name: size, ...}}, got {axes!r}")
    for name, size in axes.items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"Mesh: the name of an axis is a string, got {name!r}")
        _check_size(name, size)
    sizes = [operator.index(size) for size in axes.values()]
    product = 1
    for size in sizes:
        product *= 1 if size == -1 else size
    text = " x ".join(f"{name} {size}" for name, size in axes.items())
    if sizes.count(-1) > 1:
        raise ArgumentError(f"Mesh: only one size may be -1, got {text}")
    if -1 in sizes:
        if world_size % product:
            raise ArgumentError(
                f"Mesh: {text} leaves no whole number for the -1, since {world_size} ranks are "
                f"not a multiple of {product}"
            )
        sizes[sizes.index(-1)] = world_size // product
    elif product != world_size:
        raise ArgumentError(
            f"Mesh: {text} has {product} positions, but the backend has {world_size} ranks"
        )
    return tuple(sizes)


def _check_size(name: str, size: object) -> None:
    try:
        number = operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if isinstance(size, bool) or (number < 1 and number != -1):
        raise ArgumentError(
            f"Mesh: the size of axis {name!r} is an integer >= 1, or -1 for what the others "
            f"leave; got {size!r}"
        )
