"""Installed packages that are not there: a folder with metadata that offers transports."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, entry_points: dict[str, str], **modules: str) -> None:
    """Write what pip would: a dist-info folder with entry points, and top-level modules."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{scheme} = {target}" for scheme, target in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[fsdpcore.transports]", *lines]) + "\n")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
