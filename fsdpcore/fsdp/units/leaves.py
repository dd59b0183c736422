"""What in a tree is a parameter, and which array an engine takes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.foreign import as_numpy, is_foreign, is_random_key
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.core.skeleton import Skeleton
from fsdpcore.core.trees import branch
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.fsdp.units.special import Tied


def is_param(leaf: Any) -> bool:
    """Whether it is an array of numbers, or stands for one; random keys of JAX are none."""
    if isinstance(leaf, (Spec, Tied, BoxShard)):
        return True
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUMm"
    return is_foreign(leaf) and hasattr(leaf, "shape") and not is_random_key(leaf)


def own_values(skeleton: Skeleton) -> list[Any]:
    """Return the parameters as the engine takes them; the skeleton lets go of them."""
    leaves, seen = skeleton.leaves, set()
    skeleton.forget()
    for number, (leaf, path) in enumerate(zip(leaves, skeleton.paths, strict=True)):
        if isinstance(leaf, (Spec, Tied, BoxShard)) or hasattr(leaf, "__cuda_array_interface__"):
            continue
        array = as_numpy(leaf, f"parameter {'.'.join(map(str, path))}")
        # Arrays of JAX are values: one that stands in two places is two parameters. Those of NumPy
        # and PyTorch that share memory are one.
        if is_foreign(leaf) and not array.flags.writeable:
            place = array.ctypes.data
            array = array.copy() if place in seen else array
            seen.add(place)
        leaves[number] = array
    return leaves


def nested(name: str, params: Any) -> tuple[Any, Skeleton | None]:
    """Return the parameters of a unit by name; and its skeleton if there are containers among them.

    Args:
        name: of the unit, for messages.
        params: a mapping from names to parameters, or to containers of them; or such a container.
            A list of numbers is an array.

    Raises:
        ArgumentError: two get the same name.
    """
    inside = branch(params)
    if inside is None or not (any(map(has_params, inside.children)) or inside.kind == "object"):
        return params, None
    if isinstance(params, Mapping):  # a list of numbers in it is an array; None stays None
        params = {
            key: value if _stays(value) else as_numpy(value, f"parameter {name}.{key}")
            for key, value in params.items()
        }
    skeleton = Skeleton(params, is_param)
    names = [".".join(map(str, path)) for path in skeleton.paths]
    if len(set(names)) < len(names):
        twice = next(each for at, each in enumerate(names) if each in names[:at])
        raise ArgumentError(f"two parameters of unit {name!r} are named {twice!r}; rename one")
    return dict(zip(names, own_values(skeleton), strict=True)), skeleton


def has_params(value: Any) -> bool:
    """Whether it is a container with parameters somewhere in it."""
    inside = None if is_param(value) else branch(value)
    return inside is not None and any(is_param(c) or has_params(c) for c in inside.children)


def _stays(value: Any) -> bool:
    return value is None or is_param(value) or has_params(value)
