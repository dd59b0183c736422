"""Overrides: their grammar, where they come from, what is refused, and what they change."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.simulated.backend import SimBackend
from support.jobs import finished, fsdpcore
from support.spmd import run, run_on

import fsdpcore as fc
from fsdpcore.collectives.selection.choose import choose
from fsdpcore.collectives.selection.costs import write_table
from fsdpcore.collectives.selection.overrides import parse
from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.policy import Costs, MeasuredAlgorithms, Policy, Tuning
from fsdpcore.core.work import Pending
from fsdpcore.launch.config import resolve

# The grammar.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ring", [("ring", 0, None)]),
        (" ring ", [("ring", 0, None)]),
        ("auto", [("auto", 0, None)]),
        ("ring:0-max", [("ring", 0, None)]),
        ("ring:64-64", [("ring", 64, 64)]),
        ("doubling:0-8192;ring:8193-max", [("doubling", 0, 8192), ("ring", 8193, None)]),
        ("ring:8193-max;doubling:0-8192", [("doubling", 0, 8192), ("ring", 8193, None)]),
        ("ring : 1KiB - 2MiB ; star:3GiB-max", [("ring", 2**10, 2**21), ("star", 3 * 2**30, None)]),
        ("native:0-9;shared:10-max", [("native", 0, 9), ("shared", 10, None)]),
    ],
)
def test_grammar(text: str, expected: list[tuple[str, int, int | None]]) -> None:
    ranges = parse("all_reduce", text, "somewhere")
    assert list(map(tuple, ranges)) == expected
    assert parse("all_reduce", str(ranges), "somewhere") == ranges


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["NAME or NAME:LOW-HIGH"]),
        ("ring;", ["''", "NAME or NAME:LOW-HIGH"]),
        ("ring:", ["'ring:'", "NAME:LOW-HIGH"]),
        ("ring:5", ["'ring:5'", "NAME:LOW-HIGH"]),
        ("ring:-5", ["'ring:-5'", "NAME:LOW-HIGH"]),
        ("ring:1-2-3", ["NAME:LOW-HIGH"]),
        ("ring,star", ["'ring,star'"]),
        ("ring:0-1KB", ["'1KB'", "8KiB"]),
        ("ring:0-1.5KiB", ["NAME:LOW-HIGH"]),
        ("ring:max-5", ["'max'", "at the end"]),
        ("ring:0-end", ["'end'", "'max'"]),
        ("ring:9-8", ["'ring:9-8' ends before it begins"]),
        ("ring:0-8;star:8-9", ["'ring:0-8' and 'star:8-9' overlap"]),
        ("star:8-9;ring:0-8", ["'ring:0-8' and 'star:8-9' overlap"]),
        ("ring;star:5-6", ["'ring:0-max' and 'star:5-6' overlap"]),
        ("rign", ["no algorithm 'rign'", "did you mean 'ring'", "doubling", "native"]),
        ("doubling:0-8;tree:9-max", ["all_reduce has no algorithm 'tree'"]),
        (5, ["5", "expected text"]),
        (None, ["expected text"]),
        (["ring"], ["expected text"]),
    ],
)
def test_what_is_refused(text: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("all_reduce", text, "somewhere")
    message = str(caught.value)
    for word in ["somewhere", "all_reduce", *words]:
        assert word in message
    assert "\n" not in message


# Where they come from.


def _overrides(*args: Any) -> dict[str, str]:
    return {name: str(ranges) for name, ranges in resolve(*args).policy.overrides.items()}


def test_argument_beats_variable_beats_file_for_each_collective(tmp_path: Path) -> None:
    (tmp_path / "fsdpcore.toml").write_text(
        '[algorithms]\nall_reduce = "star"\nreduce = "star"\ngather = "tree:0-1KiB"\n'
    )
    environ = {"FSDPCORE_ALL_REDUCE": "direct", "FSDPCORE_REDUCE": "tree", "FSDPCORE_SCATTER": ""}
    arguments = {"algorithms": {"all_reduce": "ring", "broadcast": None}}
    assert _overrides(arguments, environ, tmp_path) == {
        "all_reduce": "ring:0-max",
        "reduce": "tree:0-max",
        "gather": "tree:0-1024",
    }
    sources = resolve(arguments, environ, tmp_path).sources
    assert sources["all_reduce"] == "argument"
    assert "FSDPCORE_REDUCE" in sources["reduce"]
    assert "[algorithms]" in sources["gather"]


def test_without_any(tmp_path: Path) -> None:
    assert resolve({}, {}, tmp_path).policy.overrides == {}
    assert resolve({"algorithms": None}, {}, tmp_path).policy.overrides == {}


@pytest.mark.parametrize(
    ("arguments", "environ", "file", "words"),
    [
        ({"algorithms": {"all_reduse": "ring"}}, {}, "", ["argument", "mean 'all_reduce'"]),
        ({"algorithms": {"all_reduce": "rign"}}, {}, "", ["argument", "mean 'ring'"]),
        ({"algorithms": {3: "ring"}}, {}, "", ["argument", "unknown collective 3"]),
        ({"algorithms": "ring"}, {}, "", ["algorithms='ring'", "expected a dict"]),
        ({"algorithm": {}}, {}, "", ["'algorithm'", "did you mean 'algorithms'"]),
        ({}, {"FSDPCORE_ALL_REDUCE": "rign"}, "", ["FSDPCORE_ALL_REDUCE", "mean 'ring'"]),
        ({}, {"FSDPCORE_ALL_REDUSE": "x"}, "", ["did you mean 'FSDPCORE_ALL_REDUCE'"]),
        ({}, {"FSDPCORE_ALL_GATHER_V": "x"}, "", ["did you mean 'FSDPCORE_ALL_GATHER'"]),
        ({}, {}, '[algorithms]\nall_reduse = "ring"', ["fsdpcore.toml", "mean 'all_reduce'"]),
        ({}, {}, "[algorithms]\nall_reduce = 5", ["fsdpcore.toml [algorithms]", "text"]),
        ({}, {}, '[algorithm]\nall_reduce = "ring"', ["did you mean 'algorithms'"]),
    ],
)
def test_errors_name_the_source(
    tmp_path: Path, arguments: Any, environ: Any, file: str, words: list[str]
) -> None:
    (tmp_path / "fsdpcore.toml").write_text(file)
    with pytest.raises(ConfigError) as caught:
        resolve(arguments, environ, tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_an_option_of_a_url_cannot_override() -> None:
    with pytest.raises(ConfigError, match="unknown option 'algorithms'"):
        resolve({"transport": "sim://?algorithms=ring"}, {})


def test_deterministic_refuses_what_is_not_canonical() -> None:
    ring = {"algorithms": {"all_reduce": "star:0-8;ring:9-max"}}
    assert resolve(ring, {}).policy.overrides
    with pytest.raises(ConfigError, match="'ring' does not reduce in the canonical order"):
        resolve({**ring, "deterministic": True}, {})
    # Without a reduction there is no order.
    config = resolve({"algorithms": {"all_gather": "ring"}, "deterministic": True}, {})
    assert config.policy.deterministic
    # Whether a transport's own is canonical is known in the group only.
    assert resolve({"algorithms": {"all_reduce": "native"}, "deterministic": True}, {})


def test_nothing_is_started_with_a_wrong_override() -> None:
    started: list[Any] = []
    with pytest.raises(ConfigError, match="overlap"):
        fc.launch(started.append, world_size=2, algorithms={"all_reduce": "ring:0-9;star:9-max"})
    assert started == []


# What they change.


class CountingSim(SimBackend):
    """Counts the messages that this rank sends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent = 0

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        self.sent += 1
        return super().post_send(data, dst, envelope)


