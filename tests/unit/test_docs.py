"""The pages: what they tell users to type runs, and what they name is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer
from support import pages
from support.sentences import sentences

import fsdpcore as fc
from fsdpcore.commands.main import app
from fsdpcore.launch.config import resolve

ROOT, SITE = pages.ROOT, pages.SITE
ALL = [*pages.pages(), ROOT / "bench/README.md"]
PAGES = pages.pages()
MANY = 30  # words, as many as a sentence may have


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("FSDPCORE_TRANSPORT", raising=False)
    before = set(sys.modules)

    def go(page, *, commands):
        running = pages.Run(page, commands=commands)
        monkeypatch.setattr(fc, "init", running.init)
        running.go()

    yield go
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", [p for p in PAGES if not pages.heavy(p)], ids=name_of)
def test_the_python_of_a_page_runs(page, run):
    run(page, commands=False)


@pytest.mark.tools
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_all_of_a_page_runs(page, run):
    run(page, commands=True)


@pytest.fixture(scope="module")
def options():
    command = typer.main.get_group(app).commands["run"]
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_and_variables_of_the_pages_are_known(page, options):
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"fsdpcore run ([^\n`]*)", text):
        ours = re.split(r"\S+\.py|#", line)[0]  # what follows the script belongs to it
        assert set(re.findall(r"(?<!\S)--?[a-z][-a-z]*", ours)) <= options, line
    # An unknown variable is an error that names it.
    resolve({}, dict.fromkeys(re.findall(r"\bFSDPCORE_[A-Z_]*[A-Z]\b", text), ""))


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_pages_lead_to_pages_and_headings_that_are_there(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", pages.without_code(page.read_text())):
        if ":" in target:
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/[\w./%~#?=&-]*)?", target), target
            continue
        path, _, heading = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        if heading:
            assert heading in pages.headings(there), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_blocks_are_shell(page):
    for block in pages.blocks(page):
        if block.kind in ("console", "bash", "sh"):
            checked = subprocess.run(
                ["bash", "-n", "-c", block.text], capture_output=True, text=True, check=False
            )
            assert not checked.stderr, block.text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_are_short(page):
    long = [s for s in sentences(page.read_text()) if len(s.split()) > MANY]
    assert long == []


def test_a_sentence_is_what_is_read_as_one():
    text = "One [two](page.md) `three four`. Five: six;\nseven\n\n- eight\n- nine\n\n"
    text += "| a | b c |\n|---|---|"
    text += "\n```console\nno words of ours. Here\n```\n"
    found = [len(each.split()) for each in sentences(text)]
    assert found == [3, 3, 1, 1, 1, 2]


def test_every_block_runs_or_says_why_not():
    """Only what the runner knows counts as code; a block of another kind would just be shown."""
    shown = {"output", "text", "toml", "yaml", "dockerfile", "bash", "sh"}
    kinds = {block.kind for page in PAGES for block in pages.blocks(page)}
    assert {kind for kind in kinds if not kind.startswith("{")} <= {"python", "console", *shown}
    assert [page for page in PAGES if "```" in pages.without_code(page.read_text())] == []


def test_every_page_is_in_the_navigation():
    for folder in [SITE, *(path for path in SITE.iterdir() if (path / "index.md").exists())]:
        listed = "\n".join(
            block.text
            for block in pages.blocks(folder / "index.md")
            if block.kind.startswith("{toctree}")
        )
        for page in folder.glob("*.md"):
            assert page.stem == "index" or page.stem in listed.split(), page


def test_the_reference_has_every_public_name():
    """By the list of what is public that ``test_public`` holds against ``dir()``."""
    from test_public import MODULES

    listed = {}
    for page in (SITE / "reference").glob("*.md"):
        for block in pages.blocks(page):
            if block.kind.startswith("{public} "):
                module = block.kind.split()[1]
                for name in block.text.split():
                    listed.setdefault(f"{module}.{name}", []).append(page.name)
    assert {name: where for name, where in listed.items() if len(where) > 1} == {}
    shown = [_found(name) for name in listed]
    for module, names in MODULES.items():
        for name in names.split():
            public = _found(f"{module}.{name}")
            if inspect.ismodule(public) or name == "__version__":
                continue
            assert any(public is each for each in shown), f"{module}.{name}"


def _found(name):
    module, _, last = name.rpartition(".")
    found = importlib.import_module(module.split(".")[0])
    for each in [*module.split(".")[1:], last]:
        found = getattr(found, each)
    return found


def test_the_reference_has_every_command():
    listed = {
        block.kind.removeprefix("{command} ")
        for block in pages.blocks(SITE / "reference/cli.md")
        if block.kind.startswith("{command} ")
    }
    group = typer.main.get_group(app)
    there = set()
    for name in group.list_commands(typer.Context(group)):
        command = group.get_command(typer.Context(group), name)
        inner = getattr(command, "commands", None)
        there |= {f"{name} {each}" for each in inner} if inner else {name}
    assert listed == there


def test_every_error_is_explained():
    text = (SITE / "reference/errors.md").read_text()
    for name in set(fc.errors.__all__):
        assert re.search(rf"\b{name}\b", text), name


def examples(text):
    """The indented code of a docstring."""
    for match in re.finditer(r"::\n\n((?:[ ]{4}.*\n|\n)+)", text + "\n"):
        yield textwrap.dedent(match[1])


def test_examples_of_docstrings_are_python_with_names_that_are_there():
    from test_public import documented

    seen = 0
    for name, (public, _) in documented():
        for example in examples(inspect.getdoc(public)):
            if not re.search(r"\b(fc|backend|engine|step|stack)\.", example):
                continue  # a formula
            seen += 1
            for node in ast.walk(ast.parse(example, name)):
                if isinstance(node, ast.Attribute) and (dotted := ast.unparse(node))[:3] == "fc.":
                    assert re.fullmatch(r"[\w.]+", dotted) is None or _found(
                        dotted.replace("fc.", "fsdpcore.", 1)
                    ), name
    assert seen > 80


@pytest.mark.parametrize("name", ["layers", "house"])
def test_a_picture_is_drawn_from_its_text(name):
    sys.path.insert(0, str(SITE / "_ext"))
    try:
        drawing = importlib.import_module("drawing")
    finally:
        sys.path.remove(str(SITE / "_ext"))
    title, text = drawing.read(SITE / f"diagrams/{name}.txt")
    assert (SITE / f"_static/{name}.svg").read_text() == drawing.draw(text, title, alone=True)
