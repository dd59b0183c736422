"""Names with a prefix: how layers that are made of other layers share one mapping of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeVar, cast

from fsdpcore.core.buffers import Array

T = TypeVar("T")


class Scope(MutableMapping[str, Array]):
    """Those entries of a mapping whose names begin with a prefix, by the rest of their names.

    A view: what is read, and assigned, is in the mapping. Of a read-only one it is read-only, too.

    Args:
        mapping: parameters or gradients by name.
        prefix: such as ``"qkv."``.
    """

    def __init__(self, mapping: Mapping[str, Array], prefix: str) -> None:
        self._mapping = mapping
        self._prefix = prefix

    def __getitem__(self, name: str) -> Array:
        return self._mapping[self._prefix + name]

    def __setitem__(self, name: str, value: Array) -> None:
        cast(MutableMapping[str, Array], self._mapping)[self._prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del cast(MutableMapping[str, Array], self._mapping)[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._prefix + name in self._mapping

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return (name[start:] for name in self._mapping if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def empty(self, name: str) -> Array:
        """Return the array of a gradient with any content, to be written whole.

        The engine's mappings are spared from filling it with zeros; of others it is what is in
        them, and belongs to them.

        Args:
            name: without the prefix.

        Raises:
            KeyError: the mapping has no such gradient, as of a frozen parameter.
        """
        return unfilled(self._mapping, self._prefix + name)


def unfilled(grads: Mapping[str, Array], name: str) -> Array:
    """Return the array of a gradient that is about to be written whole.

    The engine's mappings have ``empty`` for that, which spares them from filling it with zeros;
    of others it is what is in them.
    """
    found: Any = getattr(grads, "empty", grads.__getitem__)
    return cast(Array, found(name))


def prefixed(prefix: str, entries: Mapping[str, T]) -> dict[str, T]:
    """Return a new dict of the same entries, with a prefix before each name.

    Args:
        prefix: such as ``"qkv."``.
        entries: anything by name; not copied.

    Example::

        fc.parallel.prefixed("qkv.", {"w": 1})  # {"qkv.w": 1}
    """
    return {prefix + name: entry for name, entry in entries.items()}
