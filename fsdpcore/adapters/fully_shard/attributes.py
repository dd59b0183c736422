"""Which arrays an object has in its attributes, and where: what ``fully_shard`` takes out of it.

Pure but for ``AttributePath.put`` and ``AttributePath.clear``: the object is looked at, its class
is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import numpy as np

from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.fsdp.units.spec import Spec

MISSING: Any = object()  # there is nothing in that place

MARK = "_sharded_as"  # in a class whose object's arrays are sharded: by which name

_TRAINED = (np.dtype(np.float32), np.dtype(np.float64))
_HEAP_TYPE = 1 << 9  # of a class that a ``class`` statement has made, or as good as that


@dataclass(frozen=True, eq=False)
class AttributePath:
    """An attribute of an object, or what lies below it in dicts, lists and namespaces.

    Attributes:
        owner: the object.
        attribute: its name there.
        keys: of the dicts, lists and namespaces on the way down from there; none for the attribute.
        slot: of the attribute; None if it is in the object's ``__dict__``.
    """

    owner: object
    attribute: str
    keys: tuple[Any, ...] = ()
    slot: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slot", slot_of(type(self.owner), self.attribute))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal places."""
        return id(self.owner), self.attribute, self.keys

    def below(self, key: Any) -> AttributePath:
        """Return the place of an item of what is here."""
        return AttributePath(self.owner, self.attribute, (*self.keys, key))

    def get(self) -> Any:
        """Return what is there, past all descriptors; MISSING if nothing is."""
        value = stored(self.owner, self.attribute, self.slot)
        for key in self.keys:
            if value is MISSING:
                return MISSING
            value = _item(value, key)
        return value

    def put(self, value: object) -> None:
        """Have ``value`` there, past all descriptors; the containers on the way must be there."""
        if not self.keys:
            store(self.owner, self.attribute, self.slot, value)
            return
        items, key = self._items(), self.keys[-1]
        if items is not MISSING:
            items[key] = value

    def clear(self) -> None:
        """Have nothing there: attributes and keys are removed, items of a list become None."""
        if self.get() is MISSING:
            return
        if not self.keys:
            remove(self.owner, self.attribute, self.slot)
            return
        items = self._items()
        if isinstance(items, list):
            items[self.keys[-1]] = None
        else:
            del items[self.keys[-1]]

    def _items(self) -> Any:
        """Return the innermost container."""
        return _opened(AttributePath(self.owner, self.attribute, self.keys[:-1]).get())


@dataclass(frozen=True, eq=False)
class FoundArray:
    """An array, or a ``Spec`` of one, in an object's attributes.

    Attributes:
        name: the way to it, from the object that was searched: ``"attention.q.w"``.
        place: where it is.
        value: the array, the box of one, or the ``Spec``.
    """

    name: str
    place: AttributePath
    value: Array | BoxShard | Spec


def arrays_of(root: object, ignored: Callable[[str], bool]) -> list[FoundArray]:
    """Return the float32 and float64 arrays, boxes of such, and Specs in an object's attributes.

    In order: attributes as they were first set (those of ``__slots__`` by class), and in each that
    is an object with attributes, a dict, a list or a namespace, what is in that. Objects of the
    standard library, NumPy and fsdpcore are not looked into; what occurs twice is found once.

    Args:
        root: an object of a class of the user's.
        ignored: tells by the name what is left alone, with all below it.

    Raises:
        ArgumentError: an array that could not be put back: in a tuple, or of a subclass.
    """
    return list(_Search(ignored).of_object(root, ""))


