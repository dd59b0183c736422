"""What of two checkpoints differs that is no array: numbers, text, generators, objects."""

from __future__ import annotations

from fsdpcore.checkpoint.format.nodes import leaves, name_of, tag_of
from fsdpcore.checkpoint.format.strict_json import encode
from fsdpcore.checkpoint.interchange.array_sources import ArraySource, StepSource
from fsdpcore.checkpoint.plan.stored_state import StoredState


def other_entries(first: ArraySource, second: ArraySource) -> list[str]:
    """Return the names of entries that are no arrays and differ between two checkpoints."""
    if not (isinstance(first, StepSource) and isinstance(second, StepSource)):
        return []
    one, other = (_entries(StoredState.of(each.metadata)) for each in (first, second))
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def _entries(stored: StoredState) -> dict[str, str]:
    """Return all entries that are no arrays, as text."""
    found = {}
    for path, node in leaves(stored.node):
        name, tag = name_of(path), tag_of(node)
        if tag == "per rank":
            found[name] = encode([each.get(name) for each in stored.own])
        elif tag not in ("array", "engine"):
            found[name] = encode(node)
    return found
