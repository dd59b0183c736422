"""``fsdpcore ckpt inspect``: which steps there are, and what is in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdpcore.checkpoint.format.metadata import Metadata
from fsdpcore.checkpoint.format.nodes import leaves, name_of, shown, tag_of, value_of
from fsdpcore.checkpoint.format.stored import StoredTensor
from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.checkpoint.interchange.array_sources import opened_step
from fsdpcore.checkpoint.interchange.patterns import refuse_idle
from fsdpcore.checkpoint.load.finding import chosen_step
from fsdpcore.checkpoint.plan.stored_state import StoredState
from fsdpcore.checkpoint.plan.targets import chosen
from fsdpcore.checkpoint.storage.steps import FoundStep, StepName, candidates
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.commands.ckpt.options import ShownStep
from fsdpcore.commands.ckpt.progress import ending, print_json, size
from fsdpcore.core.errors import CheckpointNotFoundError
from fsdpcore.core.text import printable


def inspect(
    path: Annotated[str, typer.Argument(help="A folder of steps, or that of one.")],
    step: ShownStep = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--names", help="Shell pattern of names; repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the steps in a folder; or with --step, or the folder of a step, its arrays.

    Looks at all but the contents of the files; 'fsdpcore ckpt verify' looks at these, too.

    Exit codes: 0 fine; 1 there is no valid checkpoint, or that step is damaged; 2 wrong usage, or
    there is nothing at all.
    """
    with ending():
        storage, which = chosen_step(path, step)
        if which is None and step is None and names is None:
            valid = _show_steps(storage, as_json=json)
            raise typer.Exit(0 if valid else 1)
        with opened_step(path, step) as source:
            found = StepName.parse(source.name)
            assert found is not None
            _show_step(found, source.metadata, names, as_json=json)


def _show_steps(storage: Storage, *, as_json: bool) -> bool:
    rows: list[dict[str, Any]] = []
    for each in candidates(storage):
        parsed = each.name if isinstance(each, FoundStep) else StepName.parse(each.name)
        assert parsed is not None
        row: dict[str, Any] = {"name": parsed.name, "step": parsed.step}
        row["generation"] = parsed.generation
        row["valid"] = isinstance(each, FoundStep)
        row |= _summary(each.metadata) if isinstance(each, FoundStep) else {"reason": each.reason}
        rows.append(row)
    if not rows:
        raise CheckpointNotFoundError(f"there is no checkpoint in {storage.path}")
    if as_json:
        print_json({"path": storage.path, "steps": rows})
    else:
        _steps_table(rows)
    return any(row["valid"] for row in rows)


def _summary(metadata: Metadata) -> dict[str, Any]:
    return {
        "created": metadata.created,
        "ranks": metadata.world_size,
        "files": len(metadata.files),
        "tensors": len(metadata.tensors),
        "nbytes": sum(tensor.nbytes for tensor in metadata.tensors.values()),
        "metrics": metadata.metrics,
    }


def _steps_table(rows: list[dict[str, Any]]) -> None:
    columns = ("step", "generation", "when", "ranks", "tensors", "size", "state", "metrics")
    table = Table(*columns, box=None)
    for row in rows:
        content = ["", "", "", "", "not valid: " + row.get("reason", "")]
        if row["valid"]:
            content = [
                row["created"],
                str(row["ranks"]),
                str(row["tensors"]),
                size(row["nbytes"]),
                "complete",
                ", ".join(f"{printable(n)}={value:g}" for n, value in row["metrics"].items()),
            ]
        table.add_row(str(row["step"]), str(row["generation"]), *map(Text, content))
    _print(table)


def _show_step(
    name: StepName, metadata: Metadata, names: list[str] | None, *, as_json: bool
) -> None:
    refuse_idle(names, metadata.tensors, name.name)
    shown = [metadata.tensors[each] for each in chosen(list(metadata.tensors), names)]
    if as_json:
        about = {"name": name.name, "step": name.step, "generation": name.generation}
        content: dict[str, Any] = {**about, **_summary(metadata), "save_id": metadata.save_id}
        content |= {"info": metadata.info, "extra": metadata.extra}
        content["values"] = dict(_values(metadata))
        content["arrays"] = [_array(tensor) for tensor in shown]
        print_json(content)
        return
    summary = _summary(metadata)
    typer.echo(
        f"{name.name}: saved {summary['created']} by {summary['ranks']} ranks, "
        f"{summary['tensors']} tensors, {size(summary['nbytes'])} in {summary['files']} files"
    )
    for metric, value in metadata.metrics.items():
        typer.echo(f"  {short(metric)} = {value:g}")
    if names is None:
        for entry, words in _values(metadata):
            typer.echo(f"  {printable(entry)}: {words}")
    table = Table("name", "dtype", "shape", "size", "pieces", box=None)
    for tensor in shown:
        array = _array(tensor)
        missing = f", {array['missing']} elements missing" if array["missing"] else ""
        table.add_row(
            Text(printable(tensor.name)),
            array["dtype"],
            Text(str(tensor.shape)),
            size(tensor.nbytes),
            f"{array['pieces']}{missing}",
        )
    _print(table)


def _values(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """Give the entries that are more than arrays, each with what it is, in short."""
    stored = StoredState.of(metadata)
    for path, node in leaves(stored.node):
        tag = tag_of(node)
        if tag == "engine":
            yield name_of(path) or "engine", f"an engine after {short(node[1].get('step'))} steps"
        elif tag == "per rank":
            yield name_of(path), f"of each of {len(stored.own)} ranks its own"
        elif tag == "generator":
            yield name_of(path), f"a random generator, {short(node[1])}"
        elif tag == "stateful":
            yield name_of(path), "the state of an object"
        elif tag == "scalar":
            yield name_of(path), shown(node)
        elif tag != "array":
            yield name_of(path), short(value_of(node, path, {}) if tag != "key" else "a key of JAX")


def _array(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "nbytes": tensor.nbytes,
        "pieces": len(tensor.pieces),
        "missing": tensor.missing,
    }


def _print(table: Table) -> None:
    """Print a table; in a pipe no line of it is cut or broken."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    for column in table.columns:
        column.no_wrap = not console.is_terminal
    console.print(table)
