"""``fsdpcore trace``: what it reads, the timeline that it makes, and what it says."""

from __future__ import annotations

import contextlib
import itertools
import json
import time

import numpy as np
import pytest
from typer.testing import CliRunner

import fsdpcore as fc
from fsdpcore.commands.main import app

WORLD = "0000000000000000"
PAIR = "00000000000000aa"
OTHER = "00000000000000bb"
# Wall-clock time of the moment at which the clock of the records shows 0.
EPOCH = 1_700_000_000


def operation(op="all_reduce", sequence=1, start=1.0, end=None, channel=WORLD, **more):
    """One record; ``start`` and ``end`` in seconds after EPOCH."""
    state = more.pop("state", "started" if end is None else "done")
    return {
        "op": op,
        "sequence": sequence,
        "channel": channel,
        "dtype": "float32",
        "shape": [4],
        "bytes": 16,
        "algorithm": "ring",
        "label": "",
        "start_ns": int(start * 1e9),
        "end_ns": None if end is None else int(end * 1e9),
        "state": state,
        "error": "",
        **more,
    }


def group(channel, ranks, operations, position=0, name=""):
    numbers = [o["sequence"] for o in operations if o["channel"] == channel]
    entered = max(numbers, default=0)
    return {
        "channel": channel,
        "ranks": list(ranks),
        "position": position,
        "name": name,
        "entered": entered,
        "issued": entered,
    }


def dump(rank, operations, *, size=2, written=100.0, failure=None, groups=(), started=0.0):
    return {
        "format": "fsdpcore-trace",
        "version": 1,
        "rank": rank,
        "world_size": size,
        "transport": "zmq",
        "started": EPOCH + started,
        "written": EPOCH + written,
        "clock": {"wall_ns": (EPOCH + 50) * 10**9, "monotonic_ns": 50 * 10**9},
        "complete": True,
        "failure": failure,
        "groups": [group(WORLD, range(size), operations), *groups],
        "operations": operations,
    }


@pytest.fixture
def trace(tmp_path):
    """Write the files of some ranks and run the command on them."""

    def trace(*dumps, options=()):
        for content in dumps:
            (tmp_path / f"rank_{content['rank']}.json").write_text(json.dumps(content))
        return CliRunner().invoke(app, ["trace", str(tmp_path), *map(str, options)])

    return trace


def finding(result, word):
    """The only line with this word, of a command that found something wrong."""
    assert result.exit_code == 1, result.output
    found = [line for line in result.output.splitlines() if word in line]
    assert len(found) == 1, result.output
    return found[0]


def at(seconds):
    """How a moment is shown."""
    return time.strftime("%H:%M:%S", time.localtime(EPOCH + seconds))


# Nothing is wrong.


def test_all_is_well(trace):
    done = [operation(sequence=n, start=n, end=n + 0.5) for n in (1, 2)]
    result = trace(dump(0, done), dump(1, done))
    assert result.exit_code == 0
    assert "2 of 2 ranks, 4 operations" in result.output
    assert "every operation has ended well" in result.output


def test_a_snapshot_of_a_healthy_job_is_no_deadlock(trace):
    """Files that were written on request a moment apart, while a collective began."""
    result = trace(
        dump(0, [operation(start=9.9)], written=10.0),
        dump(1, [], written=9.8),
    )
    assert result.exit_code == 0, result.output


def test_a_message_that_is_posted_early_is_no_deadlock(trace):
    posted = operation("recv", 0, 1.0, peer=1, tag=0)
    assert trace(dump(0, [posted]), dump(1, [])).exit_code == 0


def test_a_receive_tried_in_vain_is_no_deadlock(trace):
    tried = operation("recv", 0, 1.0, 2.0, peer=1, tag=0, state="timed out")
    later = operation(start=3.0, end=4.0)
    assert trace(dump(0, [tried, later]), dump(1, [later])).exit_code == 0


# Who stopped where.


