"""Importing the package imports none of the optional ones, and no transport."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest
from support.jobs import finished, python

import fsdpcore

OPTIONAL = {
    "mpi4py",
    "cupy",
    "jax",
    "jaxlib",
    "torch",
    "matplotlib",
    "autograd",
    "numba",
    "zmq",
    "fsspec",
}

LIST = """
import importlib, json, sys
for name in {names!r}:
    importlib.import_module(name)
print(json.dumps(sorted({{module.partition(".")[0] for module in sys.modules}})))
"""


def imported(names):
    """The top-level packages that are there once a new interpreter has imported ``names``."""
    done = finished(python("-W", "error", "-c", LIST.format(names=names)))
    assert done.code == 0, done.err
    assert done.err == ""
    return set(json.loads(done.out))


def submodules():
    found = [module.name for module in pkgutil.walk_packages(fsdpcore.__path__, "fsdpcore.")]
    assert "fsdpcore.commands.main" in found
    assert "fsdpcore.collectives.operations.all_reduce" in found
    return [name for name in found if name.split(".")[1] not in ("transports", "__main__")]


@pytest.mark.parametrize("names", [["fsdpcore"], submodules()], ids=["package", "submodules"])
def test_no_optional_package_is_imported(names):
    assert not imported(names) & OPTIONAL


def test_checkpoints_know_nothing_of_the_engine():
    allowed = {"state.state"}
    folder = Path(fsdpcore.checkpoint.__file__).parent
    known = {
        name
        for file in folder.rglob("*.py")
        for name in re.findall(r"from fsdpcore\.fsdp\.([\w.]+) import", file.read_text())
    }
    assert known <= allowed


def test_the_build_has_every_package():
    text = Path(fsdpcore.__file__).parents[1].joinpath("pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = \[$(.*?)^\]$", text, re.MULTILINE | re.DOTALL)
    transports = importlib.import_module("fsdpcore.transports")
    modules = (
        *pkgutil.walk_packages(fsdpcore.__path__, "fsdpcore."),
        *pkgutil.iter_modules(transports.__path__, "fsdpcore.transports."),
    )
    there = {"fsdpcore", "fsdpcore.transports", *(each.name for each in modules if each.ispkg)}
    assert set(re.findall(r'"(.+)"', listed)) == there


def test_a_transport_is_imported_when_it_is_used():
    statement = (
        "import sys; from fsdpcore.comm import registry; registry.load('zmq'); "
        "print('zmq' in sys.modules)"
    )
    done = finished(python("-c", statement))
    assert (done.code, done.out) == (0, "True\n"), done.err


def test_engine_and_checkpoints_are_imported_when_they_are_used():
    statement = (
        "import fsdpcore.commands.main, fsdpcore as fc, sys;"
        "names = ('fsdpcore.fsdp', 'fsdpcore.checkpoint');"
        "print([name in sys.modules for name in names]);"
        "fc.FSDP, fc.checkpoint.save; print([name in sys.modules for name in names])"
    )
    done = finished(python("-c", statement))
    assert (done.code, done.out) == (0, "[False, False]\n[True, True]\n"), done.err


def test_every_public_name_is_there():
    statement = (
        "import fsdpcore as fc; assert set(fc.__all__) <= set(dir(fc));"
        "print([name for name in fc.__all__ if not hasattr(fc, name)], hasattr(fc, 'nothing'))"
    )
    done = finished(python("-c", statement))
    assert (done.code, done.out) == (0, "[] False\n"), done.err
