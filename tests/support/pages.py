"""The pages of the documentation as programs: their blocks, run in the order of the page.

A page's Python blocks are one program. It runs on ranks of ``sim``: on two, or on as many as a
comment says (``<!-- ranks: 4 -->``); ``fc.init()`` in it gives the rank's backend. A block that
begins with ``# name.py`` is a file: it is written into the folder of the run, for commands and
imports, and run by itself if it has a main guard. What an ``output`` block says is what the block
before it prints, on the first rank; ``...`` stands for anything.

Commands (``console`` blocks) run in that folder. ``<!-- not run: why -->`` before a block of any
kind leaves it out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from support.jobs import clean_environ

import fsdpcore as fc

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs"
FENCE = re.compile(
    r"(?P<note>^[ ]*<!--(?:(?!-->).)*-->[ ]*\n)?"
    r"^(?P<indent>[ ]*)```(?P<kind>[a-z{][^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    text: str
    line: int
    skipped: str

    @property
    def file(self) -> str:
        """The name in its first line, where it is a file."""
        found = re.match(r"# (\w+\.(?:py|toml))\n", self.text)
        return found[1] if found else ""

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        return self.kind in ("python", "console") and not self.skipped

    @property
    def script(self) -> bool:
        """Whether it starts ranks itself."""
        return "__main__" in self.text


def pages() -> list[Path]:
    """Every page that users read."""
    there = (path for path in SITE.rglob("*.md") if "_build" not in path.parts)
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(there)]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        why = re.search(r"not run: (.*?) *-->", match["note"] or "")
        body = "".join(line[len(match["indent"]) :] for line in match["text"].splitlines(True))
        line = text.count("\n", 0, match.start("kind")) + 1
        found.append(Block(match["kind"], body, line, why[1] if why else ""))
    return found


def heavy(page: Path) -> bool:
    """Whether its Python takes seconds, so that the suite leaves it to ``-m tools``."""
    return "<!-- heavy -->" in page.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    """Return the text of a page without its blocks."""
    return FENCE.sub("", text)


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = without_code(page.read_text(encoding="utf-8"))
    found = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def ranks_of(page: Path) -> int:
    """How many ranks run the program of a page."""
    found = re.search(r"<!-- ranks: (\d+) -->", page.read_text(encoding="utf-8"))
    return int(found[1]) if found else 2


def fits(expected: str, printed: str) -> bool:
    """Whether an output is the one of a page, where ``...`` stands for anything."""
    pattern = ".*?".join(map(re.escape, expected.strip().split("...")))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


class Run:
    """The blocks of a page, run in the working directory; use ``init`` as ``fc.init`` meanwhile."""

    def __init__(self, page: Path, *, commands: bool) -> None:
        self.page = page
        self.blocks = blocks(page)
        self._commands = commands
        self._here = threading.local()
        self._printed: str | None = None

    def go(self) -> None:
        """Run all blocks; commands only where they are asked for."""
        if any(block.runs for block in self.blocks):
            fc.launch(self._rank, world_size=ranks_of(self.page))

    def init(self, *_: object, **__: object) -> fc.Backend:
        """The backend of the rank that asks."""
        return self._here.backend

    def _rank(self, backend: fc.Backend) -> None:
        self._here.backend = backend
        names: dict[str, object] = {"__name__": "__main__"}
        for block in self.blocks:
            if block.skipped:
                continue
            if block.file and backend.rank == 0:
                Path(block.file).write_text(block.text)
            if block.kind == "python" and not (block.script or block.file):
                self._execute(backend, block, names)
            elif backend.rank == 0:
                self._alone(block)
            backend.barrier(timeout=600)  # what one rank does alone takes its time

    def _execute(self, backend: fc.Backend, block: Block, names: dict[str, object]) -> None:
        out = io.StringIO()
        names["print"] = lambda *values, **how: print(*values, **{"file": out, **how})
        code = compile("\n" * block.line + block.text, str(self.page), "exec")
        exec(code, names)
        if backend.rank == 0:
            self._printed = out.getvalue()

    def _alone(self, block: Block) -> None:
        if block.kind == "python" and block.script:
            file = Path(block.file or f"block_{block.line}.py")
            file.write_text(block.text)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                runpy.run_path(str(file), run_name="__main__")
            self._printed = out.getvalue()
        elif block.kind == "console":
            self._printed = self._run(block) if self._commands else None
        elif block.kind == "output" and self._printed is not None:
            same = fits(block.text, self._printed)
            assert same, f"{self._where(block)}: this was printed:\n{self._printed}"

    def _run(self, block: Block) -> str:
        script = "\n".join(line.removeprefix("$ ") for line in block.text.splitlines())
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env=clean_environ(PATH=path, HOME=os.getcwd()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{self._where(block)}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def _where(self, block: Block) -> str:
        return f"{self.page.relative_to(ROOT)}:{block.line}"
