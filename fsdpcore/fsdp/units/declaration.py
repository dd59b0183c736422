"""What a unit consists of, as its user has declared it, before an engine takes it over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_instance, as_name
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.foreign import as_numpy
from fsdpcore.core.geometry.boxes import ArrayBox, BoxShard
from fsdpcore.fsdp.units.leaves import nested
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.fsdp.units.special import Tied, chosen
from fsdpcore.fsdp.units.views import read_only

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


class UnitDeclaration:
    """Parameters by name, sorted by what is to become of them; the base of ``Unit``.

    Attributes:
        name: of the unit.
        names: of all parameters, in order.
        skeleton: of the containers that they came in; None for a plain mapping.
        initial: arrays and specs of its own parameters; None once an engine has taken them over.
        frozen: names of those that are not trained.
        ignored: arrays that are left as they are, read-only.
        ties: which parameters are others.
        boxes: which of its own parameters are boxes of whole ones, and where these lie. An engine
            leaves out those that turn out to be whole on every rank.
        tilings: of each of these the boxes of all ranks of the engine's ``tensor`` group, in their
            order; set by the engine.
        dtype: of the trained parameters.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, Array | BoxShard | Spec | Tied],
        frozen: str | Iterable[str],
        ignored: str | Iterable[str],
    ) -> None:
        as_name(name, "a unit's name")
        params, self.skeleton = nested(name, params)
        what = f"the parameters of unit {name!r}"
        as_instance(params, Mapping, what, "a mapping from names to arrays")
        self.name = name
        self.names = tuple(params)
        self.ties = {key: value for key, value in params.items() if isinstance(value, Tied)}
        own = {
            key: value if isinstance(value, Spec) else _array(value, f"parameter {name}.{key}")
            for key, value in params.items()
            if not isinstance(value, Tied)
        }
        self.boxes = {
            key: value.box
            for key, value in params.items()
            if isinstance(value, (BoxShard, Spec)) and value.box is not None
        }
        self.tilings: dict[str, tuple[ArrayBox, ...]] = {}
        left = chosen(name, own, ignored, "ignored")
        self.ignored = {
            key: _as_it_is(name, key, own.pop(key), self.boxes) for key in tuple(own) if key in left
        }
        self.frozen = frozenset(chosen(name, own, frozen, "frozen"))
        self.initial: dict[str, Array | Spec] | None = own
        trained = {k: v for k, v in own.items() if k not in self.frozen}
        lists = [key for key in trained if isinstance(params[key], (list, tuple))]
        self.dtype = _common_dtype(name, trained, lists)

    @property
    def trained(self) -> list[str]:
        """Names of its own parameters that are trained; none once an engine has them."""
        return [name for name in self.initial or () if name not in self.frozen]


def alias(unit: UnitDeclaration, name: str, tied: Tied) -> None:
    """Make a parameter another one's alias."""
    assert unit.initial is not None
    del unit.initial[name]
    unit.boxes.pop(name, None)
    unit.frozen -= {name}
    unit.ties[name] = tied


def _array(value: ArrayLike | BoxShard, what: str) -> Array:
    """Return an array of NumPy, or of a GPU as it is: which one it should be, the engine knows.

    Those of other libraries on the host are shown as NumPy's.
    """
    if isinstance(value, BoxShard):
        value = value.array
    on_gpu = not isinstance(value, np.ndarray) and hasattr(value, "__cuda_array_interface__")
    return cast(Array, value) if on_gpu else as_numpy(value, what)


def _as_it_is(unit: str, name: str, value: Array | Spec, boxes: Mapping[str, ArrayBox]) -> Array:
    if name in boxes:
        raise ArgumentError(
            f"{unit}.{name} is ignored, which arrays are that every rank has whole, but it is a "
            "box; freeze it, or leave it out of the unit"
        )
    if isinstance(value, Spec):
        raise ArgumentError(f"{unit}.{name} is ignored, and needs an array instead of a Spec")
    if not on_host(value):
        return value
    return read_only(np.ascontiguousarray(value).reshape(value.shape))


def _common_dtype(
    unit: str, params: Mapping[str, Array | Spec], lists: Iterable[str]
) -> np.dtype[Any]:
    """Return the dtype of all; ``lists`` are the names of those that were given as lists."""
    dtypes = {name: value.dtype for name, value in params.items()}
    advice = "".join(
        f"; {name} was given as a list: give np.asarray({name}, np.float32)" for name in lists
    )
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise ArgumentError(
                f"parameter {unit}.{name} has dtype {dtype}; parameters are float32 or float64, "
                "which the optimizer updates. To compute in less, pass the engine "
                "precision=fc.Precision(param_dtype=...); others can be frozen or "
                f"ignored{advice}"
            )
    if len(set(dtypes.values())) > 1:
        raise ArgumentError(
            f"the trained parameters of unit {unit!r} must share one dtype, got "
            + ", ".join(f"{name}: {dtype}" for name, dtype in dtypes.items())
            + advice
        )
    return next(iter(dtypes.values()), np.dtype(np.float32))