def test_a_rank_that_never_began(trace):
    before = [operation("broadcast", n, n, n + 0.25) for n in (1, 2)]
    late = operation(sequence=3, start=10.0, end=70.0, state="timed out", error="...")
    others = [
        dump(rank, [*before, late], size=4, failure="CommTimeoutError: x\nmore")
        for rank in (0, 1, 3)
    ]
    result = trace(*others, dump(2, before, size=4, failure="PeerFailedError: rank 0 gave up"))
    line = finding(result, "never began")
    assert line.startswith("rank 2 never began all_reduce #3 of all ranks")
    assert f"(ranks 0, 1, 3 wait in it since {at(10)}.000)" in line
    assert f"its last operation was broadcast #2 of all ranks, ended at {at(2)}.250" in line
    assert "7.8 s before" in line
    assert finding(result, "CommTimeoutError") == "ranks 0, 1, 3 failed: CommTimeoutError: x"


def test_a_rank_that_never_began_anything_in_a_group(trace):
    stuck = operation(start=10.0, channel=PAIR)
    result = trace(
        dump(1, [stuck], size=4, groups=[group(PAIR, (1, 3), [stuck], name="pair")]),
        dump(3, [], size=4, groups=[group(PAIR, (1, 3), [], name="pair")]),
        dump(0, [], size=4),
        dump(2, [], size=4),
    )
    line = finding(result, "never began")
    assert line.startswith("rank 3 never began all_reduce #1 of group [1, 3] 'pair' (rank 1 waits")
    assert "it has begun no operation at all" in line


def test_groups_made_at_different_positions(trace):
    mine, theirs = operation(start=10.0, channel=PAIR), operation(start=10.0, channel=OTHER)
    result = trace(
        dump(0, [mine], groups=[group(PAIR, (0, 1), [mine])]),
        dump(1, [theirs], groups=[group(OTHER, (0, 1), [theirs], 1)]),
    )
    line = finding(result, "rank 1 never began")
    assert "it stopped in all_reduce #1 of group [0, 1] (the 2nd of these) itself" in line
    assert "it has no such group, but group [0, 1] (the 2nd of these)" in line


def test_a_collective_that_fell_out_of_the_ring_had_begun(trace):
    stuck = operation(start=10.0, state="failed", end=12.0, error="PeerFailedError: rank 1 died")
    forgotten = dump(1, [], failure="CommunicationError: I died")
    forgotten["groups"][0]["entered"] = 1
    result = trace(dump(0, [stuck], failure="PeerFailedError: rank 1 died"), forgotten)
    assert "never began" not in result.output
    line = finding(result, "which every rank had begun")
    assert line.startswith("rank 0 stopped in all_reduce #1 of all ranks")
    assert line.endswith("PeerFailedError: rank 1 died")


def test_a_file_that_is_too_old_to_tell(trace):
    """A file written on request, before the collective."""
    stuck = operation(start=10.0, state="failed", end=12.0, error="CommunicationError: x")
    result = trace(dump(0, [stuck], failure="CommunicationError: x"), dump(1, [], written=9.0))
    assert finding(result, "too early").startswith("rank 0 stopped in all_reduce #1 of all ranks; ")
    assert "every rank had begun" not in result.output


def test_a_rank_without_a_file(trace):
    stuck = operation(start=10.0)
    result = trace(dump(0, [stuck], size=3), dump(2, [stuck], size=3))
    assert finding(result, "no file (").startswith("rank 1: no file (rank_1.json): killed")
    line = finding(result, "stopped in")
    assert line.startswith("ranks 0, 2 stopped in all_reduce #1 of all ranks; rank 1 left no file")


def test_many_ranks_without_a_file(trace):
    result = trace(dump(50, [], size=100))
    line = finding(result, "no file")
    assert "(rank_0.json, rank_1.json, rank_2.json, rank_3.json, ...)" in line


def test_a_file_of_an_earlier_job(trace):
    done = [operation(start=200.0, end=201.0)]
    result = trace(
        dump(0, done, started=150.0, written=210.0), dump(1, [], started=0.0, written=100.0)
    )
    assert finding(result, "older").startswith("rank 1: its file is older than the job")


