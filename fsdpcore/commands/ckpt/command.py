"""``fsdpcore ckpt``: look at checkpoints, check, compare and convert them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdpcore.checkpoint.interchange.array_sources import ArraySpec
from fsdpcore.checkpoint.interchange.dcp.source import is_dcp
from fsdpcore.checkpoint.interchange.diff import Changed, Difference, Values
from fsdpcore.checkpoint.interchange.diff import diff as compare
from fsdpcore.checkpoint.interchange.export import export_safetensors
from fsdpcore.checkpoint.interchange.importing import import_dcp, import_safetensors
from fsdpcore.checkpoint.interchange.rewrite import rewrite
from fsdpcore.checkpoint.interchange.verify import Verified
from fsdpcore.checkpoint.interchange.verify import verify as verify_step
from fsdpcore.checkpoint.save.step_folder import Saved
from fsdpcore.checkpoint.storage.cleaning import clean as clean_folder
from fsdpcore.commands.ckpt.inspect import inspect
from fsdpcore.commands.ckpt.options import (
    FirstStep,
    OtherStep,
    Step,
    VerifiedStep,
    axes_of,
    nbytes_of,
    renaming,
    rounding,
)
from fsdpcore.commands.ckpt.progress import DIFFERENT, bar, ending, print_json, size
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.text import printable

app = typer.Typer(
    help="Look at checkpoints, check, compare and convert them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Path = Annotated[str, typer.Argument(help="A folder of steps, or that of one.")]


_Names = Annotated[
    list[str] | None,
    typer.Option("--names", help="Shell pattern of names, such as 'block0.*'; repeatable."),
]
_Dtype = Annotated[
    str | None, typer.Option(help="Round floating arrays to bf16, fp16, fp32, fp64, fp8 or a name.")
]
_Rename = Annotated[
    list[str] | None, typer.Option("--rename", help="OLD=NEW for a name; repeatable.")
]
_Renames = Annotated[
    Path | None, typer.Option("--rename-file", help="JSON object of new names by old ones.")
]
_Strip = Annotated[str, typer.Option("--strip-prefix", help="Take this away from names.")]
_Add = Annotated[str, typer.Option("--add-prefix", help="Put this in front of names.")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
_Threads = Annotated[
    int | None, typer.Option(help="Threads that read; by default one per core, at most 4.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

app.command("inspect")(inspect)


@app.command("verify")
def verify(
    path: _Path,
    step: VerifiedStep = None,
    threads: _Threads = None,
    json: _Json = False,
) -> None:
    """Check every byte of a checkpoint, and say all that is wrong.

    Exit codes: 0 it is what was saved; 1 it is damaged; 2 wrong usage, or there is no such step.
    """
    with ending(), bar("verify") as progress:
        found = verify_step(path, step=step, threads=threads, progress=progress)
    if json:
        print_json({**asdict(found), "valid": found.valid, "problems": _problems(found)})
    else:
        for file, what in found.problems:
            typer.echo(f"{printable(file)}: {what}")
        count = len(found.problems)
        verdict = "valid" if found.valid else f"{count} problem{'s' if count > 1 else ''}"
        typer.echo(f"{found.name}: {verdict}; {found.files} files, {size(found.nbytes)}")
    raise typer.Exit(0 if found.valid else DIFFERENT)


def _problems(found: Verified) -> list[dict[str, str]]:
    return [each._asdict() for each in found.problems]


@app.command("reshard")
def reshard(
    path: _Path,
    target: Annotated[str, typer.Argument(help="Another folder of steps.")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks.")],
    axis: Annotated[
        list[str] | None,
        typer.Option(
            help="Cut arrays along this axis; PATTERN=AXIS for some (repeatable; the first that "
            "fits counts; PATTERN=flat for none). By default all are cut flat."
        ),
    ] = None,
    step: Step = None,
    names: _Names = None,
    overwrite: _Overwrite = False,
    threads: _Threads = None,
    json: _Json = False,
) -> None:
    """Write a step anew, as that many ranks would have saved it, or cut along axes.

    A load takes a checkpoint of any number of ranks; this is for copies that go elsewhere.

    Exit codes: 0 done; 1 the checkpoint is damaged; 2 wrong usage, or it could not be written.
    """
    with ending(), bar("reshard") as progress:
        saved = rewrite(
            path,
            target,
            ranks,
            axis=axes_of(axis),
            step=step,
            names=names,
            overwrite=overwrite,
            threads=threads,
            progress=progress,
        )
    _report(saved, target, as_json=json)


@app.command("consolidate")
def consolidate(
    path: _Path,
    target: Annotated[str, typer.Argument(help="Another folder of steps.")],
    step: Step = None,
    names: _Names = None,
    overwrite: _Overwrite = False,
    threads: _Threads = None,
    json: _Json = False,
) -> None:
    """Write a step anew, with one file, as one rank would have saved it.

    Exit codes: 0 done; 1 the checkpoint is damaged; 2 wrong usage, or it could not be written.
    """
    reshard(path, target, 1, None, step, names, overwrite, threads, json)


def _report(saved: Saved, target: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"path": target, **asdict(saved)})
        return
    typer.echo(f"{target}: {saved.name}, {size(saved.nbytes)}")
    for note in saved.notes:
        typer.echo(f"note: {note}")


@app.command("export")
def export(
    path: _Path,
    target: Annotated[str, typer.Argument(help="The file; with --max-shard-size a folder.")],
    step: Step = None,
    names: _Names = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="With the arrays of the optimizer.")
    ] = False,
    rename: _Rename = None,
    rename_file: _Renames = None,
    strip_prefix: _Strip = "",
    add_prefix: _Add = "",
    dtype: _Dtype = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(help="Such as 5GB: several files with an index, as Hugging Face has them."),
    ] = None,
    overwrite: _Overwrite = False,
    threads: _Threads = None,
    json: _Json = False,
) -> None:
    """Write the parameters of a step as safetensors, one file or several with an index.

    Exit codes: 0 done; 1 the checkpoint is damaged; 2 wrong usage, or it could not be written.
    """
    with ending(), bar("export") as progress:
        done = export_safetensors(
            path,
            target,
            step=step,
            names=names,
            optimizer=optimizer,
            rename=renaming(rename, rename_file),
            strip_prefix=strip_prefix,
            add_prefix=add_prefix,
            dtype=rounding(dtype),
            max_shard_size=None if max_shard_size is None else nbytes_of(max_shard_size),
            overwrite=overwrite,
            threads=threads,
            progress=progress,
        )
    if json:
        print_json(asdict(done))
        return
    typer.echo(f"{done.name}: {done.tensors} tensors, {size(done.nbytes)}")
    for file in done.files:
        typer.echo(f"  {file}")


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="A safetensors file, an index, a folder with them, or with a PyTorch DCP."
        ),
    ],
    path: Annotated[str, typer.Argument(help="A folder of steps.")],
    step: Annotated[int, typer.Option(help="Step to give the checkpoint.")] = 0,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="Write files as that many ranks would.")
    ] = None,
    max_file_size: Annotated[
        str | None, typer.Option(help="Such as 5GB: files of at most that many bytes of arrays.")
    ] = None,
    names: _Names = None,
    rename: _Rename = None,
    rename_file: _Renames = None,
    strip_prefix: _Strip = "",
    add_prefix: _Add = "",
    dtype: _Dtype = None,
    overwrite: _Overwrite = False,
    json: _Json = False,
) -> None:
    """Make a checkpoint of the arrays in safetensors files, or in a distributed one of PyTorch.

    An engine loads it without optimizer. PyTorch is not needed.

    Exit codes: 0 done; 1 a file is damaged; 2 wrong usage, or it could not be written.
    """
    with ending(), bar("import") as progress:
        imported = import_dcp if is_dcp(source) else import_safetensors
        saved = imported(
            source,
            path,
            step,
            world_size=ranks,
            max_file_size=None if max_file_size is None else nbytes_of(max_file_size),
            names=names,
            rename=renaming(rename, rename_file),
            strip_prefix=strip_prefix,
            add_prefix=add_prefix,
            dtype=rounding(dtype),
            overwrite=overwrite,
            progress=progress,
        )
    _report(saved, path, as_json=json)


@app.command("diff")
def diff(
    one: Annotated[
        str,
        typer.Argument(
            help="A folder of steps, that of one, a .safetensors, an index, or a PyTorch DCP."
        ),
    ],
    other: Annotated[str | None, typer.Argument(help="Likewise; by default the same.")] = None,
    step: FirstStep = None,
    other_step: OtherStep = None,
    names: _Names = None,
    threads: _Threads = None,
    json: _Json = False,
) -> None:
    """Compare the arrays of two checkpoints, bit for bit, however each is sharded.

    Exit codes: 0 all are equal; 1 something differs, or a checkpoint is damaged; 2 wrong usage.
    """
    with ending(), bar("diff") as progress:
        if other is None and other_step is None:
            raise ArgumentError("compare with what? Give a second path, or --other-step")
        found = compare(
            one,
            one if other is None else other,
            step=step,
            other_step=other_step,
            names=names,
            threads=threads,
            progress=progress,
        )
    if json:
        print_json(_as_dict(found))
    else:
        for line in _lines(found):
            typer.echo(line)
    raise typer.Exit(0 if found.equal else DIFFERENT)


def _lines(found: Difference) -> list[str]:
    lines = [f"only in the first: {printable(name)}" for name in found.only_one]
    lines += [f"only in the second: {printable(name)}" for name in found.only_other]
    for name, one, other in found.changed:
        lines.append(
            f"{printable(name)}: {_words(one)} in the first, {_words(other)} in the second"
        )
    for each in found.values:
        gap = "" if each.max_abs is None else f", by at most {each.max_abs:.6g}"
        lines.append(f"{printable(each.name)}: {each.elements} of {each.size} elements differ{gap}")
    lines += [f"{printable(name)}: the values differ" for name in found.entries]
    equal = found.compared - len(found.values)
    return [*lines, f"{equal} arrays are equal; {size(found.nbytes)} compared"]


def _words(array: ArraySpec) -> str:
    return f"{array.dtype.name} of shape {array.shape}"


def _as_dict(found: Difference) -> dict[str, Any]:
    def changed(each: Changed) -> dict[str, Any]:
        content: dict[str, Any] = {"name": each.name}
        for which, array in (("one", each.one), ("other", each.other)):
            content[which] = {"dtype": array.dtype.name, "shape": list(array.shape)}
        return content

    def values(each: Values) -> dict[str, Any]:
        # JSON has no name for inf and NaN.
        gap = each.max_abs
        finite = gap is None or abs(gap) < float("inf")
        return {**each._asdict(), "max_abs": gap if finite else str(gap)}

    return {
        "equal": found.equal,
        "only_one": list(found.only_one),
        "only_other": list(found.only_other),
        "changed": [changed(each) for each in found.changed],
        "values": [values(each) for each in found.values],
        "entries": list(found.entries),
        "compared": found.compared,
        "nbytes": found.nbytes,
    }


@app.command("clean")
def clean(
    path: Annotated[str, typer.Argument(help="A folder of steps.")],
    force: Annotated[
        bool, typer.Option("--force", help="Nobody saves there; for storages without locks.")
    ] = False,
    json: _Json = False,
) -> None:
    """Remove what killed saves have left; checkpoints, damaged ones too, stay as they are.

    Exit codes: 0 done; 1 something could not be removed; 2 wrong usage.
    """
    with ending():
        done = clean_folder(path, force=force)
    if json:
        print_json({"removed": list(done.removed), "failed": [e._asdict() for e in done.failed]})
    else:
        for name in done.removed:
            typer.echo(f"removed {name}")
        for each in done.failed:
            typer.echo(f"{each.name}: {each.reason}", err=True)
        if not (done.removed or done.failed):
            typer.echo("there was nothing to remove")
    raise typer.Exit(DIFFERENT if done.failed else 0)
