"""Classes of objects whose arrays are sharded: the user's own, that say so where one is missing.

An object gets a class of its own, derived from its class, so that ``isinstance`` holds. Arrays stay
where they are stored in attributes; what is guarded is read past the guard by ``Place``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from fsdpcore.adapters.fully_shard.attributes import MARK, MISSING, remove, slot_of, store, stored
from fsdpcore.core.errors import ArgumentError, StateError

# What to do instead of calling a method, given the call without its arguments left to pass.
Run = Callable[[Callable[[], Any]], Any]


class ShardedAttributeError(StateError, AttributeError):
    """An attribute is sharded over the ranks; the message says when it is there."""


class GuardedAttribute:
    """A descriptor before an attribute that is not always there.

    Args:
        kind: the class whose objects have it.
        attribute: its name.
        missing: what is said where it is read and not there.
        fixed: what is said where it is assigned to or deleted; None where that is allowed.
    """

    def __init__(self, kind: type, attribute: str, missing: str, fixed: str | None) -> None:
        self._attribute = attribute
        self._slot = slot_of(kind, attribute)
        self._missing = missing
        self._fixed = fixed

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        if owner is None:
            return self
        value = stored(owner, self._attribute, self._slot)
        if value is MISSING:
            raise ShardedAttributeError(self._missing)
        return value

    def __set__(self, owner: object, value: object) -> None:
        if self._fixed is not None:
            raise ShardedAttributeError(self._fixed)
        store(owner, self._attribute, self._slot, value)

    def __delete__(self, owner: object) -> None:
        if self._fixed is not None:
            raise ShardedAttributeError(self._fixed)
        _ = self.__get__(owner)
        remove(owner, self._attribute, self._slot)

    @property
    def missing(self) -> str:
        """What is said where it is not there."""
        return self._missing


class Placeholder:
    """Is in a list or dict where an array is sharded; whatever is computed with it is an error.

    It can be told from other objects, hashed and shown, nothing else.

    Args:
        says: what the error says.
    """

    __slots__ = ("_says",)

    def __init__(self, says: str) -> None:
        object.__setattr__(self, "_says", says)

    def __getattr__(self, name: str) -> NoReturn:
        _fail(self)

    def __repr__(self) -> str:
        return f"<{self._says}>"

    def __eq__(self, other: object) -> NoReturn:
        _fail(self)

    __hash__ = object.__hash__


def _fail(self: Placeholder, *_: object, **__: object) -> NoReturn:
    raise ShardedAttributeError(self._says)


_BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_REFUSED = (
    *(f"{turned}{name}" for name in _BINARY for turned in ("", "r", "i")),
    *("divmod", "rdivmod", "ne", "lt", "le", "gt", "ge"),
    *("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"),
    *("bool", "int", "float", "complex", "index", "bytes", "array"),
    *("len", "iter", "reversed", "contains", "getitem", "setitem", "delitem"),
    *("call", "enter", "exit", "setattr", "delattr", "reduce_ex"),
)
for _name in _REFUSED:  # which Python looks for in the class only
    setattr(Placeholder, f"__{_name}__", _fail)


def guarded_class(
    owner: object, name: str, guards: Mapping[str, GuardedAttribute], methods: Mapping[str, Run]
) -> type:
    """Return a class for one object, derived from its own.

    Args:
        owner: the object; it keeps its class so far.
        name: what messages call it.
        guards: of its attributes.
        methods: what is done instead of calling some of its methods.

    Raises:
        ArgumentError: objects of such a class cannot change their class, or it cannot be derived.
    """
    kind = type(owner)
    namespace: dict[str, Any] = {
        "__slots__": (),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        MARK: name,
        "__repr__": _repr(kind, name),
        **dict.fromkeys(("__copy__", "__deepcopy__", "__reduce_ex__"), _refusal(name)),
        **{method: _method(kind, method, run) for method, run in methods.items()},
        **guards,
    }
    own = getattr(kind, "__getattr__", None)
    if own is not None:
        namespace["__getattr__"] = _getattr(own, guards)
    try:
        metaclass: Any = type(kind)
        derived: type = metaclass(f"Sharded{kind.__name__}", (kind,), namespace)
        change_class(owner, derived)
        change_class(owner, kind)
    except Exception as error:  # the class's own __init_subclass__ may raise anything
        raise ArgumentError(
            f"{name} is a {kind.__name__}, whose parameters cannot be taken out of its "
            f"attributes: {error}; make its unit with fc.Unit, or name it in ignored="
        ) from error
    return derived


def change_class(owner: object, kind: type) -> None:
    """Make ``owner`` an object of another class of the same layout."""
    object.__setattr__(owner, "__class__", kind)


def _method(kind: type, name: str, run: Run) -> Callable[..., Any]:
    """Return a method that passes the user's own to ``run``."""
    original = inspect.getattr_static(kind, name)

    def method(self: object, *args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(original.__get__(self, kind), *args, **kwargs))

    return functools.wraps(getattr(kind, name))(method)


def _repr(kind: Any, name: str) -> Callable[[object], str]:
    def shown(self: object) -> str:
        try:
            return str(kind.__repr__(self))
        except ShardedAttributeError:  # it shows its parameters
            return f"<{kind.__name__} {name!r}, sharded>"

    return shown


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *_: object) -> NoReturn:
        raise StateError(
            f"{name} cannot be copied or pickled while its parameters are sharded; call restore() "
            "first, or save sharded.engine with fc.checkpoint"
        )

    return refuse


def _getattr(own: Callable[[object, str], Any], guards: Mapping[str, GuardedAttribute]) -> Any:
    """Let the class's own ``__getattr__`` see no attribute that is guarded."""

    def find(self: object, name: str) -> Any:
        if name in guards:
            raise ShardedAttributeError(guards[name].missing)
        return own(self, name)

    return find