def test_a_mismatch_says_who_called_what(trace):
    error = "MismatchError: collective #1 does not fit together:\n  rank 0: a\n  rank 1: b"
    failed = operation(start=1.0, end=1.5, state="failed", error=error)
    result = trace(dump(0, [failed], failure=error), dump(1, [failed], failure=error))
    line = finding(result, "ranks 0, 1 failed")
    assert line.endswith("does not fit together: rank 0: a; rank 1: b")


def test_a_message_that_never_came(trace):
    wait = operation(
        "recv",
        0,
        5.0,
        7.0,
        peer=1,
        tag=8,
        state="timed out",
        error="CommTimeoutError: recv of x\ny",
    )
    result = trace(dump(0, [wait], failure="PeerFailedError: ..."), dump(1, []))
    line = finding(result, "recv from")
    assert line == (
        f"rank 0 stopped in recv from rank 1 (tag 8), begun at {at(5)}.000: "
        "CommTimeoutError: recv of x"
    )


# Cycles and orders.


def test_a_cycle_over_groups(trace):
    """Rank 0 waits in A for 1, rank 1 in B for 2, rank 2 in C for 0."""
    channels = {frozenset(pair): f"{number:016x}" for number, pair in
                enumerate([(0, 1), (1, 2), (0, 2)], 10)}  # fmt: skip
    dumps = []
    for rank in range(3):
        pair = {rank, (rank + 1) % 3}
        stuck = operation(start=10.0 + rank, channel=channels[frozenset(pair)])
        groups = [group(c, sorted(p), [stuck]) for p, c in channels.items() if rank in p]
        dumps.append(dump(rank, [stuck], size=3, groups=groups))
    line = finding(trace(*dumps), "wait for each other")
    assert line.startswith("ranks 0, 1, 2 wait for each other: rank 0 in all_reduce #1 of group")
    assert "rank 1 in all_reduce #1 of group [1, 2] for rank 2" in line
    assert "rank 2 in all_reduce #1 of group [0, 2] for rank 0" in line
    assert line.endswith("in different orders")


def test_messages_take_part_in_a_cycle(trace):
    wait = operation(
        "recv", 0, 5.0, 7.0, peer=1, tag=8, state="timed out", error="CommTimeoutError: x"
    )
    stuck = operation(start=5.0)
    result = trace(dump(0, [wait], failure="CommTimeoutError: x"), dump(1, [stuck]))
    line = finding(result, "wait for each other")
    assert "rank 0 in recv from rank 1 (tag 8) for rank 1" in line
    assert "rank 1 in all_reduce #1 of all ranks for rank 0" in line


def test_a_chain_is_no_cycle(trace):
    first = operation(start=5.0, channel=PAIR)
    second = operation(start=5.0, channel=OTHER)
    result = trace(
        dump(0, [first], size=3, groups=[group(PAIR, (0, 1), [first])]),
        dump(1, [second], size=3, groups=[group(PAIR, (0, 1), []), group(OTHER, (1, 2), [second])]),
        dump(2, [], size=3, groups=[group(OTHER, (1, 2), [])]),
    )
    assert "wait for each other" not in result.output
    assert "rank 2 never began" in result.output
    assert "rank 1 never began" in result.output


def _orders(trace, starts):
    """Two ranks with one collective in each of two groups, which begin and end at some times."""
    dumps = []
    for rank, times in enumerate(starts):
        done = [
            operation("broadcast", 1, *times[channel], channel=channel) for channel in (PAIR, OTHER)
        ]
        groups = [group(PAIR, (0, 1), done), group(OTHER, (0, 1), done, name="b")]
        dumps.append(dump(rank, done, groups=groups))
    return trace(*dumps)


def test_orders_that_differ_are_worth_a_note(trace):
    result = _orders(trace, [{PAIR: (1, 2), OTHER: (3, 4)}, {PAIR: (3, 4), OTHER: (1, 2)}])
    assert result.exit_code == 0
    (line,) = [line for line in result.output.splitlines() if line.startswith("note: ")]
    assert "rank 0 did broadcast #1 of group [0, 1] before broadcast #1 of group [0, 1] 'b'" in line
    assert "rank 1 the other way round" in line


