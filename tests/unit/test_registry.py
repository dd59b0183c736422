"""Transports are found through entry points, and what keeps one from working is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import fake_packages
from support.jobs import finished, python

import fsdpcore as fc
from fsdpcore.comm import registry
from fsdpcore.core.errors import ConfigError, MissingDependencyError, UnknownTransportError

GOOD = """
from fsdpcore.transports.simulated.backend import SimBackend

class Thing(SimBackend):
    made = "by somebody else"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    def install(name, entry_points, **modules):
        folder = tmp_path / name
        fake_packages.install(folder, name, entry_points, **modules)
        monkeypatch.syspath_prepend(str(folder))

    return install


def failure(scheme):
    with pytest.raises(ConfigError) as caught:
        registry.load(scheme)
    assert "\n" not in str(caught.value)
    return caught.value


def program(backend):
    return backend.made, fc.all_reduce([backend.rank], backend).tolist()


def test_our_own_transports_are_entry_points_like_any_other():
    assert {"sim", "zmq"} <= set(registry.schemes())
    assert registry.load("sim").__name__ == "SimBackend"


def test_a_third_partys_transport_works(install):
    install("goodpack", {"good": "registry_good:Thing"}, registry_good=GOOD)
    results = fc.launch(program, world_size=2, transport="good://?seed=1")
    assert results == [("by somebody else", [1])] * 2


def test_a_missing_extra_says_what_to_install(install):
    install("fake-transport", {"fake": "missing_pkg_mod:Thing [fakeextra]"})
    error = failure("fake")
    assert isinstance(error, MissingDependencyError)
    assert 'pip install "fake-transport[fakeextra]"' in str(error)
    assert "missing_pkg_mod" in str(error)
    assert isinstance(error.__cause__, ModuleNotFoundError)


def test_what_a_module_needs_in_turn_is_named(install):
    install(
        "needypack",
        {"needy": "registry_needy:Thing [some-extra,other]"},
        registry_needy="import no_such_module_at_all",
    )
    message = str(failure("needy"))
    assert "no_such_module_at_all" in message
    assert 'pip install "needypack[some-extra,other]"' in message


def test_without_an_extra_the_package_itself_is_named(install):
    install("plainpack", {"plain": "missing_plain_mod:Thing"})
    assert 'pip install "plainpack"' in str(failure("plain"))


def test_a_library_that_cannot_be_loaded_is_a_missing_dependency(install):
    source = "raise ImportError('libfoo.so.1: cannot open shared object file')"
    install("sopack", {"so": "registry_so:Thing [gpu]"}, registry_so=source)
    error = failure("so")
    assert isinstance(error, MissingDependencyError)
    assert "libfoo.so.1" in str(error)
    assert 'pip install "sopack[gpu]"' in str(error)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("Other = 1", ["registry_broken:Thing", "Thing"]),
        ("Thing = 1", ["not a complete Transport class"]),
        ("class Thing: pass", ["not a complete Transport class"]),
        (
            "from fsdpcore.comm.transport import Transport\nclass Thing(Transport): pass",
            ["not a complete Transport class"],
        ),
        (
            "from fsdpcore.transports.simulated.backend import SimBackend\n"
            "class Thing(SimBackend): options = None",
            ["options"],
        ),
        ("raise OSError('no device')", ["OSError", "no device"]),
        ("this is no Python", ["SyntaxError"]),
    ],
)
def test_a_broken_transport_is_named(install, monkeypatch, source, words):
    monkeypatch.delitem(sys.modules, "registry_broken", raising=False)
    install("brokenpack", {"broken": "registry_broken:Thing"}, registry_broken=source)
    message = str(failure("broken"))
    assert "transport 'broken'" in message
    for word in words:
        assert word in message


def test_two_packages_with_one_scheme_are_an_error(install):
    install("onepack", {"twice": "registry_one:Thing"}, registry_one=GOOD)
    install("twopack", {"twice": "registry_two:Thing"}, registry_two=GOOD)
    assert "onepack and twopack" in str(failure("twice"))


def test_an_unknown_scheme_names_the_nearest_and_all():
    error = failure("zqm")
    assert isinstance(error, UnknownTransportError)
    assert "did you mean 'zmq'" in str(error)
    assert "sim" in str(error)


def test_nearest():
    assert "'timeout'" in registry.nearest("TIMOUT", ["timeout", "transport"])
    assert "'FSDPCORE_TIMEOUT'" in registry.nearest("fsdpcore_timout", ["FSDPCORE_TIMEOUT"])
    assert registry.nearest("qqq", ["timeout", "transport"]) == ""


def test_a_checkout_that_shadows_the_installed_package_is_told(tmp_path):
    (tmp_path / "fsdpcore").symlink_to(Path(fc.__file__).parent)
    program = (
        "import sys\n"
        "editable = [finder for finder in sys.meta_path if 'editable' in repr(finder)]\n"
        "sys.meta_path = [finder for finder in sys.meta_path if finder not in editable]\n"
        f"sys.path[0] = {str(tmp_path)!r}\n"
        "import fsdpcore as fc\n"
        "fc.launch(print, world_size=1)\n"
    )
    done = finished(python("-c", program))
    assert done.code == 1
    assert done.err.splitlines()[-1].endswith("install the checkout with: pip install -e .")
    assert str(tmp_path) in done.err.splitlines()[-1]
