"""Hosts on the command line, and the ranks that each gets."""

from __future__ import annotations

import pytest

from fsdpcore.core.errors import ConfigError
from fsdpcore.launch.addresses import is_loopback
from fsdpcore.launch.run.hosts import parse_hosts


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        ("a,b", 8, {"a": 4, "b": 4}),
        ("a,b:4", 6, {"a": 2, "b": 4}),
        ("a,b,c", 8, {"a": 3, "b": 3, "c": 2}),
        ("a:1, b:4", None, {"a": 1, "b": 4}),
        ("me@a:2,10.0.0.7:2", 4, {"me@a": 2, "10.0.0.7": 2}),
        ("[fe80::1]:3,[::2]", 4, {"[fe80::1]": 3, "[::2]": 1}),
    ],
)
def test_every_host_has_its_ranks(text, total, expected):
    assert dict(parse_hosts(text, total)) == expected


@pytest.mark.parametrize(
    ("text", "total", "words"),
    [
        ("a,b", None, "how many ranks"),
        ("a,b", 1, "1 are left for a, b"),
        ("a:2,b:4", 8, "the hosts get 6 ranks"),
        ("a:9,b", 8, "-1 are left for b"),
        ("a,a", 8, "a is there twice"),
        ("a:x", 8, "'a:x' is not HOST or HOST:N"),
        ("a:0", 8, "N at least 1"),
        ("a,,b", 8, "names no host"),
        ("-oProxyCommand=x,b", 8, "names no host"),
        ("fe80::1:4", 8, "in brackets"),
    ],
)
def test_a_list_that_makes_no_sense_is_one_line(text, total, words):
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text, total)
    assert words in str(caught.value)


def test_the_address_of_a_host_is_its_name_without_a_user():
    assert [share.address for share in parse_hosts("me@a:2,[::1]", 4)] == ["a", "::1"]


def test_loopback():
    assert all(map(is_loopback, ["127.0.0.1", "127.3.0.1", "::1", "localhost", ""]))
    assert not any(map(is_loopback, ["10.0.0.1", "head", "0.0.0.0", "fe80::1%eth0"]))
