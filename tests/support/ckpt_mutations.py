"""Damage to bytes and to JSON, at random: what disks, bugs and attackers make of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    64,
    2**31,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**400,
    -(2**63),
    0.0,
    -0.0,
    1.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "U8",
    "F32",
    "F4",
    "float32",
    "float64",
    "..",
    "../x",
    "/etc/passwd",
    "COMMIT",
    "metadata.json",
    ".hidden",
    "a\0b",
    "\ud800",
    "__metadata__",
    [],
    {},
    [[]],
    [0],
    [0, 0, 0, 0],
    [2**40] * 4,
    [1] * 65,
    {"": 0},
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return bytes that differ from ``data``, in most cases."""
    kind = rng.randrange(8)
    buffer = bytearray(data)
    if kind == 0:
        for _ in range(rng.randint(1, 4)):
            buffer[rng.randrange(len(buffer))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        for _ in range(rng.randint(1, 3)):
            buffer[rng.randrange(len(buffer))] = rng.randrange(256)
    elif kind == 2:  # what JSON is made of, where it was not
        at = rng.randrange(len(buffer))
        buffer[at : at + rng.randrange(3)] = rng.choice(
            (b"[", b"]", b"{", b"}", b'"', b",", b":", b"-", b"0", b"9" * 30, b"e9", b"\\", b"null")
        )
    elif kind == 3:
        del buffer[rng.randrange(len(buffer)) :]
    elif kind == 4:
        a, b = sorted(rng.randrange(len(buffer)) for _ in range(2))
        at = rng.randrange(len(buffer))
        buffer[at:at] = buffer[a : min(b, a + 200)]
    elif kind == 5:
        a, b = sorted(rng.randrange(len(buffer)) for _ in range(2))
        del buffer[a : min(b, a + 50)]
    elif kind == 6:  # another digit
        digits = [i for i, byte in enumerate(buffer) if 48 <= byte < 58]
        for _ in range(rng.randint(1, 3)):
            if digits:
                buffer[rng.choice(digits)] = rng.randrange(48, 58)
    else:
        at = rng.randrange(len(buffer))
        nested = rng.choice((b"[", b'{"a":', b"[{", b"[1,")) * rng.choice((10, 100, 1000, 5000))
        buffer[at:at] = nested
    return bytes(buffer)


def mutated_json(told: Any, rng: random.Random) -> str:
    """Return JSON, or nearly, with some of its values changed, moved, doubled or left out."""
    made = json.loads(json.dumps(told))
    for _ in range(rng.randint(1, 3)):
        made = _edited(made, rng)
    text = json.dumps(made, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:  # a key that is there twice
        keys = [i for i, character in enumerate(text) if character == "{"]
        if keys:
            at = rng.choice(keys)
            text = text[: at + 1] + '"step":1,"step":1,' + text[at + 1 :]
    return text


def _edited(told: Any, rng: random.Random) -> Any:
    places = list(_places(told))
    if not places:
        return told
    holder, key = rng.choice(places)
    value = holder[key]
    kind = rng.randrange(7)
    if kind == 0:
        holder[key] = deepcopy(rng.choice(VALUES))
    elif kind == 1 and type(value) is int:
        holder[key] = value + rng.choice((-1, 1, 8, -8, 64, 10**6, -value * 2, value * 2**40))
    elif kind == 2:  # swap with another place
        other, at = rng.choice(places)
        if not _inside(value, other) and not _inside(other[at], holder):
            holder[key], other[at] = other[at], value
    elif kind == 3:
        del holder[key]
    elif kind == 4 and isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(value)))
    elif kind == 5 and isinstance(holder, dict):
        name = rng.choice(VALUES)
        holder[name if isinstance(name, str) else "more"] = holder.pop(key)
    else:
        deep: Any = value
        for _ in range(rng.choice((1, 2, 70, 150))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        holder[key] = deep
    return told


def _inside(value: Any, holder: Any) -> bool:
    return any(each is holder for each, _ in _places([value])) or value is holder


def _places(told: Any) -> Iterator[tuple[Any, Any]]:
    todo = [told]
    while todo:
        each = todo.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each))
        for key in keys:
            yield each, key
            if isinstance(each[key], (dict, list)):
                todo.append(each[key])
