"""Installed packages that are not there: a folder with metadata that offers transports."""

from __future__ import annotations

from pathlib import Path


def install(
    folder: Path,
    name: str,
    entry_points: dict[str, str],
    algorithms: dict[str, str] | None = None,
    **modules: str,
) -> None:
    """Write what pip would: a dist-info folder with entry points, and top-level modules."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = {"fsdpcore.transports": entry_points, "fsdpcore.algorithms": algorithms or {}}
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{key} = {target}" for key, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