@pytest.mark.parametrize(
    "starts",
    [
        [{PAIR: (1, 2), OTHER: (3, 4)}, {PAIR: (1, 2), OTHER: (3, 4)}],
        # At the same time, in the background.
        [{PAIR: (1, 4), OTHER: (2, 3)}, {PAIR: (2, 4), OTHER: (1, 3)}],
        [{PAIR: (1, 2), OTHER: (3, 4)}, {PAIR: (2, 4), OTHER: (1, 3)}],
    ],
)
def test_orders_that_do_no_harm(trace, starts):
    result = _orders(trace, starts)
    assert (result.exit_code, "note" in result.output) == (0, False)


# The timeline.


def _events(path):
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X"}
    return [e for e in events if e["ph"] == "X"], [e for e in events if e["ph"] == "M"]


def test_the_timeline(trace, tmp_path):
    done = [
        operation("barrier", 1, 1.0, 1.5),
        operation(start=2.0, end=2.000001, channel=PAIR, label="loss"),
    ]
    groups = [group(PAIR, (0, 1), done)]
    late = dump(1, [operation(start=1.25, end=3.0)])
    # The same moments on a clock that started a second earlier.
    late["clock"] = {"wall_ns": (EPOCH + 50) * 10**9, "monotonic_ns": 51 * 10**9}
    output = tmp_path / "out.json"
    result = trace(dump(0, done, groups=groups), late, options=["-o", output])
    assert str(output) in result.output
    events, names = _events(output)
    first, second, third = events
    assert (first["name"], first["pid"], first["ts"], first["dur"]) == (
        "barrier #1",
        0,
        750000,
        5e5,
    )
    assert (second["ts"], second["dur"]) == (1_750_000, 1)
    assert second["args"] == {
        "group": "group [0, 1]",
        "state": "done",
        "sequence": 1,
        "dtype": "float32",
        "shape": [4],
        "bytes": 16,
        "algorithm": "ring",
        "label": "loss",
    }
    assert (third["pid"], third["ts"], third["dur"]) == (1, 0, 1_750_000)
    assert first["tid"] != second["tid"]
    assert first["tid"] == third["tid"], "a group has the same row on all ranks"
    shown = {(n["pid"], n["tid"]): n["args"]["name"] for n in names if n["name"] == "thread_name"}
    assert shown[0, first["tid"]] == "all ranks"
    assert shown[0, second["tid"]] == "group [0, 1]"
    processes = {n["pid"]: n["args"]["name"] for n in names if n["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}


def test_messages_that_overlap_have_rows_of_their_own(trace, tmp_path):
    messages = [
        operation("send", 0, start, end, peer=1, tag=3)
        for start, end in [(1, 3), (2, 4), (3, 5), (3.5, 4.5), (4, 6)]
    ]
    trace(dump(0, messages), dump(1, []))
    events, _ = _events(tmp_path / "trace.json")
    rows = {}
    for event in events:
        rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == 3
    for spans in rows.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_what_has_not_ended_lasts_until_the_file_was_written(trace, tmp_path):
    trace(dump(0, [operation(start=90.0)]), dump(1, []))
    (event,) = _events(tmp_path / "trace.json")[0]
    assert (event["name"], event["dur"]) == ("all_reduce #1 (not ended)", 10_000_000)


def test_no_operations_at_all(trace, tmp_path):
    assert trace(dump(0, []), dump(1, [])).exit_code == 0
    assert _events(tmp_path / "trace.json")[0] == []


# Input that is wrong.


def _spans(*steps):
    """Of the unit, phase, part and seconds of rows of steps, one after the other."""
    found, now = [], 0
    for number, rows in enumerate(steps):
        for unit, phase, part, seconds in rows:
            end = now + int(seconds * 1e9)
            times = {"step": number, "start_ns": now, "end_ns": end}
            found.append({**times, "unit": unit, "phase": phase, "part": part})
            now = end
    return found


def test_a_picture_of_the_last_whole_step(trace, tmp_path):
    """What takes three times as long has three times the area; other steps are not in it."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    other = [("a", "forward", "moving", 9), ("a", "update", "moving", 9), ("", "", "moving", 9)]
    step = [
        ("a", "forward", "computing", 2),
        ("b", "forward", "waiting", 6),
        ("b", "update", "optimizer", 1),
    ]
    content = dump(0, [operation(end=2.0)], size=1)
    evaluation, begun = [("a", "forward", "moving", 9)], [("a", "forward", "moving", 9)]
    content["spans"] = _spans(other, evaluation, [*step, ("", "", "moving", 9)], begun)
    result = trace(content, options=["--plot", tmp_path / "step.png"])
    assert result.exit_code == 0, result.output
    green, orange, blue = _coloured(image.open(tmp_path / "step.png"))
    key = blue  # there is nothing blue but in the key to the colours
    assert (orange - key) / (green - key) == pytest.approx(3, rel=0.05)
    assert key < green / 10


def test_no_picture_without_a_step(trace, tmp_path):
    pytest.importorskip("matplotlib")
    content = dump(0, [operation(end=2.0)], size=1)
    content["spans"] = _spans([("a", "forward", "computing", 2)])
    result = trace(content, options=["--plot", tmp_path / "step.png"])
    assert result.exit_code == 2, result.output
    assert "every operation has ended well" in result.output
    assert "no training step of an engine that all ranks have written as a whole" in result.output


def test_a_picture_is_of_a_step_that_all_ranks_have(trace, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    first, second, third = (
        [("a", "backward", part, 2), ("a", "update", part, 1)]
        for part in ("waiting", "computing", "waiting")
    )
    contents = [dump(rank, [operation(end=2.0)], size=2) for rank in (0, 1)]
    contents[0]["spans"] = _spans(first, second, third)
    contents[1]["spans"] = _spans(first, second)
    result = trace(*contents, options=["--plot", tmp_path / "step.png"])
    assert result.exit_code == 0, result.output
    green, orange, blue = _coloured(image.open(tmp_path / "step.png"))
    assert orange == blue < green / 10


def _coloured(image):
    """How many pixels are green, orange and blue."""
    pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    return [
        np.count_nonzero((np.abs(pixels - np.array(colour)) < 8).all(axis=1))
        for colour in ((0x11, 0x86, 0x6F), (0xE0, 0x7B, 0x00), (0x24, 0x54, 0xC6))
    ]


def _wrong(result):
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    assert line.startswith("fsdpcore: ")
    return line


def test_no_directory(tmp_path):
    result = CliRunner().invoke(app, ["trace", str(tmp_path / "none")])
    assert "none is not a directory" in _wrong(result)


def test_no_files(trace):
    line = _wrong(trace())
    assert "has no rank_*.json" in line
    assert "FSDPCORE_TRACE=" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "not a file of fsdpcore's flight recorder"),
        ('{"traceEvents": []}', "not a file of fsdpcore's flight recorder"),
        ('{"format": "fsdpcore-trace", "version": 2}', "version 2 of the format"),
        ('{"format": "fsdpcore-trace", "version": 1}', "damaged: KeyError"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_a_file_that_is_something_else(trace, tmp_path, text, words):
    path = tmp_path / "rank_0.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    line = _wrong(trace())
    assert words in line
    assert "rank_0.json" in line


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 7},
        {"rank": "0"},
        {"rank": True},
        {"world_size": None},
        {"clock": []},
        {"operations": [{}]},
        {"operations": [operation(state="asleep")]},
        {"operations": [operation(channel=PAIR)]},
        {"operations": [{**operation(), "start_ns": "x"}]},
        {"operations": 3},
        {"groups": [group("zz", (0, 1), [])]},
        {"groups": [group(WORLD, (0, 9), [])]},
    ],
)
def test_a_damaged_file(trace, tmp_path, change):
    content = {**dump(0, [operation(end=2.0)]), **change}
    (tmp_path / "rank_0.json").write_text(json.dumps(content))
    assert "rank_0.json" in _wrong(trace())


def test_files_of_different_jobs(trace):
    line = _wrong(trace(dump(0, []), dump(1, [], size=3)))
    assert "different jobs, of 2 and 3 ranks" in line


def test_an_output_that_cannot_be_written(trace, tmp_path):
    result = trace(dump(0, []), dump(1, []), options=["-o", tmp_path / "no" / "file.json"])
    assert "cannot be written" in _wrong(result)


# From a job to its explanation.


def _healthy(backend):
    group = backend.sub([backend.rank])
    for _ in range(3):
        fc.all_reduce(np.ones(3), backend, label="loss")
        fc.broadcast(np.ones(3), group)
    if backend.rank == 0:
        backend.send(np.ones(3), 1)
    else:
        backend.recv(np.empty(3), 0)


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_a_healthy_job(transport, tmp_path):
    fc.launch(_healthy, world_size=2, transport=transport, trace=str(tmp_path))
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 0, result.output
    events, _ = _events(tmp_path / "trace.json")
    assert len(events) == 14
    reductions = {
        (e["pid"], e["args"]["sequence"]): (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["name"].startswith("all_reduce")
    }
    for sequence in (1, 2, 3):
        (start, end), (other_start, other_end) = (reductions[rank, sequence] for rank in (0, 1))
        # No rank leaves an all_reduce before all have come; clocks agree on one host.
        assert max(start, other_start) <= min(end, other_end) + 1000


def _skips(backend, folder):
    backend.barrier()
    if backend.rank != 1:
        fc.all_reduce(np.ones(3), backend)
        return
    waiting, end = {"rank_0.json", "rank_2.json"}, time.monotonic() + 20
    while waiting - {path.name for path in folder.iterdir()} and time.monotonic() < end:
        time.sleep(0.02)  # busy with something else until the others have given up
    # A rank that has not heard of the failure has returned, and that is another finding.
    with contextlib.suppress(fc.PeerFailedError):
        while time.monotonic() < end:
            backend.check_usable()
            time.sleep(0.02)


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_a_job_that_hung(transport, tmp_path):
    # Longer than a second: a rank whose file is older than that may just have been late.
    options = {"transport": transport, "trace": str(tmp_path), "timeout": 1.1}
    with pytest.raises(fc.RankFailedError):
        fc.launch(_skips, world_size=3, args=(tmp_path,), **options)
    line = finding(CliRunner().invoke(app, ["trace", str(tmp_path)]), "never began")
    assert line.startswith("rank 1 never began all_reduce #2 of all ranks (ranks 0, 2 wait in it")
    assert "its last operation was barrier #1 of all ranks" in line


def _returns(backend):
    for _ in range(3 if backend.rank else 4):
        fc.all_reduce(np.ones(3), backend, label="unit l")


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_a_rank_that_returned_early(transport, tmp_path):
    with pytest.raises(fc.RankFailedError) as failed:
        fc.launch(_returns, world_size=2, transport=transport, trace=str(tmp_path))
    call = "all_reduce #4 of all ranks (unit l)"
    assert (
        "rank 1 has left the job (it has returned from _returns) while rank 0 waits in "
        f"{call}" in str(failed.value)
    )
    # It may have heard of the failure before it was gone, or not.
    file = tmp_path / "rank_1.json"
    content = json.loads(file.read_text())
    for heard in (None, f"PeerFailedError: rank 0 failed: {failed.value}"):
        file.write_text(json.dumps(content | {"failure": heard}))
        result = CliRunner().invoke(app, ["trace", str(tmp_path)])
        assert finding(result, "never began").startswith(
            "rank 1 returned from _returns after 3 collectives of all ranks and never began "
            f"{call}, in which rank 0 waited since "
        )
        assert "every rank had begun" not in result.output


def _crosses(backend):
    groups = [backend.sub([0, 1]), backend.sub([1, 0])]
    if backend.rank:
        groups.reverse()
    backend.barrier()
    for group in groups:
        fc.all_reduce(np.ones(3), group)


def test_a_job_that_waited_for_itself(tmp_path):
    with pytest.raises(fc.RankFailedError):
        fc.launch(_crosses, world_size=2, transport="sim", trace=str(tmp_path), timeout=0.7)
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    line = finding(result, "wait for each other")
    assert "rank 0 in all_reduce #1 of group [0, 1] for rank 1" in line
    assert "rank 1 in all_reduce #1 of group [1, 0] for rank 0" in line
