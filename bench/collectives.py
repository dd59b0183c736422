"""Measure collectives from a checkout: what ``fsdpcore bench`` does, with the same options."""

from __future__ import annotations

import typer

from fsdpcore.commands.bench import show_bench

if __name__ == "__main__":
    typer.run(show_bench)
