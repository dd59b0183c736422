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
from fsdpcore.core.text import nearest

GOOD = """
from fsdpcore.transports.simulated.backend import SimBackend

class Thing(SimBackend):
    made = "by somebody else"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    def install(name, entry_points, algorithms=None, **modules):
        folder = tmp_path / name
        fake_packages.install(folder, name, entry_points, algorithms, **modules)
        monkeypatch.syspath_prepend(str(folder))

    return install


def failure(scheme):
    with pytest.raises(ConfigError) as caught:
        registry.load(scheme)
    assert "\n" not in str(caught.value)
    return caught.value


WITH_AN_ALGORITHM = """
import sys

from fsdpcore.collectives.algorithms import star
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.transports.simulated.backend import SimBackend

calls = []

def all_reduce(context, source, out, reduction):
    calls.append(context.rank)
    star.all_reduce(context, source, out, reduction)

class Thing(SimBackend):
    def algorithms(self, backend):
        never = Algorithm(sys.modules[__name__], lambda p: CostTerms(1e9, 1e9, 1e9))
        return {"all_reduce": {"special": never}}
"""


def program(backend):
    return backend.made, fc.all_reduce([backend.rank], backend).tolist()


def test_our_own_transports_are_entry_points_like_any_other():
    assert {"sim", "zmq"} <= set(registry.schemes())
    assert registry.load("sim").__name__ == "SimBackend"


def test_a_third_partys_transport_works(install):
    install("goodpack", {"good": "registry_good:Thing"}, registry_good=GOOD)
    results = fc.launch(program, world_size=2, transport="good://?seed=1")
    assert results == [("by somebody else", [1])] * 2


def reduced(backend, algorithm="auto"):
    return fc.all_reduce([backend.rank], backend, algorithm=algorithm).tolist()


def test_an_algorithm_of_a_third_partys_transport_is_taken_like_any_other(install):
    reference = "registry_own:Thing"
    install("ownpack", {"own": reference}, {"special": reference}, registry_own=WITH_AN_ALGORITHM)

    def calls_of(transport, program, **options):
        module = sys.modules.get("registry_own")
        before = len(module.calls) if module else 0
        assert fc.launch(program, world_size=2, transport=transport, **options) == [[1]] * 2
        return len(sys.modules["registry_own"].calls) - before

    override = {"algorithms": {"all_reduce": "special"}}
    assert calls_of("own", reduced) == 0
    assert calls_of("own", reduced, **override) == 2
    assert calls_of("own", reduced, algorithms={"all_reduce": "special:0-7;star:8-max"}) == 0
    assert calls_of("own", reduced, args=("special",)) == 2
    # Settings serve every transport: one that has it not makes the usual choice.
    assert calls_of("sim", reduced, **override) == 0
    with pytest.raises(ConfigError, match=r"no algorithm 'spezial' .did you mean 'special'"):
        fc.launch(reduced, world_size=2, algorithms={"all_reduce": "spezial"})
    with pytest.raises(fc.RankFailedError, match=r"no algorithm 'spezial'; it has .*'special'"):
        fc.launch(reduced, world_size=1, transport="own", args=("spezial",))


def test_names_of_own_algorithms_are_known_without_the_transport(install):
    install("gonepack", {"gone": "gone_mod:Thing [x]"}, {"vanished": "gone_mod:Thing [x]"})
    assert {"native", "nccl", "vanished"} <= set(registry.own_algorithms())
    override = {"all_reduce": "vanished"}
    assert fc.launch(reduced, world_size=2, algorithms=override) == [[1]] * 2


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
    assert "'timeout'" in nearest("TIMOUT", ["timeout", "transport"])
    assert "'FSDPCORE_TIMEOUT'" in nearest("fsdpcore_timout", ["FSDPCORE_TIMEOUT"])
    assert nearest("qqq", ["timeout", "transport"]) == ""


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
