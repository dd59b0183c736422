"""Everything that needs a GPU, on a bare machine, in one go: probes, tests, measurements.

    python3 bench/gpu_all.py --out FOLDER [--seconds 520] [--steps probes,tests,bench] [--quick]

Wants Python 3.11 with CuPy and its NCCL, NumPy, pytest and what fsdpcore depends on; what is
missing of that may lie as wheels in ``.whl`` of the checkout (see gpu_wheels.txt). Nothing is
fetched, and nothing is written to the checkout: the package is laid out in a temporary folder as a
wheel would install it. Each step has a limit of time, and whatever it leaves behind is ended.

The folder gets a few files, each complete up to the moment at which anything ends: ``summary.txt``,
``log.txt``, ``probes.json``, and those of ``bench/gpu.py``. The exit code is 0 if every step could
be run, whatever it found, and 1 at once where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib

sys.path.append(str(Path(__file__).parent))  # the parts, where this is not run as a script

from gpu_bench import limited

ROOT = Path(__file__).resolve().parents[1]
# Those of one rank first, then those that NCCL may refuse or that may hang.
# Each with its share of the time.
TESTS = {
    ("test_collectives", "test_streams"): 0.14,
    ("test_gpt", "test_engine", "test_parallel", "test_optimizers", "test_checkpoints"): 0.19,
    ("test_failures", "test_several_ranks"): 0.17,
}
STEPS = ("probes", "tests", "bench")
_SECONDS = "SECONDS"
# What finds out whether there is a GPU, in how many seconds at most, and its exit code if not.
_USABLE = ("-m", "gpu_bench.usable")
_USABLE_SECONDS = 60.0
_NOT_USABLE = 3
# Of a step's limit, what it is told that it has.
_OWN_SHARE = 0.93
_LEFT_BEHIND = ("__pycache__", ".git", "*.egg-info", "results")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: for the log.
        command: what Python runs; the word ``SECONDS`` stands for how many it has.
        share: of the seconds that there are for all steps.
    """

    name: str
    command: tuple[str, ...]
    share: float


class Log:
    """The files that say what was done."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.file = folder / "log.txt"
        self.file.write_text("", encoding="utf-8")
        (folder / "summary.txt").write_text("", encoding="utf-8")

    def say(self, text: str) -> None:
        """Add lines to the summary, and show them."""
        print(text, flush=True)
        for file in (self.folder / "summary.txt", self.file):
            with file.open("a", encoding="utf-8") as lines:
                lines.write(text + "\n")

    def tail(self, position: int, count: int) -> str:
        """The last lines of what was added to the log since it was so long."""
        with self.file.open(encoding="utf-8", errors="replace") as file:
            file.seek(position)
            return "\n".join(file.read().splitlines()[-count:])


def lay_out(folder: Path) -> None:
    """Put the package where Python finds it, with its entry points, and all that is run."""
    ignore = shutil.ignore_patterns(*_LEFT_BEHIND)
    for name in ("fsdpcore", "tests", "bench", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copytree(ROOT / "transports", folder / "fsdpcore" / "transports", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = runpy.run_path(str(ROOT / "fsdpcore" / "core" / "version.py"))["VERSION"]
    info = folder / f"{project['name']}-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def install(wheels: Path, target: Path, log: Log) -> None:
    """Install the wheels that were carried along, if there are any."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        log.say(f"no wheels in {wheels.name}: what is installed has to do")
        return
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "-q"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), *found]
    done = subprocess.run(  # noqa: S603 (it is our own)
        command, capture_output=True, text=True, check=False
    )
    log.say(f"{len(found)} wheels installed: code {done.returncode} {done.stderr.strip()[-800:]}")


def environment(folder: Path, site: Path) -> dict[str, str]:
    """The variables of all steps."""
    paths = [folder, site, folder / "bench"]
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([before] if before else [])]),
        "PYTHONUNBUFFERED": "1",
        # Of other versions of libraries than ours: told, not fatal.
        "PYTHONWARNINGS": "default",
        "CUPY_CACHE_DIR": str(folder / "cupy_cache"),
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        "COLUMNS": "160",
    }


