"""One configuration from arguments, variables, files and URLs."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from support import fake_packages

from fsdpcore.core.errors import ConfigError, UnknownTransportError
from fsdpcore.launch.config import parse_url, resolve

TRANSPORT = """
import dataclasses
from fsdpcore.transports.simulated.backend import SimBackend

@dataclasses.dataclass(frozen=True)
class Options:
    depth: int = 1
    speed: float = 1.0
    eager: bool = False
    label: str = "none"
    plan: object = None

    def __post_init__(self):
        if self.depth > 100:
            raise ValueError(f"depth must be at most 100, got {self.depth}")

class Fake(SimBackend):
    options = Options
    takes_address = True
"""


@pytest.fixture(autouse=True)
def fake(tmp_path, monkeypatch):
    """A transport ``fake`` with options of every kind."""
    folder = tmp_path / "site"
    fake_packages.install(folder, "fakepack", {"fake": "config_fake:Fake"}, config_fake=TRANSPORT)
    monkeypatch.syspath_prepend(str(folder))


def wrong(arguments, environ=None, directory=None):
    with pytest.raises(ConfigError) as caught:
        resolve(arguments, environ or {}, directory)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


# Precedence.


def test_defaults():
    config = resolve({}, {})
    assert (config.transport, config.world_size, config.timeout) == ("sim", 0, 60.0)
    assert config.sources == {}
    assert resolve({}, {}, default_transport="fake").transport == "fake"


def test_argument_beats_environment_beats_file_beats_default(tmp_path):
    (tmp_path / "fsdpcore.toml").write_text("timeout = 3\nrendezvous_timeout = 3\nworld_size = 3\n")
    environ = {"FSDPCORE_TIMEOUT": "2", "FSDPCORE_RENDEZVOUS_TIMEOUT": "2"}
    config = resolve({"timeout": 1}, environ, tmp_path)
    assert (config.timeout, config.rendezvous_timeout, config.world_size) == (1.0, 2.0, 3)
    assert config.blas_threads == 0
    assert config.sources["timeout"] == "argument"
    assert "FSDPCORE_RENDEZVOUS_TIMEOUT" in config.sources["rendezvous_timeout"]
    assert "fsdpcore.toml" in config.sources["world_size"]
    assert "blas_threads" not in config.sources


def test_none_and_empty_variables_count_as_not_given():
    config = resolve({"timeout": None}, {"FSDPCORE_TIMEOUT": "", "FSDPCORE_TRANSPORT": ""})
    assert (config.timeout, config.transport) == (60.0, "sim")


def test_transport_options_argument_beats_url_beats_file(tmp_path):
    (tmp_path / "fsdpcore.toml").write_text(
        'transport = "fake"\n[fake]\ndepth = 3\nspeed = 3\nlabel = "file"\n[sim]\nseed = 1\n'
    )
    config = resolve({"depth": 1}, {"FSDPCORE_TRANSPORT": "fake://?depth=2&speed=2"}, tmp_path)
    options = config.transport_options
    assert (options.depth, options.speed, options.label) == (1, 2.0, "file")


def test_pyproject_is_read_where_there_is_no_other_file(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.fsdpcore]\nworld_size = 2\n[tool.x]\ny = 1\n")
    assert resolve({}, {}, tmp_path).world_size == 2
    (tmp_path / "fsdpcore.toml").write_text("timeout = 5\n")
    assert resolve({}, {}, tmp_path).world_size == 0


def test_pyproject_of_somebody_else_is_no_concern(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert resolve({}, {}, tmp_path).world_size == 0


def test_the_result_can_go_to_another_process():
    config = resolve({"transport": "fake://host:1?depth=3"}, {})
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_result_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve({}, {}).timeout = 3


# Values.


@pytest.mark.parametrize(
    ("query", "name", "value"),
    [
        ("depth=7", "depth", 7),
        ("depth=1KiB", "depth", None),
        ("speed=0.5", "speed", 0.5),
        ("speed=1e3", "speed", 1000.0),
        ("eager=true", "eager", True),
        ("eager=ON", "eager", True),
        ("eager=0", "eager", False),
        ("label=a%20b", "label", "a b"),
        ("label=", "label", ""),
    ],
)
def test_text_becomes_the_type_of_the_option(query, name, value):
    if value is None:  # 1024 is more than the transport allows, so the unit was understood
        assert "got 1024" in wrong({"transport": f"fake://?{query}"})
    else:
        got = getattr(resolve({"transport": f"fake://?{query}"}, {}).transport_options, name)
        assert got == value
        assert type(got) is type(value)


def test_anything_may_come_from_python():
    plan = object()
    assert resolve({"transport": "fake", "plan": plan}, {}).transport_options.plan is plan


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        ({"world_size": "x"}, {}, ["argument", "world_size", "'x'", "integer"]),
        ({"world_size": 2.5}, {}, ["world_size", "2.5", "integer"]),
        ({"world_size": True}, {}, ["world_size", "integer"]),
        ({"world_size": [4]}, {}, ["world_size", "integer"]),
        ({"world_size": float("inf")}, {}, ["world_size", "integer"]),
        ({"world_size": 0}, {}, ["world_size", "at least 1"]),
        ({"world_size": -3}, {}, ["argument", "world_size", "-3"]),
        ({"timeout": "soon"}, {}, ["timeout", "'soon'", "number"]),
        ({"timeout": None}, {"FSDPCORE_TIMEOUT": "soon"}, ["FSDPCORE_TIMEOUT", "number"]),
        ({"timeout": 0}, {}, ["argument", "timeout", "more than 0"]),
        ({"timeout": float("nan")}, {}, ["timeout", "nan"]),
        ({"timeout": float("inf")}, {}, ["timeout", "inf"]),
        ({}, {"FSDPCORE_TIMEOUT": "-1"}, ["FSDPCORE_TIMEOUT", "more than 0", "-1"]),
        ({}, {"FSDPCORE_WORLD_SIZE": "0"}, ["FSDPCORE_WORLD_SIZE", "at least 1"]),
        ({"blas_threads": -1}, {}, ["blas_threads", "-1"]),
        ({"transport": 5}, {}, ["transport", "5", "text"]),
        ({"transport": "fake", "label": 5}, {}, ["label", "text"]),
        ({"transport": "fake://?eager=maybe"}, {}, ["eager", "'maybe'", "true or false"]),
        ({"transport": "fake://?depth"}, {}, ["fake://?depth", "depth", "integer"]),
        ({"transport": "fake://?plan=x"}, {}, ["plan", "Python only"]),
        ({"transport": "fake", "depth": 101}, {}, ["argument", "depth must be at most 100"]),
    ],
)
def test_a_bad_value_is_named_with_its_source(arguments, environ, words):
    message = wrong(arguments, environ)
    for word in words:
        assert word in message


# Unknown names.


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        ({"transport": "fak"}, {}, ["'fak'", "did you mean 'fake'", "sim"]),
        ({"transport": "carrier-pigeon"}, {}, ["'carrier-pigeon'", "known are", "fake"]),
        ({"world_sise": 4}, {}, ["'world_sise'", "did you mean 'world_size'"]),
        ({"transport": "fake", "dept": 4}, {}, ["'dept'", "'fake'", "did you mean 'depth'"]),
        ({"transport": "fake://?dept=4"}, {}, ["fake://?dept=4", "did you mean 'depth'"]),
        ({"transport": "fake://?timeout=4"}, {}, ["'timeout'", "FSDPCORE_TIMEOUT"]),
        ({"transport": "fake", "xyzzy": 4}, {}, ["'xyzzy'", "it has depth, eager, label"]),
        ({}, {"FSDPCORE_TIMOUT": "4"}, ["FSDPCORE_TIMOUT", "did you mean 'FSDPCORE_TIMEOUT'"]),
    ],
)
def test_an_unknown_name_gets_the_nearest_known_one(arguments, environ, words):
    message = wrong(arguments, environ)
    for word in words:
        assert word in message


def test_an_unknown_scheme_has_an_exception_of_its_own():
    with pytest.raises(UnknownTransportError):
        resolve({"transport": "nothing"}, {})


def test_variables_of_launchers_are_known():
    assert resolve({}, {"FSDPCORE_RANK": "0", "FSDPCORE_TOKEN": "x"}).world_size == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("timeot = 3\n", ["fsdpcore.toml", "'timeot'", "did you mean 'timeout'"]),
        ("[fak]\ndepth = 3\n", ["fsdpcore.toml", "[fak]", "did you mean 'fake'"]),
        ("transport = 'fake'\n[fake]\ndept = 3\n", ["fsdpcore.toml [fake]", "'depth'"]),
        ("transport = 'fake'\n[fake]\ndepth = 'a'\n", ["fsdpcore.toml [fake]", "integer"]),
        ("transport = 'fake'\n[fake]\ndepth = 300\n", ["fsdpcore.toml [fake]", "at most 100"]),
        ("timeout = 'soon'\n", ["fsdpcore.toml", "timeout", "number"]),
        ("timeout = -3\n", ["fsdpcore.toml", "timeout"]),
        ("timeout = \n", ["fsdpcore.toml", "not valid TOML"]),
        ("world_size = [1]\n", ["fsdpcore.toml", "world_size"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(tmp_path, content, words):
    (tmp_path / "fsdpcore.toml").write_text(content)
    message = wrong({}, {}, tmp_path)
    for word in words:
        assert word in message


@pytest.mark.parametrize("content", ["[tool]\nfsdpcore = 3\n", "tool = 3\n"])
def test_a_table_that_is_none(tmp_path, content):
    (tmp_path / "pyproject.toml").write_text(content)
    assert "[tool.fsdpcore] is not a table" in wrong({}, {}, tmp_path)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "fsdpcore.toml").write_bytes(b"\xff\xfe\x00")
    assert "not valid TOML" in wrong({}, {}, tmp_path)


# URLs.


@pytest.mark.parametrize(
    ("text", "scheme", "host", "port"),
    [
        ("fake", "fake", None, None),
        ("fake://", "fake", None, None),
        ("FAKE://", "fake", None, None),
        ("fake:///", "fake", None, None),
        ("fake://10.0.0.1:29500", "fake", "10.0.0.1", 29500),
        ("fake://host", "fake", "host", None),
        ("fake://[::1]:5?depth=1", "fake", "::1", 5),
    ],
)
def test_urls(text, scheme, host, port):
    url = parse_url(text)
    assert (url.scheme, url.hostname, url.port) == (scheme, host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "://",
        "10.0.0.1:29500",
        "localhost:29500",
        "fake://host:99999",
        "fake://host:port",
        "fake://:29500",
        "fake://host/path",
        "fake://host#part",
        "fake://me@host",
        "fake://[::1",
        "fake:/host",
        "a fake",
    ],
)
def test_bad_urls(text):
    with pytest.raises(ConfigError) as caught:
        parse_url(text)
    assert repr(text) in str(caught.value)
    assert "bad transport URL" in str(caught.value)


def test_an_address_where_none_can_be():
    assert "takes no address" in wrong({"transport": "sim://host:1"})


def test_an_option_twice():
    assert "given twice" in wrong({"transport": "fake://?depth=1&depth=2"})
