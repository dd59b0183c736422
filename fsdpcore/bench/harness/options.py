"""Options that benches have in common, and what is checked before anything is measured."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fsdpcore.bench.harness.usage import one_line
from fsdpcore.core.errors import ArgumentError, ConfigError, MissingDependencyError
from fsdpcore.core.text import nearest
from fsdpcore.launch.blas import available_cores

WRONG_RESULTS = 1

Echo = Callable[[str], None]

Ranks = Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks.")]
Transport = Annotated[str, typer.Option(help="Scheme or URL, such as sim or zmq.")]
Threads = Annotated[int, typer.Option(help="Of each rank's arithmetic; 0 shares the cores evenly.")]
Iterations = Annotated[
    int, typer.Option("--iters", help="Steps per round; 0: as many as fit --seconds.")
]
Seconds = Annotated[float, typer.Option(help="Time per round and contestant, roughly.")]
Rounds = Annotated[int, typer.Option(help="How often the contestants take turns.")]
Warmup = Annotated[int, typer.Option(help="Steps before the clock runs.")]
Json = Annotated[Path | None, typer.Option(help="File for all samples.")]


def against(peers: Iterable[str]) -> typer.models.OptionInfo:
    """The option that names peers."""
    found: typer.models.OptionInfo = typer.Option(
        help=f"Peers to take turns with: {', '.join(peers)}."
    )
    return found


def names(text: str) -> tuple[str, ...]:
    """The names in a list with commas, each once."""
    return tuple(dict.fromkeys(name for name in map(str.strip, text.split(",")) if name))


def one_of(value: str, known: tuple[str, ...], option: str) -> str:
    """Return the value of an option that has a few only.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}, got {value!r}")
    return value


def check_known(option: str, values: Iterable[str], known: Iterable[str]) -> None:
    """Check names.

    Raises:
        ArgumentError: one of them is not known.
    """
    known = tuple(known)
    for value in values:
        if value not in known:
            raise ArgumentError(
                f"{option} knows no {value!r}{nearest(value, known)}; it knows {', '.join(known)}"
            )


def check_torch(peers: Sequence[str]) -> None:
    """Check that PyTorch is there, for peers that need it.

    Raises:
        MissingDependencyError: it is not.
    """
    if peers and importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            f"--against {','.join(peers)} needs PyTorch, which no extra of fsdpcore installs; get "
            "the build for CPUs with: pip install torch --index-url "
            "https://download.pytorch.org/whl/cpu"
        )


def check_writable(*files: Path | None) -> None:
    """Check before hours of measuring rather than after that the results can be kept.

    Raises:
        ArgumentError: they cannot.
    """
    for file in filter(None, files):
        folder = file.absolute().parent
        if not folder.is_dir():
            raise ArgumentError(f"cannot write {file}: there is no directory {file.parent}")
        if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            raise ArgumentError(f"cannot write {file}: it is a directory, or may not be written")


def threads_per_rank(ranks: int, threads: int) -> int:
    """Of BLAS and of PyTorch; 0 threads share the cores evenly.

    Raises:
        ArgumentError: a number makes no sense.
    """
    if ranks < 1 or threads < 0:
        raise ArgumentError(
            f"-n must be at least 1 and --threads not negative, got {ranks} and {threads}"
        )
    return threads or max(1, available_cores() // ranks)


def measure(bench: Callable[[], int]) -> NoReturn:
    """Run a bench, which returns how much was wrong, and exit: 1 for wrong results, 2 for none."""
    with one_line(), ending_well_on_sigterm():
        wrong = bench()
    raise typer.Exit(WRONG_RESULTS if wrong else 0)


@contextmanager
def ending_well_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as an exception does, with all ranks and files that it has."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
