"""Who imports whom: every import of the product, wherever in a file it stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = {"fsdpcore": "fsdpcore", "transports": "fsdpcore.transports"}


class Import(NamedTuple):
    """One file imports another.

    ``when``: ``run``, with the file; ``type``, for type checkers; ``lazy``, in a function.
    """

    source: str
    target: str
    when: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} ({self.when})"


def modules() -> dict[str, Path]:
    """The files of the product by the names that they are imported by."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports(files: Mapping[str, Path]) -> list[Import]:
    """Every import of one file of the product by another."""
    found = set()
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for target, when in _within(ast.parse(path.read_text()), package, files, "run"):
            if target != name:
                found.add(Import(name, target, when))
    return sorted(found)


def _within(
    node: ast.AST, package: str, files: Mapping[str, Path], when: str
) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = when
        if isinstance(child, ast.ImportFrom):
            for target in _targets(child, package):
                name = target if target in files else target.rpartition(".")[0]
                if name in files:
                    yield name, when
        elif isinstance(child, ast.Import):
            yield from ((alias.name, when) for alias in child.names if alias.name in files)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inside = "type"
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and when == "run":
            inside = "lazy"
        yield from _within(child, package, files, inside)


def _targets(node: ast.ImportFrom, package: str) -> list[str]:
    """What may be a module or something in one."""
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def circles(found: list[Import]) -> list[list[str]]:
    """The sets of files that import each other, directly or not."""
    targets: dict[str, set[str]] = {}
    for item in found:
        targets.setdefault(item.source, set()).add(item.target)
    reached = {name: _reached(name, targets) for name in targets}
    sets = {
        frozenset(other for other in reached[name] if name in reached.get(other, ()))
        for name in targets
        if name in reached[name]
    }
    return sorted(sorted(each) for each in sets)


def _reached(name: str, targets: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [*targets[name]]
    while ahead:
        other = ahead.pop()
        if other not in seen:
            seen.add(other)
            ahead += targets.get(other, ())
    return seen
