"""The house keeps its order: who may import whom, at run time, for types and within functions."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from support.house import Import, circles, imports, modules

# Of a house the floors, from the ground up: a room, which is a folder or a file, imports those of
# the floors below it. Rooms of one floor do not know each other.
HOUSES: dict[str, tuple[set[str], ...]] = {
    "fsdpcore": (
        {"core"},
        {"simulation"},
        {"diagnostics"},
        {"comm"},
        {"collectives"},
        {"compress"},
        {"fsdp"},
        {"data", "parallel"},
        {"checkpoint"},
        {"adapters"},
        {"launch"},
        {"elastic"},
        {"bench"},
        {"commands"},
    ),
    "fsdpcore.collectives": (
        {"agreement", "dissemination", "fingerprint", "movements", "objects"},
        {"consensus", "spec"},
        {"context", "device_transport", "metrics", "output"},
        {"algorithms", "state"},
        {"on_device", "shared"},
        {"hierarchy"},
        {"selection"},
        {"lone"},
        {"run"},
        {"arguments"},
        {"operations"},
        {"batch", "methods"},
    ),
    "fsdpcore.fsdp": (
        {"gpu", "sharding"},
        {"offload", "optim"},
        {"units"},
        {"state"},
        {"step"},
        {"plan"},
        {"engine"},
        {"outer_unit"},
        {"outer_step"},
    ),
    "fsdpcore.launch": (
        {"addresses", "exec_rank", "failure_report", "output", "printing", "secret", "session"}
        | {"supervision"},
        {"environment", "endpoints"},
        {"config"},
        {"blas"},
        {"rank"},
        {"external", "rank_process", "threads"},
        {"processes"},
        {"launch", "run"},
    ),
    "fsdpcore.checkpoint": (
        {"format"},
        {"storage", "memory"},
        {"plan"},
        {"save", "load"},
        {"interchange"},
    ),
}
LEVELS = {
    house: {room: level for level, rooms in enumerate(floors) for room in rooms}
    for house, floors in HOUSES.items()
}
# The roof: it names what is public, from all rooms.
ROOF = {"fsdpcore", "fsdpcore.__main__"}
# No room of the house: see the test of what they import.
TRANSPORTS = "transports"

# Imports that point up, each with its reason.
EXCEPTIONS = {
    # A transport between processes lets its ranks meet as those that a launcher starts do.
    ("transports", "fsdpcore.launch.addresses"),
    ("transports", "fsdpcore.launch.endpoints"),
}

FILES = modules()


@functools.cache
def all_imports() -> list[Import]:
    return imports(FILES)


def room(name: str, house: str = "fsdpcore") -> str:
    """The room of a house that a file is in; empty where it is none of the house's."""
    inside = name.removeprefix(f"{house}.")
    return "" if inside == name or name in ROOF else inside.partition(".")[0]


def listed(found: list[Import]) -> str:
    return "".join(f"\n  {item}" for item in found)


@pytest.mark.parametrize("house", HOUSES)
def test_every_room_has_a_floor(house: str) -> None:
    assert {room(name, house) for name in FILES} - {"", TRANSPORTS} == {*LEVELS[house]}


@pytest.mark.parametrize("house", HOUSES)
def test_a_room_imports_only_those_below_it(house: str) -> None:
    levels = LEVELS[house]
    found = [
        item
        for item in all_imports()
        if (source := room(item.source, house)) in levels
        and (target := room(item.target, house)) in levels
        and source != target
        and levels[target] >= levels[source]
    ]
    assert not found, f"imports that do not point down:{listed(found)}"


def test_a_transport_imports_collectives_and_what_is_below() -> None:
    up = [
        item
        for item in all_imports()
        if room(item.source) == TRANSPORTS
        and LEVELS["fsdpcore"].get(room(item.target), -1) > LEVELS["fsdpcore"]["collectives"]
        and ("transports", item.target) not in EXCEPTIONS
    ]
    assert not up, f"imports that point up:{listed(up)}"


def test_nothing_outside_knows_a_transport() -> None:
    found = [
        item
        for item in all_imports()
        if room(item.target) == TRANSPORTS and room(item.source) != TRANSPORTS
    ]
    assert not found, f"imports of a transport:{listed(found)}"


def test_only_the_top_floors_import_the_roof() -> None:
    found = [
        item
        for item in all_imports()
        if item.target in ROOF and room(item.source) not in ("", "commands", "bench")
    ]
    assert not found, f"imports of the whole package:{listed(found)}"


def test_no_files_import_each_other_in_a_circle() -> None:
    found = circles(all_imports())
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
