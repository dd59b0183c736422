"""The house keeps its order: who may import whom, at run time, for types and within functions."""

from __future__ import annotations

import ast
import re

import pytest
from support.house import Import, circles, imports, modules

# From the ground up: a room imports those below it, and its neighbours on the floor.
FLOORS = (
    {"core"},
    {"diagnostics"},
    {"comm"},
    {"collectives"},
    {"fsdp", "parallel"},
    {"checkpoint"},
    {"adapters"},
    {"launch"},
    {"commands", "bench"},
)
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
# The roof: it names what is public, from all rooms.
ROOF = {"fsdpcore", "fsdpcore.__main__"}

# Imports that point up, each with its reason.
EXCEPTIONS = {
    # A transport between processes lets its ranks meet as those that a launcher starts do.
    ("transports", "fsdpcore.launch.rendezvous"),
}

FILES = modules()
IMPORTS = imports(FILES)


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def listed(found: list[Import]) -> str:
    return "".join(f"\n  {item}" for item in found)


def test_every_room_has_a_floor() -> None:
    assert {room(name) for name in FILES if name not in ROOF} == {*LEVELS, "transports"}


def test_no_import_points_up() -> None:
    up = [
        item
        for item in IMPORTS
        if room(item.source) in LEVELS
        and item.source not in ROOF
        and LEVELS.get(room(item.target), -1) > LEVELS[room(item.source)]
    ]
    assert not up, f"imports that point up:{listed(up)}"


def test_a_transport_imports_collectives_and_what_is_below() -> None:
    up = [
        item
        for item in IMPORTS
        if room(item.source) == "transports"
        and LEVELS.get(room(item.target), -1) > LEVELS["collectives"]
        and ("transports", item.target) not in EXCEPTIONS
    ]
    assert not up, f"imports that point up:{listed(up)}"


def test_nothing_outside_knows_a_transport() -> None:
    found = [
        item
        for item in IMPORTS
        if room(item.target) == "transports" and room(item.source) != "transports"
    ]
    assert not found, f"imports of a transport:{listed(found)}"


def test_only_the_top_floor_imports_the_roof() -> None:
    found = [
        item
        for item in IMPORTS
        if item.target in ROOF and item.source not in ROOF and room(item.source) not in FLOORS[-1]
    ]
    assert not found, f"imports of the whole package:{listed(found)}"


def test_no_files_import_each_other_in_a_circle() -> None:
    found = circles(IMPORTS)
    assert not found, "circles:" + "".join(f"\n  {', '.join(each)}" for each in found)


PACKAGES = sorted(name for name, path in FILES.items() if path.name == "__init__.py")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_room_says_what_it_is_for(name: str) -> None:
    text = ast.get_docstring(ast.parse(FILES[name].read_text())) or ""
    assert text.partition("\n")[0].endswith((".", ":")), f"{name}: no sentence"
    assert len(text.split()) > 3, f"{name}: no sentence"


def test_every_file_that_the_architecture_names_is_there() -> None:
    root = FILES["fsdpcore"].parents[1]
    text = (root / "ARCHITECTURE.md").read_text()
    folders = ("fsdpcore", "transports", "tests", "bench")
    there = [
        f"/{path.relative_to(root)}" for name in folders for path in (root / name).rglob("*.py")
    ]
    named = set(re.findall(r"[\w/]+\.py\b", text))
    assert len(named) > 100
    lost = [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)]
    assert not lost, f"named, but not there: {', '.join(lost)}"
