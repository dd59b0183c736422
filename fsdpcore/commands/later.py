"""Commands that are imported when they are asked for.

Most who call ``fsdpcore`` start ranks, and wait for that. What the other commands need, engine and
checkpoints, takes longer to import than everything that ``fsdpcore run`` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

# Each command, and where it is: a function, or an app of its own, in a module of this package.
_LATER = {
    "tune": "tune:tune",
    "trace": "trace.command:trace",
    "top": "top:top",
    "bench": "bench:show_bench",
    "plan": "plan:show_plan",
    "simulate": "simulate:simulate",
    "ckpt": "ckpt.command:app",
}


class CommandsLater(TyperGroup):
    """The commands of the application, then those of ``fsdpcore.commands``."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in _LATER if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _LATER and cmd_name not in self.commands:
            self.commands[cmd_name] = _imported(cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0] if args else ""
        if self.get_command(ctx, word) is None:  # suggestions are made from all names
            for name in _LATER:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


def _imported(name: str) -> Any:
    module, _, attribute = _LATER[name].partition(":")
    found = getattr(import_module(f"fsdpcore.commands.{module}"), attribute)
    around = typer.Typer()
    if isinstance(found, typer.Typer):
        around.add_typer(found, name=name)
    else:
        around.command(name)(found)
    return typer.main.get_group(around).commands[name]
