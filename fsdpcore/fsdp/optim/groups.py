"""Parameter groups: which optimizer updates which parameter."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdpcore.core.errors import ArgumentError, ConfigError
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.core.geometry.layout import FlatLayout, Piece
from fsdpcore.core.text import listed, nearest
from fsdpcore.fsdp.optim.base import Optimizer
from fsdpcore.fsdp.optim.from_optax import Optax, Transformation, is_transformation
from fsdpcore.fsdp.optim.pieces import PieceSpec

Given = Optimizer | Transformation | Mapping[str, "Optimizer | Transformation"]
"""One optimizer for all parameters, or by patterns of their names."""

_ALL = "*"


@dataclass(frozen=True)
class ParamGroups:
    """An ordered list of patterns, each with an optimizer; the first that matches a name wins.

    Names are ``unit.parameter``. Patterns are those of ``fnmatch``: ``*`` stands for anything,
    dots too, ``?`` for one character, ``[ab]`` for one of these; case matters. Use
    ``ParamGroups.of`` to make one. The ``repr`` is what ranks compare.

    Attributes:
        rules: pairs of a pattern and its optimizer, in order.
    """

    rules: tuple[tuple[str, Optimizer], ...]

    @classmethod
    def of(cls, optimizers: Given | ParamGroups) -> ParamGroups:
        """Return the groups that one optimizer, or a mapping from patterns, stands for.

        What depends on what is installed is decided (``Optimizer.resolved``).

        Args:
            optimizers: one of ``fc.optim`` or a transformation of optax, for all parameters; or a
                mapping from patterns to such. Groups are returned as they are.

        Raises:
            ConfigError: it is none of these, or an empty mapping; or a pattern stands behind
                ``"*"``, where it is never reached.
        """
        if isinstance(optimizers, ParamGroups):
            return optimizers
        given: Any = optimizers
        if isinstance(optimizers, Optimizer) or is_transformation(optimizers):
            given = {_ALL: optimizers}
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(
                "optimizers must be one of fc.optim, such as fc.optim.AdamW(), or a mapping from "
                f"patterns of parameter names to those, got {optimizers!r}{_hint(optimizers)}"
            )
        found = {pattern: _optimizer(pattern, each) for pattern, each in given.items()}
        patterns = list(found)
        if _ALL in patterns[:-1]:
            behind = patterns[patterns.index(_ALL) + 1]
            raise ConfigError(
                f"the pattern {behind!r} is never reached, as '*' before it matches every name; "
                "put '*' last"
            )
        return cls(tuple((name, opt.resolved()) for name, opt in found.items()))

    def resolve(self, names: Sequence[str]) -> dict[str, Optimizer]:
        """Return the optimizer of each parameter.

        Args:
            names: of all parameters that are trained, ``unit.parameter``.

        Returns:
            The optimizers by those names.

        Raises:
            ArgumentError: no pattern matches a parameter, or a pattern is of no use: it matches
                none, or only what earlier ones take. ``"*"`` may be left with nothing.
        """
        first: dict[str, str] = {}  # parameter to pattern
        for name in names:
            for pattern, _ in self.rules:
                if fnmatch.fnmatchcase(name, pattern):
                    first[name] = pattern
                    break
        self._check_all_matched(names, first)
        for pattern, _ in self.rules:
            if pattern not in (_ALL, *first.values()):
                self._refuse_useless(pattern, first)
        rules = dict(self.rules)
        return {name: rules[pattern] for name, pattern in first.items()}

    def _check_all_matched(self, names: Sequence[str], first: Mapping[str, str]) -> None:
        missing = [name for name in names if name not in first]
        if missing:
            hint = nearest(missing[0], [pattern for pattern, _ in self.rules])
            raise ArgumentError(
                f"no pattern matches the parameters {listed(missing)}{hint}; patterns are matched "
                "with 'unit.parameter', add '*' as the last one for all the rest"
            )

    @staticmethod
    def _refuse_useless(pattern: str, first: Mapping[str, str]) -> None:
        for name, taken in first.items():
            if fnmatch.fnmatchcase(name, pattern):
                raise ArgumentError(
                    f"the pattern {pattern!r} is of no use: the first pattern that matches wins, "
                    f"and {name!r} and all others that it matches are taken, this one by "
                    f"{taken!r}; put {pattern!r} before it, or leave it out"
                )
        raise ArgumentError(
            f"the pattern {pattern!r} matches no parameter{nearest(pattern, first)}; they are "
            f"named 'unit.parameter': {listed(list(first))}"
        )


def _optimizer(pattern: object, given: object) -> Optimizer:
    """Return the optimizer for a pattern; ConfigError if one of them is of another kind."""
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"a pattern must be a string such as '*.bias', got {pattern!r}")
    if is_transformation(given):
        return Optax(given)
    if not isinstance(given, Optimizer):
        raise ConfigError(
            f"the optimizer for {pattern!r} must be one of fc.optim, such as fc.optim.AdamW(), got "
            f"{given!r}{_hint(given)}"
        )
    return given


def _hint(value: object) -> str:
    """Return what to do with an optimizer of PyTorch, and with a function that makes one."""
    kind = value if isinstance(value, type) else type(value)
    if not (hasattr(kind, "zero_grad") and hasattr(kind, "add_param_group")):
        name = getattr(value, "__name__", "")
        return f"; call what makes it, {name}(...)" if callable(value) and name else ""
    return f"; PyTorch's are given as fc.optim.Torch(torch.optim.{kind.__name__}, lr=...)"


def resolve(
    optimizers: Optimizer | Mapping[str, Optimizer] | ParamGroups, names: Sequence[str]
) -> dict[str, Optimizer]:
    """Return the optimizer of each parameter: ``ParamGroups.of(optimizers).resolve(names)``.

    Args:
        optimizers: one for all parameters, or a mapping from patterns of names, such as
            ``"*.bias"``, to optimizers. The first pattern that matches a name wins.
        names: of all parameters that are trained, ``unit.parameter``.

    Returns:
        The optimizers by those names.

    Raises:
        ConfigError: ``optimizers`` is no optimizer, nor a mapping from patterns to such.
        ArgumentError: no pattern matches a parameter, or a pattern is of no use.
    """
    return ParamGroups.of(optimizers).resolve(names)


class OptimizerRange(NamedTuple):
    """Elements ``[start, stop)`` of a shard, all with the same elementwise optimizer.

    Attributes:
        start: the first element.
        stop: the element behind the last one.
        optimizer: updates them.
    """

    start: int
    stop: int
    optimizer: Optimizer


def elementwise_ranges(
    pieces: Sequence[Piece], optimizers: Mapping[str, Optimizer]
) -> list[OptimizerRange]:
    """Merge neighbouring pieces of a shard that have equal elementwise optimizers.

    Args:
        pieces: of one rank's shard, in the order in which they lie there (``FlatLayout.pieces``).
        optimizers: by the names that the pieces have. Pieces whose name is missing, those of
            frozen parameters, belong to no range; neither do those of other optimizers.

    Returns:
        The ranges in the order of the shard, for ``update`` of each one's optimizer.
    """
    ranges: list[OptimizerRange] = []
    for piece in pieces:
        optimizer = optimizers.get(piece.name)
        if optimizer is None or not optimizer.elementwise:
            continue
        start, stop = piece.shard_start, piece.shard_stop
        if ranges and ranges[-1].stop == start and ranges[-1].optimizer == optimizer:
            start = ranges.pop().start
        ranges.append(OptimizerRange(start, stop, optimizer))
    return ranges


def whole_parameter_specs(
    layout: FlatLayout,
    rank: int,
    optimizers: Mapping[str, Optimizer],
    boxes: Mapping[str, ArrayBox] | None = None,
) -> dict[Optimizer, list[PieceSpec]]:
    """Return what ``init_pieces`` and ``update_pieces`` need, by optimizer that is not elementwise.

    Optimizers and specs come in the same order on every rank: that of the layout, one spec for each
    parameter, also where this rank holds nothing of it.

    Args:
        layout: of the unit.
        rank: whose shard it is.
        optimizers: by the names that the layout has, as in ``elementwise_ranges``.
        boxes: of the parameters that are boxes, where these lie; None where no parameter is one.
    """
    boxes = boxes or {}
    held = {piece.name: (piece.param_start, piece.param_stop) for piece in layout.pieces(rank)}
    specs: dict[Optimizer, list[PieceSpec]] = {}
    for param in layout.params:
        optimizer = optimizers.get(param.name)
        if optimizer is not None and not optimizer.elementwise:
            start, stop = held.get(param.name, (0, 0))
            box = boxes.get(param.name)
            whole = param.shape if box is None else box.whole
            specs.setdefault(optimizer, []).append(PieceSpec(param.name, whole, start, stop, box))
    return specs