def _messages(backend: Any, algorithms: tuple[str, str]) -> list[int]:
    """How many messages all-reduces of 16 bytes and of 32 KiB take."""
    counts = []
    for size, algorithm in zip((4, 8192), algorithms, strict=True):
        for _ in range(2):  # the second time, nothing needs to be prepared
            before = backend.sent
            fc.all_reduce(np.ones(size, np.float32), backend, algorithm=algorithm)
        counts.append(backend.sent - before)
    return counts


def test_they_change_what_is_sent() -> None:
    by_name = run_on(CountingSim, _messages, world_size=4, args=(("star", "ring"),))
    override = {"all_reduce": "star:0-16;ring:17-max"}
    overridden = run_on(
        CountingSim, _messages, world_size=4, args=(("auto", "auto"),), algorithms=override
    )
    assert overridden == by_name
    # The centre of a star answers 3 ranks; in a ring everybody sends 2 (p - 1) = 6 messages.
    assert [ring - star for star, ring in overridden] == [3, 5, 5, 5]


def _chosen(backend: Any) -> tuple[list[str], str, str]:
    group = backend.sub([0, 1])
    names = [choose("all_reduce", "auto", n, g).name for g in (backend, group) for n in (8, 9)]
    return names, backend.root.policy.digest, str(backend.root.policy)


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_ranks_and_their_groups_follow_them(transport: str) -> None:
    found = run(
        _chosen,
        transport=transport,
        world_size=2,
        algorithms={"all_reduce": "ring:0-8;star:9-max"},
    )
    assert found[0][0] == ["ring", "star", "ring", "star"]
    assert found[0] == found[1]
    plain = run(_chosen, transport=transport, world_size=2)
    assert plain[0][1] != found[0][1]


