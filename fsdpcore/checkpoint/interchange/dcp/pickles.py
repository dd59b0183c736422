"""What a pickle says, as plain values: nothing is imported, called or unpickled.

A pickle is a program. Here are the few of its instructions that PyTorch's checkpoints are made of.
What would import a name leaves a ``Name``, if that is one of those the caller knows; what would
call it leaves an ``Instance``. The standard library's ``Unpickler`` with a ``find_class`` of one's
own would do less: a few bytes make it allocate tens of GiB for its memo, and what a pickle builds
may change the classes that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.core.errors import CorruptCheckpointError


class Name(NamedTuple):
    """A class or function, by its name."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class Instance:
    """An object that nobody has made.

    Attributes:
        of: what would make it; ``PERSISTENT`` for what is stored beside the pickle.
        args: of that.
        state: what it would be given then.
    """

    of: Name
    args: tuple[Any, ...]
    state: Any = None


PERSISTENT = Name("pickle", "persistent_id")


def read_pickle(data: bytes, known: Container[Name], what: str) -> Any:
    """Return what a pickle describes: None, bool, int, str, tuple, list, dict, Name, Instance.

    It takes time and memory in proportion to ``data``. The keys of a dict are str, int or
    ``Instance``, which is equal to itself only. Lists and dicts may contain themselves.

    Args:
        data: the pickle.
        known: the names that it may have.
        what: it is, for messages.

    Raises:
        CorruptCheckpointError: it is no such pickle, or has other names.
    """
    return _Reader(data, known, what).run()


class _Reader:
    def __init__(self, data: bytes, known: Container[Name], what: str) -> None:
        self._data = data
        self._known = known
        self._what = what
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, size = self._data, len(self._data)
        while self._at < size:
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                if len(self._stack) != 1 or self._below:
                    raise self._damaged("it ends in the middle of a value")
                return self._stack[0]
            step = _STEPS.get(code)
            if step is None:
                raise self._damaged(f"the instruction {bytes([code])!r} is none that is used there")
            step(self)
        raise self._damaged("it is cut off")

    def _damaged(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._what} is damaged at byte {self._at}: {why}")

    # Bytes.

    def _take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) != count:
            raise self._damaged("it is cut off")
        self._at += count
        return found

    def _unsigned(self, count: int) -> int:
        return int.from_bytes(self._take(count), "little")

    def _decoded(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self._damaged("a text is no UTF-8") from None

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise self._damaged("it is cut off")
        found = self._take(end - self._at)
        self._at += 1
        return self._decoded(found)

    # Values.

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack:
            raise self._damaged("a value is missing")
        return self._stack.pop()

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise self._damaged(f"a {kind.__name__} is missing")
        return self._stack[-1]

    def _marked(self) -> list[Any]:
        """Return what was pushed since the last mark."""
        if not self._below:
            raise self._damaged("a mark is missing")
        found, self._stack = self._stack, self._below.pop()
        return found

    def _proto(self) -> None:
        if self._unsigned(1) > 5:
            raise self._damaged("its protocol is unknown")

    def _frame(self) -> None:
        if self._unsigned(8) > len(self._data) - self._at:
            raise self._damaged("it is cut off")

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _int(self, count: int, *, signed: bool = False) -> None:
        self._push(int.from_bytes(self._take(count), "little", signed=signed))

    def _text(self, count: int) -> None:
        self._push(self._decoded(self._take(self._unsigned(count))))

    def _tuple(self, count: int) -> None:
        found = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(found)))

    def _put(self, index: int) -> None:
        if not self._stack:
            raise self._damaged("a value is missing")
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self._damaged("it refers to a value that there is not")
        self._push(self._memo[index])

    def _append(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _set(self, pairs: list[Any]) -> None:
        target = self._top(dict)
        if len(pairs) % 2:
            raise self._damaged("a value is missing")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) not in (str, int, Instance):
                raise self._damaged(f"{short(key)} is a key")
            target[key] = value

    def _set_one(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def _append_one(self) -> None:
        value = self._pop()
        self._append([value])

    # Names, and what would be called.

    def _name(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise self._damaged("a name is no text")
        found = Name(module, name)
        if found not in self._known:
            raise CorruptCheckpointError(
                f"{self._what} names {short(f'{module}.{name}')}, which no checkpoint of PyTorch "
                "needs that can be read here; it was not imported"
            )
        self._push(found)

    def _line_name(self) -> None:
        module, name = self._line(), self._line()
        self._name(module, name)

    def _stack_name(self) -> None:
        name, module = self._pop(), self._pop()
        self._name(module, name)

    def _made(self) -> None:
        args, of = self._pop(), self._pop()
        if type(of) is not Name or type(args) is not tuple:
            raise self._damaged("something is called that is no class")
        self._push(Instance(of, args))

    def _build(self) -> None:
        state = self._pop()
        target = self._top(Instance)
        if target.state is not None:
            raise self._damaged("an object has two states")
        target.state = state

    def _persistent(self) -> None:
        self._push(Instance(PERSISTENT, (self._pop(),)))


_STOP = ord(".")

_STEPS: Mapping[int, Callable[[_Reader], None]] = MappingProxyType(
    {
        0x80: _Reader._proto,
        0x95: _Reader._frame,
        ord("("): _Reader._mark,
        ord("N"): lambda each: each._push(None),
        0x88: lambda each: each._push(True),
        0x89: lambda each: each._push(False),
        ord("K"): lambda each: each._int(1),
        ord("M"): lambda each: each._int(2),
        ord("J"): lambda each: each._int(4, signed=True),
        0x8A: lambda each: each._int(each._unsigned(1), signed=True),
        0x8C: lambda each: each._text(1),
        ord("X"): lambda each: each._text(4),
        ord(")"): lambda each: each._push(()),
        0x85: lambda each: each._tuple(1),
        0x86: lambda each: each._tuple(2),
        0x87: lambda each: each._tuple(3),
        ord("t"): lambda each: each._push(tuple(each._marked())),
        ord("]"): lambda each: each._push([]),
        ord("a"): _Reader._append_one,
        ord("e"): lambda each: each._append(each._marked()),
        ord("}"): lambda each: each._push({}),
        ord("s"): _Reader._set_one,
        ord("u"): lambda each: each._set(each._marked()),
        0x94: lambda each: each._put(len(each._memo)),
        ord("q"): lambda each: each._put(each._unsigned(1)),
        ord("r"): lambda each: each._put(each._unsigned(4)),
        ord("h"): lambda each: each._get(each._unsigned(1)),
        ord("j"): lambda each: each._get(each._unsigned(4)),
        ord("c"): _Reader._line_name,
        0x93: _Reader._stack_name,
        ord("R"): _Reader._made,
        0x81: _Reader._made,
        ord("b"): _Reader._build,
        ord("Q"): _Reader._persistent,
    }
)
"""The instructions: PROTO, FRAME, MARK, NONE and so on, in the order of Python's pickletools."""
