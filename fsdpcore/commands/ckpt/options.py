"""From the options of ``fsdpcore ckpt`` to the arguments that they stand for."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdpcore.checkpoint.format.dtypes import named_dtype
from fsdpcore.commands.plan import parse_memory
from fsdpcore.core.errors import ArgumentError

_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
}

_WAYS = "a number, 'latest', 'best:loss' (the smallest), 'best:-accuracy' (the largest)"


def _step_of(text: str) -> int | str:
    """Read a number, or leave words to ``chosen_step``."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def _step_option(what: str) -> Any:
    return typer.Option(parser=_step_of, metavar="STEP", help=f"{what}{_WAYS}")


Step = Annotated[Any, _step_option("Which step; by default the newest that is complete: ")]
ShownStep = Annotated[Any, _step_option("Show what is in this step: ")]
VerifiedStep = Annotated[Any, _step_option("Which step; by default the newest, damaged or not: ")]
FirstStep = Annotated[Any, _step_option("Step of the first: ")]
OtherStep = Annotated[Any, _step_option("Step of the second: ")]


def renaming(pairs: list[str] | None, file: Path | None) -> dict[str, str] | None:
    """Return new names by old ones from the options."""
    found: dict[str, str] = {}
    if file is not None:
        try:
            content = json_format.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ArgumentError(f"--rename-file {file} cannot be read: {error}") from None
        if not isinstance(content, dict) or not all(
            isinstance(each, str) for each in content.values()
        ):
            raise ArgumentError(f"--rename-file {file} is no JSON object of names")
        found |= content
    for pair in pairs or ():
        old, sign, new = pair.partition("=")
        if not sign:
            raise ArgumentError(f"--rename takes OLD=NEW, got {pair!r}")
        found[old] = new
    return found or None


def axes_of(given: list[str] | None) -> int | dict[str, int | None] | None:
    """Return an axis for all arrays, or axes by patterns, from the options."""
    if not given:
        return None
    if len(given) == 1 and "=" not in given[0]:
        return _axis(given[0], given[0])
    found: dict[str, int | None] = {}
    for each in given:
        pattern, sign, axis = each.rpartition("=")
        if not sign:
            raise ArgumentError(f"--axis takes one AXIS, or several of PATTERN=AXIS, got {each!r}")
        found[pattern] = None if axis == "flat" else _axis(axis, each)
    return found


def _axis(text: str, given: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"--axis takes AXIS or PATTERN=AXIS, got {given!r}") from None


def rounding(name: str | None) -> Any:
    """Return the dtype that an option names, in short or not."""
    return None if name is None else named_dtype(_SHORT.get(name, name), ArgumentError)


def nbytes_of(text: str) -> int:
    """Read a number of bytes: 5GB, 500MiB, 1000000."""
    return int(text) if text.isdecimal() else parse_memory(text)
