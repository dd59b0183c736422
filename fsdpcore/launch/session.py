"""What passes between an interactive session and its ranks, which cannot import its main module.

Functions and classes of a notebook, of ``python -c`` and of the interactive interpreter travel by
value. This is imported where there is such a session, since most programs need no cloudpickle.
"""

from __future__ import annotations

import functools
import gc
import io
import linecache
import pickle
import sys
from collections.abc import Callable, Mapping
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as tracking

_Cached = type(functools.cache(abs))


def dumps(value: Any) -> bytes:
    """Pickle what ranks are to have, with the session's functions and classes by value."""
    return _dumps(value, {})


def sources() -> dict[str, Any]:
    """The lines of code that are in no file, such as cells, as ``linecache`` keeps them.

    With them, tracebacks of ranks show these lines.
    """
    entries = list(linecache.cache.items())
    return {name: entry for name, entry in entries if len(entry) == 4 and entry[1] is None}


def classes() -> dict[str, str]:
    """Which classes the session has under their names now, of those that were pickled.

    There may be others of the same name: nested ones, and what was defined before.
    """
    main, numbers = vars(sys.modules["__main__"]), tracking._DYNAMIC_CLASS_TRACKER_BY_CLASS
    named = list(main.items())  # another thread may define more
    return {name: numbers[each] for name, each in named if _is_class_of(numbers, each)}


def _is_class_of(numbers: Mapping[type, str], value: object) -> bool:
    return isinstance(value, type) and value in numbers


class SessionClasses:
    """In a rank: the classes that have come from the session, which results name when they return.

    By itself cloudpickle would send their definitions back. Loading these would set all methods
    and attributes of the session's own classes anew, to copies that see copies of its globals.

    They are in the rank's main module, too, so that ranks can send each other objects of them.

    Args:
        names: what ``classes`` has returned in the session.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._ids = dict(tracking._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        self._main_before = sys.modules["__main__"]  # which must not end: its functions run
        main = sys.modules["__main__"] = ModuleType("__main__")
        vars(main).update({c.__name__: c for c in self._ids if c.__module__ == "__main__"})
        come = {number: each for each, number in self._ids.items()}
        vars(main).update({name: come[names[name]] for name in names if names[name] in come})

    def dumps(self, result: Any) -> bytes:
        """Pickle a result for the session."""
        return _dumps(result, self._ids)


def _dumps(value: Any, ids: Mapping[type, str]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, ids).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, ids: Mapping[type, str]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._ids = ids

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj in self._ids:
            return _class_of_session, (self._ids[obj],)
        if isinstance(obj, CodeType):  # whose file cloudpickle leaves out
            make, parts = self.dispatch_table[CodeType](obj)
            return _code_of_file, (make, parts, obj.co_filename)
        if isinstance(obj, _Cached) and obj.__module__ == "__main__" and _names_its_own(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters()), dict(vars(obj))
        return super().reducer_override(obj)


def _class_of_session(identity: str) -> Any:
    return tracking._DYNAMIC_CLASS_TRACKER_BY_ID[identity]


def _names_its_own(cached: Any) -> bool:
    """Whether ``__wrapped__`` is what it calls; ``functools.wraps`` may have put another there."""
    return any(each is cached.__wrapped__ for each in gc.get_referents(cached))


def _cached(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    return functools.lru_cache(**options)(function)


def _code_of_file(make: Callable[..., CodeType], parts: tuple[Any, ...], file: str) -> CodeType:
    return make(*parts).replace(co_filename=file)
