"""``Compression``: what travels as integers, and how."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from fsdpcore.compress.packing import Span
from fsdpcore.compress.quantiser import Format
from fsdpcore.core.checks import as_choice, as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.layout import ParamRange

Width: TypeAlias = Literal["int8", "int4"]
_LIKE: Literal["like gather"] = "like gather"
_BITS = {"int8": 8, "int4": 4}
_KEEP = "keep"
_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 4096


@dataclass(frozen=True)
class Compression:
    """Parameters and gradients travel as integers of 8 or 4 bits, with a scale for each block.

    Of a block of B float32 values, ``B + 4`` bytes travel with 8 bits, ``B / 2 + 4`` with 4. All
    ranks compute with what has travelled, the one that sent it, too, so that they have the same
    bits; optimizers update float32. Gradients are quantised once in each exchange: by all ranks
    before they are sent to who sums them up in float32, and, where all ranks keep the sum, by that
    rank before it is sent back. Where a gradient is inf or nan, its block is, on all ranks.

    Norms, biases and all other parameters of less than two axes travel as they are, and so does
    what is frozen, and what ``reshard_after_forward=n`` keeps for the backward pass.

    Args:
        gather: of parameters: "int8", "int4", or None for float32.
        reduce: of gradients, likewise; by default as ``gather``.
        rotation: blocks are rotated by a Hadamard matrix, so that an outlier costs less; by default
            where there are 4 bits. None of the two costs a byte. Where it is, values beyond 1e36
            come back as inf or nan.
        error_feedback: what quantising a gradient has left out is added to the next one. It takes
            memory for one more full gradient on each rank, and is part of the state.
        block: values that share a scale; a power of two from 8 to 4096.
        exact: patterns of the names (``unit.param``) that travel as they are, such as
            ``("*.bias", "head.*")``, in place of those of less than two axes; ``()`` for none.
        keep: where ranks have shards only (``full_shard``, ``hybrid_shard``), what they gathered
            stays with them, packed, until the next update: so parameters travel once in a step, not
            once for each pass. It takes memory for all parameters in so few bits on each rank, and
            changes no bit. With ``reshard_after_forward=n``, which keeps a part, it does nothing.
        hosts_only: what never leaves a host is not quantised: parameters where no ranks that share
            a copy are on two hosts, and gradients where none that sum them up are.

    Raises:
        ArgumentError: a value that makes no sense.

    Example::

        engine = fc.FSDP(units, backend, compression=fc.Compression("int8", "int4"))
    """

    gather: Width | None = "int8"
    reduce: Width | Literal["like gather"] | None = _LIKE
    rotation: bool | None = None
    error_feedback: bool = False
    block: int = 64
    exact: tuple[str, ...] | None = None
    keep: bool = False
    hosts_only: bool = False

    def __post_init__(self) -> None:
        if self.reduce == _LIKE:
            object.__setattr__(self, "reduce", self.gather)
        for field in ("gather", "reduce"):
            as_choice(getattr(self, field), (*get_args(Width), None), f"{field} of Compression")
        as_choice(self.rotation, (True, False, None), "rotation of Compression")
        for field in ("error_feedback", "keep", "hosts_only"):
            as_choice(getattr(self, field), (True, False), f"{field} of Compression")
        block = as_int(self.block, "block of Compression", minimum=_SMALLEST_BLOCK)
        if block > _LARGEST_BLOCK or block & (block - 1):
            raise ArgumentError(
                f"block of Compression must be a power of two from {_SMALLEST_BLOCK} to "
                f"{_LARGEST_BLOCK}, got {block}"
            )
        object.__setattr__(self, "block", block)
        if self.exact is not None:
            object.__setattr__(self, "exact", _patterns(self.exact))
        if self.gather is None and self.reduce is None:
            raise ArgumentError(
                "a Compression that compresses neither gather nor reduce: leave it out"
            )
        if self.error_feedback and self.reduce is None:
            raise ArgumentError(
                "error_feedback of Compression is for gradients: pass reduce='int4'"
            )
        if self.keep and self.gather is None:
            raise ArgumentError("keep of Compression is for parameters: pass gather='int8'")

    @classmethod
    def parse(cls, words: str) -> Compression:
        """Return what a command's option says.

        Args:
            words: how parameters travel, how gradients do where that is not the same, and whether
                ranks keep what they gathered: "int8", "int8,int4", or "int8,int4,keep".

        Raises:
            ArgumentError: it says something else.

        Example::

            assert fc.Compression.parse("int8,keep") == fc.Compression("int8", "int8", keep=True)
        """
        if not isinstance(words, str):
            raise ArgumentError(f"a compression in words is text, such as 'int8', got {words!r}")
        widths = [each.strip() for each in words.split(",")]
        keep = widths[1:] != [] and widths[-1] == _KEEP
        if keep:
            widths.pop()
        if len(widths) > 2 or not set(widths) <= set(get_args(Width)):
            raise ArgumentError(
                f"a compression is int8 or int4 for parameters, the same or another one for "
                f"gradients, and {_KEEP}, such as 'int8' or 'int8,int4,{_KEEP}'; got {words!r}"
            )
        gather, reduce = cast(list[Width], [widths[0], widths[-1]])
        return cls(gather, reduce, keep=keep)

    @property
    def gathers(self) -> Format | None:
        """How parameters travel; None for float32."""
        return self._format(self.gather)

    @property
    def reduces(self) -> Format | None:
        """How gradients travel; None for float32."""
        return self._format(cast(Width | None, self.reduce))

    def _format(self, width: Width | None) -> Format | None:
        if width is None:
            return None
        bits = _BITS[width]
        return Format(bits, self.block, bits == 4 if self.rotation is None else self.rotation)

    def exact_spans(self, unit: str, params: Iterable[ParamRange]) -> tuple[Span, ...]:
        """Return which elements of a flat buffer travel as they are.

        Args:
            unit: name of the unit.
            params: what lies in the buffer.
        """
        found = []
        for param in params:
            if self.exact is None:
                exact = len(param.shape) < 2
            else:
                exact = any(matching(pattern, unit, [param]) for pattern in self.exact)
            if exact:
                found.append((param.offset, param.stop))
        return tuple(found)


def matching(pattern: str, unit: str, params: Iterable[ParamRange]) -> int:
    """Return how many parameters of a unit a pattern of ``exact`` matches."""
    names = (f"{unit}.{param.name}" for param in params)
    return sum(fnmatch.fnmatchcase(name, pattern) for name in names)


def _patterns(given: Any) -> tuple[str, ...]:
    if isinstance(given, (set, frozenset)):
        given = sorted(given, key=str)  # all ranks have to have one order
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, (tuple, list)) or not all(isinstance(p, str) for p in patterns):
        raise ArgumentError(
            f"exact of Compression are patterns of names, such as ('*.bias',), got {given!r}"
        )
    return tuple(patterns)