class _Search:
    """One way through an object; remembers where it was, as objects may refer to each other."""

    def __init__(self, ignored: Callable[[str], bool]) -> None:
        self._ignored = ignored
        self._seen: set[int] = set()

    def of_object(self, owner: object, prefix: str) -> Iterator[FoundArray]:
        self._seen.add(id(owner))
        mark = vars(type(owner)).get(MARK)
        if mark is not None:
            raise ArgumentError(
                f"{prefix[:-1] or 'it'} is sharded already, in {mark!r}; call restore() there "
                "first. Ranks that are threads make layers of their own each"
            )
        for attribute, value in attributes(owner, slots_of(type(owner))):
            yield from self._of_value(
                value, f"{prefix}{attribute}", AttributePath(owner, attribute)
            )

    def _of_value(self, value: Any, name: str, place: AttributePath) -> Iterator[FoundArray]:
        if self._ignored(name):
            return
        if isinstance(value, Spec) or is_parameter(array_of(value)):
            _check_array(name, array_of(value))
            yield FoundArray(name, place, value)
        elif id(value) in self._seen:
            return
        elif isinstance(value, tuple):
            self._seen.add(id(value))
            for number, item in enumerate(value):
                yield from self._of_tuple_item(item, f"{name}.{number}", place.below(number))
        elif (items := _opened(value)) is not MISSING:
            self._seen.add(id(value))
            pairs = items.items() if isinstance(items, dict) else enumerate(items)
            for key, item in list(pairs):
                yield from self._of_value(item, f"{name}.{key}", place.below(key))
            if _has_attributes(value):  # a list or dict of the user's own class
                yield from self.of_object(value, f"{name}.")
        elif _has_attributes(value):
            yield from self.of_object(value, f"{name}.")

    def _of_tuple_item(self, item: Any, name: str, place: AttributePath) -> Iterator[FoundArray]:
        for found in self._of_value(item, name, place):
            if found.place.owner is place.owner:
                raise ArgumentError(
                    f"{found.name} is an array in a tuple, where it cannot be replaced; keep "
                    "parameters in a list, or name what is no parameter in ignored="
                )
            yield found


def attributes(owner: object, slots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give names and values of an object's own attributes, past all descriptors.

    ``slots`` are those of its class.
    """
    yield from list(getattr(owner, "__dict__", {}).items())
    for name, slot in slots.items():
        value = stored(owner, name, slot)
        if value is not MISSING:
            yield name, value


def slots_of(kind: type) -> dict[str, Any]:
    """Return the slots of a class that no other attribute of the class hides, by name."""
    names = [
        name
        for base in reversed(kind.__mro__)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    ]
    slots = {name: slot_of(kind, name) for name in names}
    return {name: slot for name, slot in slots.items() if slot is not None}


def slot_of(kind: type, name: str) -> Any:
    """Return the slot of that name, or None if such attributes are in the object's ``__dict__``."""
    for base in kind.__mro__:
        inside = vars(base)
        if name in inside and MARK not in inside:  # there it is the guard
            member = inside[name]
            return member if isinstance(member, MemberDescriptorType) else None
    return None


def stored(owner: object, name: str, slot: Any) -> Any:
    """Return an attribute past all descriptors; MISSING if there is none."""
    if slot is None:
        return getattr(owner, "__dict__", {}).get(name, MISSING)
    try:
        return slot.__get__(owner, type(owner))
    except AttributeError:  # nothing was assigned to it
        return MISSING


def store(owner: object, name: str, slot: Any, value: object) -> None:
    """Set an attribute past all descriptors."""
    if slot is None:
        vars(owner)[name] = value
    else:
        slot.__set__(owner, value)


def remove(owner: object, name: str, slot: Any) -> None:
    """Remove an attribute past all descriptors; it is there."""
    if slot is None:
        del vars(owner)[name]
    else:
        slot.__delete__(owner)


def array_of(value: Any) -> Any:
    """Return the array that a rank computes with, if ``value`` is a box of a whole one."""
    return value.array if isinstance(value, BoxShard) else value


def is_parameter(value: object) -> bool:
    """Whether it is an array that can be trained, of NumPy or CuPy."""
    array: Any = value
    return array_module(value) is not None and array.dtype in _TRAINED


def _check_array(name: str, value: Any) -> None:
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        raise ArgumentError(
            f"{name} is a {type(value).__name__}, of which only the plain array would be left; "
            "convert it with np.asarray, or name it in ignored="
        )


def _has_attributes(value: object) -> bool:
    """Whether it is an object of a class of the user's."""
    kind = type(value)
    if isinstance(value, (type, Enum)) or not kind.__flags__ & _HEAP_TYPE:
        return False
    module = str(kind.__module__).partition(".")[0]
    return module not in sys.stdlib_module_names and module not in ("numpy", "cupy", "fsdpcore")


def _opened(value: Any) -> Any:
    """Return the items of a container that can be changed, as a dict or list; else MISSING."""
    if isinstance(value, SimpleNamespace):
        return vars(value)
    return value if isinstance(value, (dict, list)) else MISSING


def _item(container: Any, key: Any) -> Any:
    items = _opened(container)
    if isinstance(items, Mapping):
        return items.get(key, MISSING)
    if isinstance(items, list) and isinstance(key, int) and key < len(items):
        return items[key]
    return MISSING