def why_no_gpu(environ: dict[str, str], cwd: Path) -> str:
    """Why nothing can be run on a GPU here, in a line; empty if it can, or is not known."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        code = limited.python(_USABLE, _USABLE_SECONDS, output, environ=environ, cwd=cwd)
        output.seek(0)
        # Where its time was over, the probes say more of that.
        return output.read().strip() if code == _NOT_USABLE else ""


def steps(
    wanted: Sequence[str], out: Path, *, quick: bool, without_gpu: bool = False
) -> Iterator[Step]:
    """All steps that are wanted, in order."""
    if "probes" in wanted:
        probes = ("-m", "gpu_bench.probes", str(out / "probes.json"), _SECONDS)
        yield Step("probes", probes, 0.12)
    if "tests" in wanted:
        options = ["-m", "pytest", "-v", "-ra", "--tb=short", "--durations=12", "--color=no"]
        options += ["-p", "no:cacheprovider", "-p", "gpu_bench.instant"]
        # Not on several processes, for which the project's options ask: there is one GPU.
        options += ["-o", "addopts=--strict-markers", "-o", "filterwarnings=default"]
        options += ["-o", "faulthandler_timeout=60"]
        if importlib.util.find_spec("pytest_timeout") is not None:
            options += ["--timeout=100"]
        for number, (names, share) in enumerate(TESTS.items(), 1):
            files = [f"tests/gpu/{name}.py" for name in names]
            present = [file for file in files if (ROOT / file).exists()]
            if present:
                yield Step(f"tests {number}", (*options, *present), share)
    if "bench" in wanted:
        bench = ("bench/gpu.py", "--out", str(out), "--seconds", _SECONDS)
        flags = {"--quick": quick, "--without-gpu": without_gpu}
        yield Step("bench", (*bench, *(flag for flag, given in flags.items() if given)), 0.38)


def perform(step: Step, seconds: float, environ: dict[str, str], cwd: Path, log: Log) -> bool:
    """Run one step; return whether it could be run."""
    limit = f"{_OWN_SHARE * seconds:.0f}"
    command = [limit if word == _SECONDS else word for word in step.command]
    log.say(f"=== {step.name}: at most {seconds:.0f} s")
    position, started = log.file.stat().st_size, time.monotonic()
    with log.file.open("a", encoding="utf-8") as output:
        code = limited.python(command, seconds, output, environ=environ, cwd=cwd, patience=8)
    took = time.monotonic() - started
    ending = "was ended, its time was over" if code is None else f"code {code}"
    log.say(f"{log.tail(position, 45)}\n=== {step.name}: {ending}, {took:.1f} s")
    # pytest's 1 is that tests failed, 5 that there were none.
    return code in (0, 1, 5)


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in STEPS:
            raise argparse.ArgumentTypeError(
                f"there is no step {name!r}; the steps are {', '.join(STEPS)}"
            )
    return names


def main() -> int:
    """Do all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--seconds", type=float, default=520.0, help="for everything")
    every = ",".join(STEPS)
    parser.add_argument("--steps", type=_names, default=every, help=f"some of {every}")
    parser.add_argument("--quick", action="store_true", help="just see whether it can be run")
    parser.add_argument(
        "--without-gpu", action="store_true", help="try all steps where there is no GPU, too"
    )
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    log = Log(given.out.resolve())
    log.say(f"python {sys.version.split()[0]} {sys.executable}")
    with tempfile.TemporaryDirectory(prefix="fsdpcore-gpu-") as name:
        folder = Path(name) / "checkout"
        folder.mkdir()
        lay_out(folder)
        site = Path(name) / "site"
        install(ROOT / ".whl", site, log)
        environ = environment(folder, site)
        if not given.without_gpu and (reason := why_no_gpu(environ, folder)):
            log.say(reason)
            return 1
        flags = {"quick": given.quick, "without_gpu": given.without_gpu}
        todo = list(steps(given.steps, log.folder, **flags))
        well = True
        for number, step in enumerate(todo):
            # What a step does not use is for those after it.
            rest = sum(later.share for later in todo[number:])
            seconds = (end - time.monotonic()) * step.share / rest
            well = perform(step, seconds, environ, folder, log) and well
    log.say("=== done" if well else "=== done; not every step could be run to its end")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
