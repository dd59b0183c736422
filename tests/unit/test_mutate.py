"""The tool that puts changes into the product, on a product of two files."""

from __future__ import annotations

import subprocess

import mutate
import pytest
from support.mutations import Change, changes

FILES = {
    "fsdpcore/__init__.py": "",
    "transports/__init__.py": "",
    "fsdpcore/sums.py": """
import time

def below(limit):
    '''Add numbers.'''
    total = 0
    for number in range(limit):
        total += number
    return total

def fade(limit):
    while limit > 0:
        time.sleep(0.001)
        limit -= 1
""",
    "transports/parity.py": """
def odd(number):
    return number % 2 == 1

if __name__ == "__main__":
    print(odd(3), odd(4))
""",
    "tests/test_sums.py": """
from fsdpcore.sums import below, fade

def test_below():
    assert below(3) == 3

def test_fade():
    fade(3)
""",
    "tests/test_parity.py": """
import subprocess, sys

def test_odd():
    command = [sys.executable, "-m", "fsdpcore.transports.parity"]
    assert subprocess.check_output(command, text=True) == "True False\\n"
""",
}
GIVEN = {
    "transports/parity.py:3: % 2 => % 3": ("failed", "tests/test_parity.py::test_odd"),
    "fsdpcore/sums.py:7: range(limit) => range(1, limit)": ("survived", ""),
    "fsdpcore/sums.py:14: -= => +=": ("hung", "tests/test_sums.py::test_fade"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("product")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


@pytest.mark.tools
def test_who_notices(root, monkeypatch):
    monkeypatch.setattr(mutate, "_HANGS", (10.0, 2.0))
    known = mutate.make_map(root, [])
    assert {len(ran) for ran in known.ran.values()} == {1, 2}
    assert known.order("transports/parity.py:.odd:1", 9.0) == ["tests/test_parity.py::test_odd"]
    wanted = [mutate.given(root, text) for text in GIVEN]
    said = list(mutate.judge_all(root, wanted, [], 30.0, 2))
    assert [(each["how"], each["test"]) for each in said] == list(GIVEN.values())
    assert (root / "transports/parity.py").read_text() == FILES["transports/parity.py"]


def test_what_is_changed():
    source = """
def f(a, b=2) -> "a < b":
    "a < b"
    assert a < b
    return g(a[b:], b) or not a
"""
    found = {(change.old, change.new) for change in changes("f.py", source)}
    assert found == {
        ("2", "3"),
        ("2", "(1)"),
        ("b", "(b) + 1"),
        ("b", "(b) - 1"),
        ("or", "and"),
        ("not a", "(a)"),
        ("a[b:], b", "b, a[b:]"),
        ("g(a[b:], b) or not a", "not (g(a[b:], b) or not a)"),
    }
    change = Change("f.py", 1, 10, "b=2", "b=3")
    assert change.apply("def f(é, b=2): pass").startswith("def f(é, b=3)")