# The digest, by which ranks notice that they differ.


def _policies() -> list[Policy]:
    ring, star = parse("all_reduce", "ring", ""), parse("all_reduce", "star", "")
    entry = MeasuredAlgorithms(4, 1, {"all_reduce": star})
    return [
        Policy(),
        Policy(deterministic=True),
        Policy(overrides={"all_reduce": ring}),
        Policy(overrides={"all_reduce": star}),
        Policy(overrides={"reduce_scatter": ring}),
        Policy(tuning=Tuning(Costs(1e-6, 1e-9, 1e-9))),
        Policy(tuning=Tuning(Costs(1e-6, 1e-9, 2e-9))),
        Policy(tuning=Tuning(Costs(1e-6, 1e-9, 1e-9, 1e-3))),
        Policy(link=Costs(1e-6, 1e-9, 1e-9)),
        Policy(tuning=Tuning(own={"shared": Costs(1e-6, 1e-9, 1e-9)})),
        Policy(tuning=Tuning(measured=(entry,))),
        Policy(tuning=Tuning(measured=(dataclasses.replace(entry, ranks=5),))),
        Policy(tuning=Tuning(measured=(dataclasses.replace(entry, hosts=2),))),
        Policy(tuning=Tuning(measured=(MeasuredAlgorithms(4, 1, {}, {"all_reduce": star}),))),
    ]


def test_every_difference_changes_the_digest_and_the_words() -> None:
    policies = _policies()
    assert len({policy.digest for policy in policies}) == len(policies)
    assert len({str(policy) for policy in policies}) == len(policies)
    assert all(len(policy.digest) == 16 for policy in policies)


def test_the_digest_is_that_of_the_meaning() -> None:
    one = resolve({"algorithms": {"reduce": "star", "gather": "tree:0-1KiB"}}, {})
    other = resolve({}, {"FSDPCORE_GATHER": "tree : 0-1024", "FSDPCORE_REDUCE": "star:0-max"})
    assert one.policy.digest == other.policy.digest
    entries = (MeasuredAlgorithms(2, 1), MeasuredAlgorithms(4, 1))
    first, second = (Policy(tuning=Tuning(measured=e)) for e in (entries, entries[::-1]))
    assert first.digest == second.digest


def test_the_digest_survives_the_way_to_another_process() -> None:
    for policy in _policies():
        copies = [pickle.loads(pickle.dumps(policy))]
        digest = policy.digest
        copies.append(pickle.loads(pickle.dumps(policy)))
        assert [copy.digest for copy in copies] == [digest, digest]
        assert copies == [policy, policy]


REFUSED = """
import os, sys

if os.environ["FSDPCORE_RANK"] == "1":
    name, _, value = sys.argv[1].partition("=")
    os.environ[name] = value

import numpy as np
import fsdpcore as fc

with fc.init() as backend:
    try:
        fc.all_reduce(np.ones(4, np.float32), backend)
    except fc.MismatchError as error:
        with open(f"refused{backend.rank}", "w") as file:
            file.write(str(error))
"""


def test_ranks_that_would_choose_differently_are_refused(tmp_path: Path) -> None:
    setting = "FSDPCORE_TUNING=table.toml"  # every setting of a policy is in its digest
    (tmp_path / "script.py").write_text(REFUSED)
    write_table(tmp_path / "table.toml", {"zmq": Tuning(Costs(1.0, 1.0, 1.0))})
    command = fsdpcore("run", "-n", 2, "--transport", "zmq", "--timeout", 20, "script.py", setting)
    done = finished(command, {"FSDPCORE_ALL_REDUCE": "direct"}, cwd=tmp_path)
    assert done.code == 0, done.err
    for rank in (0, 1):
        assert "policy" in (tmp_path / f"refused{rank}").read_text()
