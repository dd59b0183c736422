"""The site that Sphinx builds: no warning, no network, and what readers look for is found."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import zlib
from html import unescape

import pytest
from support.pages import ROOT, SITE
from test_public import MODULES, documented

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="needs the extra 'docs'"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(SITE), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return out


def test_every_public_name_has_an_entry_with_its_words(site):
    """By the list that ``test_public`` holds against ``dir()``, in the index for other sites."""
    head, _, packed = (site / "objects.inv").read_bytes().partition(b"zlib.\n")
    assert head.startswith(b"# Sphinx inventory version 2")
    listed = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    names: dict[int, set[str]] = {}  # some have several
    classes: dict[type, set[str]] = {}
    for name, (public, owner) in documented():
        if owner is None and isinstance(public, type):
            classes.setdefault(public, set()).add(name)
    for name, (public, owner) in documented():
        if owner is None:
            names.setdefault(id(public), set()).add(name)
        else:  # a base class that is public, too, may have it
            home, _, last = name.rpartition(".")
            above = {at for base in owner.__mro__ for at in classes.get(base, ())} | {home}
            assert {f"{at}.{last}" for at in above} & listed, name
    assert [several for several in names.values() if not several & listed] == []
    assert {f"fsdpcore.{name}" for name in MODULES["fsdpcore.errors"].split()} <= listed


def test_links_of_the_built_pages_lead_somewhere(site):
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    for page, text in pages.items():
        for link in re.findall(r'href="([^"]*)"', text):
            path, _, anchor = unescape(link).partition("#")
            if re.match(r"https?:|mailto:|data:", path):
                continue
            there = (page.parent / path.partition("?")[0]).resolve() if path else page
            assert there.exists(), (page.name, link)
            if anchor and there in anchors:
                assert anchor in anchors[there], (page.name, link)


def test_nothing_is_fetched_from_the_network(site):
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*\bsrc=\"(?:https?:)?//[^>]*>", text)
        fetched += re.findall(r"<link[^>]*stylesheet[^>]*href=\"(?:https?:)?//[^>]*>", text)
        fetched += re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\"']*", text)
        assert fetched == [], page


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("reshard", "howto/checkpoints"),
        ("timeout", "howto/hangs"),
        ("commtimeouterror", "reference/errors"),
        ("two machin", "tutorials/two-machines"),
        ("hybrid_shard", "howto/plan"),
    ],
)
def test_search_finds(site, words, page):
    """By the index that the page's search reads; it has the stems of words."""
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
    number = index["docnames"].index(page)
    for word in words.split():
        found = [
            where
            for term, where in [*index["terms"].items(), *index["titleterms"].items()]
            if term == word
        ]
        hits = {n for where in found for n in (where if isinstance(where, list) else [where])}
        assert number in hits, word
