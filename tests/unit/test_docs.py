"""What the pages tell users to type is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from fsdpcore.commands.main import app
from fsdpcore.launch.config import resolve

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def options():
    command = typer.main.get_group(app).commands["run"]
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_and_variables_of_the_pages_are_known(page, options):
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"fsdpcore run ([^\n`]*)", text):
        ours = re.split(r"\S+\.py|#", line)[0]  # what follows the script belongs to it
        assert set(re.findall(r"(?<!\S)--?[a-z][-a-z]*", ours)) <= options, line
    # An unknown variable is an error that names it.
    named = set(re.findall(r"\bFSDPCORE_[A-Z_]*[A-Z]\b", text))
    assert named
    resolve({}, dict.fromkeys(named, ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_lead_to_pages_that_are_there(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
