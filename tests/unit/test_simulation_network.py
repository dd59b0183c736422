"""Networks are read from files, and say which links a message crosses."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from fsdpcore.core.errors import ConfigError
from fsdpcore.simulation import network_file
from fsdpcore.simulation.network import DEFAULT, Level, Link, Network

EXAMPLES = Path(__file__).parents[2] / "examples" / "networks"

FILE = """
[[level]]
name = "host"
size = 2
rate = "10GB/s"
latency = "1us"

[[level]]
name = "rack"
size = 3
rate = "100Mbit"
latency = "20ms"
burst = "125KB"
spread = 0.9

[[level]]
name = "site"
size = 0
rate = "inf"
latency = 0.5
cores = 4

[[link]]
member = "host 1"
rate = 5e6
latency = "30ms"
burst = 500

[compute]
copy = "1GB/s"
flops = 1e12
message = "3us"
wake = "4us"
reduce = "inf"
eager = "4KiB"
"""


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> Network:
        file = tmp_path / "net.toml"
        file.write_text(text)
        return network_file.read(file)

    return read


def test_a_file_says_all(read):
    assert read(FILE) == Network(
        levels=(
            Level("host", 2, 1e10, 1e-6),
            Level("rack", 3, 12.5e6, 0.02, burst=125_000, spread=0.9),
            Level("site", 0, math.inf, 0.5, cores=4),
        ),
        links={"host 1": Link(5e6, 0.03, 500)},
        flops=1e12,
        message=3e-6,
        wake=4e-6,
        copy=1e9,
        reduce=math.inf,
        eager=4096,
    )


def test_what_a_file_does_not_say_is_as_documented(read):
    least = FILE[: FILE.index("[[link]]")].replace('burst = "125KB"\nspread = 0.9\n', "")
    network = read(least.replace("cores = 4\n", ""))
    assert (network.flops, network.message, network.wake) == (4e14, 2e-6, 0.0)
    assert (network.copy, network.reduce) == (math.inf, 1e12)
    assert (network.eager, network.ahead, network.memory, network.speed) == (65_536, 0, 0.0, 1.0)
    assert {(each.burst, each.spread, each.cores) for each in network.levels} == {(0, 1.0, 0)}


def test_a_route_goes_up_to_where_both_are_under_and_down(read):
    network = read(FILE)

    def crossed(src, dst):
        links, latency = network.route(src, dst)
        return [network.link_name(link) for link in links], latency

    assert crossed(3, 3) == ([], 0.0)
    assert crossed(0, 1) == (["rank 0 -> host", "host -> rank 1"], 1e-6)
    # Host 1 is farther away than others, unless the way is longer still.
    within = ["rank 4 -> host", "host 2 -> rack", "rack -> host 1", "host -> rank 3"]
    assert crossed(4, 3) == (within, 0.03)
    assert crossed(0, 5)[1] == 0.02
    links, latency = crossed(3, 7)
    assert (links[1:5], latency) == (
        ["host 1 -> rack", "rack 0 -> site", "site -> rack 1", "rack -> host 3"],
        0.5,
    )
    far = dataclasses.replace(network, links={"host 1": Link(latency=0.9)})
    assert (far.route(3, 7)[1], far.route(7, 2)[1], far.route(2, 3)[1]) == (0.9, 0.9, 1e-6)
    rates = [network.rate(link) for link in network.route(3, 7)[0]]
    assert rates == [1e10, 5e6, math.inf, math.inf, 12.5e6, 1e10]
    bursts = [network.burst(link) for link in network.route(3, 7)[0]]
    assert bursts == [0, 500, 0, 0, 125_000, 0]
    spreads = [network.spread(link) for link in network.route(3, 7)[0]]
    assert spreads == [1, 0.9, 1, 1, 1, 1]  # on the way up only


def test_hosts_are_the_members_of_the_level_called_host(read):
    assert read(FILE).hosts(5) == [0, 0, 1, 1, 2]
    assert DEFAULT.hosts(9) == [0] * 8 + [1]
    assert Network((Level("host", 0, 1.0, 0.0),)).hosts(3) == [0, 0, 0]
    assert Network((Level("switch", 0, 1.0, 0.0),)).hosts(3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[compute]", "[computer]", "unknown key 'computer' (did you mean 'compute'?)"),
        ("flops", "flop", "compute: unknown key 'flop' (did you mean 'flops'?)"),
        ("size = 2", "sise = 2", "level 1: unknown key 'sise' (did you mean 'size'?)"),
        ("size = 2\n", "", "level 1: size is missing"),
        ("size = 2", "size = -2", "level 1: size must be at least 0, got -2"),
        ("size = 2", "size = 0", "level 'host': only the last level has size = 0"),
        (
            '"10GB/s"',
            '"10Gb/s"',
            "level 1: rate must be a rate, as in '100Mbit', '25GB/s' or 'inf', got '10Gb/s'",
        ),
        ('"10GB/s"', "0", "level 1: rate must be a rate"),
        ('"1us"', '"1 min"', "level 1: latency must be a time, as in '20ms' or '5us', got '1 min'"),
        ('"1us"', "-1", "level 1: latency must be a time"),
        ('"rack"', '"host"', "a level is called 'host', as another"),
        ('"rack"', '"rank"', "a level is called 'rank', as another or the ranks are"),
        ('"host 1"', '"hots 1"', "link of 'hots 1': a member is one of rank, host, rack"),
        ('"host 1"', '"host"', "link of 'host'"),
        ('"host 1"', '"site 0"', "link of 'site 0'"),
        (
            '"4KiB"',
            '"4Kbit"',
            "compute: eager must be a size, as in '64KiB' or '80GB', got '4Kbit'",
        ),
        ("cores = 4\n", "", "copy is of cores that ranks share, and there are none"),
        ("1e12", "true", "compute: flops must be a real number, got True"),
        ("[compute]", "[[compute]]", "compute is not a table"),
        ("[[link]]", "[link]", "link is not a list of tables"),
        ("[[link]]", '[[link]]\nmember = "host 01"\n[[link]]', "two links of host 1"),
        ("1e12", "1e", "not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(read, tmp_path, old, new, words):
    with pytest.raises(ConfigError) as caught:
        read(FILE.replace(old, new, 1))
    assert str(caught.value).startswith(f"network {tmp_path / 'net.toml'}")
    assert words in str(caught.value)


def test_a_link_of_nobody_is_an_error(read):
    network = read(FILE.replace('"host 1"', '"host 7"'))
    network.check_room(16)
    with pytest.raises(ConfigError, match="link of 'host 7': 14 ranks have no host 7"):
        network.check_room(14)


def test_a_file_that_is_not_there_or_empty_is_an_error(read, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        network_file.read(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="at least one level"):
        read("")


def test_the_examples_are_read():
    cluster = network_file.read(EXAMPLES / "gpu_cluster.toml")
    assert (cluster.hosts(64)[-1], cluster.spans) == (7, (8, 32, 256, None))
    machines = network_file.read(EXAMPLES / "four_machines.toml")
    assert machines.hosts(4) == [0, 1, 2, 3]
    assert machines.rate(machines.route(0, 3)[0][1]) == 12.5e6
    machines.check_room(4)
    with pytest.raises(ConfigError, match="places for 4 ranks"):
        machines.check_room(5)


def test_a_level_takes_rates_and_times_in_words():
    assert Level("host", 0, "1GB/s", "500ms") == Level("host", 0, 1e9, 0.5)


def test_a_host_may_stand_above_other_levels():
    numa = Level("numa", 4, 1.0, 0.0)
    assert Network((numa, Level("host", 2, 1.0, 0.0))).hosts(8) == [0] * 8


def test_a_link_of_its_own_may_let_nothing_pass_at_once():
    levels = (Level("host", 0, 100.0, 0.0, burst=50),)
    network = Network(levels, links={"rank 1": Link(burst=0)})
    assert [network.burst(network.link(0, rank)) for rank in range(3)] == [50, 0, 50]
