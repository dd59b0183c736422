"""``ParamTree``: parameters in nested containers as the units of an engine, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fsdpcore.core.buffers import BFLOAT16
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.core.skeleton import Skeleton
from fsdpcore.core.trees import branch
from fsdpcore.fsdp.units.leaves import is_param, own_values
from fsdpcore.fsdp.units.special import chosen
from fsdpcore.fsdp.units.unit import Unit

UnitOf = Callable[[tuple[str, ...]], str]
"""Says which unit a parameter belongs to, by the names that lead to it."""

_REST = "params"


class ParamTree(Iterable[Unit]):
    """The parameters of a model, nested as its framework has them, as units.

    An engine takes a tree itself, ``FSDP(tree, backend)``, with a unit for each top-level entry;
    this class is for another rule. What is nested is gone into: mappings, lists, tuples (named ones
    too), dataclasses, and what ``jax.tree_util`` knows, such as modules of Equinox. Arrays,
    ``Spec``, ``Tied`` and ``BoxShard`` are parameters. All else (None, numbers, functions, random
    keys) stays in its place in the tree, and must be the same on all ranks, which is not checked.
    Arrays of integers and bool are frozen. The same array of NumPy or PyTorch in two places is one
    parameter; of JAX, whose arrays are values, they are two.

    A parameter has the keys that lead to it as its name, joined by dots: ``blocks.0.attn.w``. ::

        tree = fc.ParamTree({"embed": e, "blocks": [b0, b1]}, units=2)   # blocks.0 and blocks.1
        engine = fc.FSDP(tree, backend, optimizer=fc.optim.AdamW(lr=3e-4))
        fc.train_step(engine, loss_and_grads, batch)   # loss_and_grads(params, batch): nested
        params = engine.full_tree()

    Args:
        tree: not changed; the engine copies the arrays.
        units: how many names of a parameter name its unit, the others name it in there; the last
            name is always the parameter's. What is left without a unit is in one named "params".
            Or a function that gets all names, as a tuple of strings, and returns that of the unit.
        frozen, ignored: as of ``Unit``, with patterns of full names, ``unit.param``.

    Attributes:
        units: in the order in which the tree has their first parameters.
        names: of all parameters, ``unit.param``, in the order of the tree.

    Raises:
        ArgumentError: there are no arrays in it; two parameters get the same name; a pattern
            matches nothing; or as ``Unit``.
    """

    def __init__(
        self,
        tree: Any,
        units: int | UnitOf = 1,
        *,
        frozen: str | Iterable[str] = (),
        ignored: str | Iterable[str] = (),
    ) -> None:
        self._skeleton = Skeleton(tree, is_param)
        values = own_values(self._skeleton)
        if not values:
            raise ArgumentError(
                f"there are no arrays in this {type(tree).__name__}; an engine takes parameters in "
                "nested containers, or a list of fc.Unit"
            )
        rule = units if callable(units) else _rule(as_int(units, "units", minimum=0))
        self._places = [_place(path, rule) for path in self._skeleton.paths]
        self.names = tuple(f"{unit}.{name}" for unit, name in self._places)
        left = chosen("the tree", self.names, ignored, "ignored")
        fixed = chosen("the tree", self.names, frozen, "frozen")
        members: dict[str, dict[str, Any]] = {}
        kept: dict[str, tuple[list[str], list[str]]] = {}
        for (unit, name), full, value in zip(self._places, self.names, values, strict=True):
            if name in members.setdefault(unit, {}):
                raise ArgumentError(f"two parameters of the tree are named {full!r}; rename one")
            members[unit][name] = value
            frozen_names, ignored_names = kept.setdefault(unit, ([], []))
            if full in left:
                ignored_names.append(name)
            elif full in fixed or _is_discrete(value):
                frozen_names.append(name)
        self.units = tuple(
            Unit(unit, params, frozen=kept[unit][0], ignored=kept[unit][1])
            for unit, params in members.items()
        )

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)

    def build(self, params: Mapping[str, Any]) -> Any:
        """Return the tree with other arrays in it.

        Args:
            params: by unit and then by name, as of ``step.whole()``; or by ``unit.param``, as of
                ``engine.full_params()``.

        Returns:
            A tree like the one that this was made of. It has these very arrays, not copies.

        Raises:
            ArgumentError: one is missing.
        """
        try:
            return self._skeleton(
                [
                    params[full] if full in params else params[unit][name]
                    for (unit, name), full in zip(self._places, self.names, strict=True)
                ]
            )
        except KeyError as error:
            raise ArgumentError(
                f"parameter {error} is missing; a tree is built of all of {self.names[0]!r} ..."
            ) from None

    def split(self, tree: Any) -> dict[str, dict[str, Any]]:
        """Return what a tree that is nested alike has for each parameter, by unit and name.

        Args:
            tree: gradients, for instance. None may stand for a parameter, or for a part of the
                tree.

        Returns:
            The arrays themselves, not copies; None where the tree has None.

        Raises:
            ArgumentError: it is nested in another way.
        """
        found: dict[str, dict[str, Any]] = {unit.name: {} for unit in self.units}
        leaves = self._skeleton.find(tree, "what was returned")
        for (unit, name), leaf in zip(self._places, leaves, strict=True):
            found[unit][name] = leaf
        return found

    def named(self, tree: Any) -> dict[str, Any]:
        """Return the arrays of a tree that is nested alike by ``unit.param``.

        It is what ``engine.load_full`` takes.

        Args:
            tree: as of ``split``.

        Returns:
            The arrays themselves, not copies; without those for which the tree has None.

        Raises:
            ArgumentError: it is nested in another way.
        """
        return {
            f"{unit}.{name}": leaf
            for unit, named in self.split(tree).items()
            for name, leaf in named.items()
            if leaf is not None
        }

    def __repr__(self) -> str:
        return f"<ParamTree of {len(self.names)} parameters in {len(self.units)} units>"


def is_units(value: Any) -> bool:
    """Whether an engine can be made of it, as far as its type tells."""
    return isinstance(value, Iterable) or branch(value) is not None


def as_units(units: Any) -> tuple[tuple[Unit, ...], ParamTree | None]:
    """Return the units that an engine was given, and the tree if it was given one."""
    if isinstance(units, ParamTree):
        return units.units, units
    found = branch(units)
    if found is None or any(isinstance(child, Unit) for child in found.children):
        return tuple(units), None
    nested = any(is_param(child) or branch(child) is not None for child in found.children)
    if isinstance(units, Mapping) or nested:
        tree = ParamTree(units)
        return tree.units, tree
    return tuple(found.children), None


def _is_discrete(value: Any) -> bool:
    dtype = getattr(value.array if isinstance(value, BoxShard) else value, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "biu" and dtype != BFLOAT16


def _rule(depth: int) -> UnitOf:
    return lambda names: ".".join(names[: min(depth, len(names) - 1)])


def _place(path: tuple[Any, ...], rule: UnitOf) -> tuple[str, str]:
    """Return the unit and the name there of what these keys lead to."""
    full = ".".join(map(str, path)) or "value"
    unit = rule(tuple(full.split(".")))
    if not isinstance(unit, str):
        raise ArgumentError(
            f"units must be a number, or a function that returns the name of a unit; for {full!r} "
            f"it returned {unit!r:.80}"
        )
    return unit or _REST, full.removeprefix(f"{unit}.") if unit else full
