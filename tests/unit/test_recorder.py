"""The flight recorder: what a rank remembers of its operations, and says of them."""

from __future__ import annotations

import gc
import json
import queue
import threading
import time
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

import fsdpcore as fc
from fsdpcore.core.clock import WALL
from fsdpcore.core.text import name_ranks, rank_list
from fsdpcore.diagnostics.deadlocks import _said
from fsdpcore.diagnostics.recorder import Recorder
from fsdpcore.diagnostics.stack import where
from fsdpcore.diagnostics.status import MAX_WAITS, Group, Status, ordinal
from fsdpcore.launch.config import resolve

F32 = np.dtype(np.float32)


@dataclass
class Call:
    operation: str = "all_reduce"
    dtype: np.dtype | None = F32
    shape: tuple[int, ...] = (2, 3)
    nbytes: int = 24
    algorithm: str = "ring"
    label: str = ""


class Backend:
    """What the recorder uses of a group, and of a whole job."""

    def __init__(self, channel=0, ranks=(0, 1), position=0, name="", rank=1):
        self.channel, self.ranks, self.issued, self.begun = channel, ranks, 0, 0
        self.group = Group(channel, ranks, position, name)
        self.rank, self.world_size, self.failure = rank, 4, None
        self.clock = WALL
        self.capabilities = fc.Capabilities("fake", 1, 1, 1)

    def called(self, sequence):
        return None


@pytest.fixture
def world():
    return Backend(ranks=(0, 1, 2, 3))


@pytest.fixture
def recorder(world):
    recorder = Recorder(world, 10)
    recorder.add_group(world)
    return recorder


def finished(recorder, backend, sequence, **call):
    entry = recorder.begin(backend, sequence, Call(**call))
    recorder.end(entry)
    return entry


# What is kept.


def test_an_entry_has_what_was_called(recorder, world):
    before = time.monotonic_ns()
    entry = recorder.begin(world, 7, Call())
    assert (entry.state, entry.sequence, entry.group, entry.end) == ("started", 7, world.group, 0)
    recorder.end(entry)
    assert entry.state == "done"
    assert before <= entry.start <= entry.end <= time.monotonic_ns()
    assert recorder.entries() == [entry]


def test_the_oldest_are_forgotten(recorder, world):
    kept = [finished(recorder, world, number) for number in range(1, 26)][-10:]
    assert recorder.entries() == kept


def test_how_many_are_kept_can_change(recorder, world):
    kept = [finished(recorder, world, number) for number in range(1, 9)]
    recorder.configure("", 3)
    assert recorder.entries() == kept[-3:]


def test_an_operation_that_outlives_the_ring_does_no_harm(recorder, world):
    slow = recorder.begin(world, 1, Call())
    later = [finished(recorder, world, number) for number in range(2, 30)]
    recorder.end(slow)
    assert recorder.entries() == later[-10:]
    assert all(entry.state == "done" for entry in later)


@pytest.mark.parametrize(
    ("error", "state"), [(fc.CommTimeoutError("late"), "timed out"), (ValueError("x"), "failed")]
)
def test_failures(recorder, world, error, state):
    entry = recorder.begin(world, 1, Call())
    recorder.fail(entry, error)
    assert (entry.state, entry.error) == (state, f"{type(error).__name__}: {error}")
    recorder.fail(entry, KeyError("second"))
    assert entry.error == f"{type(error).__name__}: {error}", "only the first end counts"


def test_a_failure_keeps_no_array_alive(recorder, world):
    array = np.ones(3)
    alive = weakref.ref(array)

    def fail(held):
        raise ValueError("with a traceback whose frames hold an array")

    entry = recorder.begin(world, 1, Call())
    try:
        fail(array)
    except ValueError as error:
        recorder.fail(entry, error)
    del array
    gc.collect()
    assert alive() is None


def test_the_algorithm_may_be_known_later(recorder, world):
    call = Call(algorithm="auto")
    entry = recorder.begin(world, 1, call)
    assert entry.carrier == "auto"
    call.algorithm = "doubling"
    assert entry.carrier == "doubling"
    entry.algorithm = "direct"
    assert entry.carrier == "direct"


def test_threads_may_record_at_the_same_time(world):
    recorder = Recorder(world, 100_000)
    groups = [Backend(channel) for channel in range(2, 10, 2)]

    def work(group):
        for number in range(1, 2001):
            finished(recorder, group, number)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert recorder.status(0).entered == 0
    for thread in threads:
        thread.join()
    for group in groups:
        mine = [e.sequence for e in recorder.entries() if e.group is group.group]
        assert mine == list(range(1, 2001))


# What a rank says of itself.


def test_status_of_a_rank_that_has_done_nothing(recorder):
    assert recorder.status(0) == Status("no collective so far, busy elsewhere", 0)


def test_status_in_an_operation(recorder, world):
    finished(recorder, world, 1)
    recorder.begin(world, 2, Call("broadcast", label="weights"))
    status = recorder.status(0)
    assert status.text.startswith("in broadcast #2 of all ranks (weights) for 0.")
    assert status.entered == 2
    (wait,) = status.waits
    assert (wait.op, wait.sequence, wait.group, wait.over) == ("broadcast", 2, world.group, False)


def test_status_between_operations(recorder, world):
    finished(recorder, world, 1)
    status = recorder.status(0)
    assert status.text.startswith("finished all_reduce #1 of all ranks 0.")
    assert status.text.endswith("busy elsewhere since")
    assert (status.entered, status.waits) == (1, ())


def calling(inner, module, name, file="/srv/app/train.py"):
    """A function of a module that calls another one in its second line."""
    namespace = {"__name__": module, "inner": inner}
    exec(compile(f"def {name}():\n    inner()", file, "exec"), namespace)
    return namespace[name]


@pytest.mark.parametrize(
    ("modules", "shown"),
    [
        (["fsdpcore.fsdp", *["user"] * 7], ["f1", "f2", "f3", "f4", "f5"]),
        (["user", "fsdpcore.fsdp", "user", "fsdpcore.launch.rank", "user"], ["f0", "f2"]),
        (["fsdpcore.fsdp", "fsdpcore.launch.rank", "user"], ["f0"]),
    ],
)
def test_status_between_operations_has_the_stack_of_the_program(recorder, world, modules, shown):
    """Up to five calls of it, the innermost first; of the package only if there are no others."""
    gate = queue.SimpleQueue()
    call = gate.get
    for number, module in enumerate(modules):
        call = calling(call, module, f"f{number}")
    inside = "".join(
        f"app/train.py:2 in {name}{', called from ' if not number and shown[1:] else ', '}"
        for number, name in enumerate(shown)
    ).removesuffix(", ")

    def program():
        recorder.begin_program("train")
        ready.put(None)
        call()
        recorder.end_program()

    ready = queue.SimpleQueue()
    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    ready.get()
    finished(recorder, world, 1)
    end = time.monotonic() + 10
    while not (text := recorder.status(0).text).endswith(f"elsewhere since (at {inside})"):
        assert time.monotonic() < end, text
    assert recorder.status(0, 1).text.endswith("busy elsewhere since"), "only a call was asked for"
    gate.put(None)
    thread.join()
    assert recorder.status(0).text.endswith("ago, has returned from train")


def test_a_stack_is_short_and_printable():
    gate = queue.SimpleQueue()
    call = calling(gate.get, "user", "f" * 300, "/a/b\n\x1b[31m/c.py")
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while "fff, called from" not in (text := where(thread.ident)):
        assert time.monotonic() < end, text
    gate.put(None)
    thread.join()
    assert text.isprintable()
    assert len(text) < 500
    assert where(thread.ident) == ""


def test_status_after_a_failure_says_where(recorder, world):
    recorder.fail(recorder.begin(world, 1, Call()), fc.CommTimeoutError("late"))
    status = recorder.status(0)
    assert status.text.startswith("failed in all_reduce #1 of all ranks 0.")
    (wait,) = status.waits
    assert wait.over


def test_status_in_operations_of_many_groups(recorder, world):
    groups = [Backend(channel, (1, channel)) for channel in range(2, 14, 2)]
    for group in groups:
        recorder.begin(group, 3, Call())
    status = recorder.status(4)
    assert [wait.channel for wait in status.waits] == [2, 4, 6, 8]
    assert len(status.waits) == MAX_WAITS
    assert "in all_reduce #3 of group [1, 2] for" in status.text
    assert status.entered == 3


def test_entered_is_of_the_channel_asked_about(recorder, world):
    group = Backend(8)
    recorder.add_group(group)
    finished(recorder, world, 5)
    recorder.begin(group, 2, Call())
    assert (recorder.entered(0), recorder.entered(8), recorder.entered(6)) == (5, 2, 0)
    assert recorder.status(8).member
    assert not recorder.status(6).member


def test_entered_is_known_for_a_group_in_use_whose_operations_are_forgotten(recorder, world):
    group = Backend(8)
    recorder.add_group(group)
    finished(recorder, group, 41)
    group.begun = 41
    for number in range(1, 30):
        finished(recorder, world, number)
    assert recorder.entered(8) == 41


def test_groups_that_are_gone_are_forgotten(recorder, world):
    for channel in range(2, 2000, 2):
        group = Backend(channel)
        recorder.add_group(group)
        finished(recorder, group, 1)
    del group
    for number in range(1, 30):
        finished(recorder, world, number)
    gc.collect()
    assert [recorder.group(channel) for channel in range(2, 2000, 2)] == [None] * 999
    assert recorder.group(0) == world.group


def test_a_status_travels_as_json(recorder, world):
    group = Backend(2**63 + 4, (0, 2, 1), 3, "mesh")
    recorder.begin(world, 1, Call())
    recorder.begin(group, 2, Call())
    status = recorder.status(group.channel)
    assert Status.from_json(json.loads(json.dumps(status.as_json()))) == status


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"text": 3, "entered": "x", "waits": 3},
        {"text": "x", "entered": None, "waits": [3, {}, {"ranks": 3}, {"ranks": ["x"]}, None]},
    ],
)
def test_a_status_that_is_no_status_does_no_harm(content):
    status = Status.from_json(content)
    assert (status.entered, status.waits) == (0, ())


# Words.


def test_words_for_ranks():
    assert rank_list([0, 1]) == "[0, 1]"
    assert rank_list((2, 1, 0)) == "[2, 1, 0]"
    assert rank_list(range(3, 8)) == "[3..7]"
    assert rank_list(range(0, 200, 2)) == "[0, 2, 4, 6, 8, 10, 12, 14, ... 198]"
    assert name_ranks([4]) == "rank 4"
    assert name_ranks([0, 1, 3]) == "ranks 0, 1, 3"
    assert name_ranks(range(16)).endswith("12, 13, 14, 15")
    assert name_ranks(range(0, 200, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 92 others"
    assert name_ranks([*range(16), 17, 20, 21]) == "ranks 0..15, 17, 20..21"
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]
    )


def test_ranks_that_do_the_same_are_told_together():
    known = {rank: SimpleNamespace(text=text * 400) for rank, text in enumerate("abcaaaaab")}
    assert _said(range(9), known) == ([("a" * 400, [0, 3, 4, 5, 6, 7])], [1, 2, 8])
    few = [("a" * 400, [0, 3]), ("b" * 400, [1]), ("c" * 400, [2])]
    assert _said([0, 1, 2, 3], known) == (few, [])
    known = {rank: SimpleNamespace(text=text) for rank, text in enumerate("aba")}
    said, more = _said([0, 1, 2, 5], known)
    assert [ranks for _, ranks in said] == [[0, 2], [1], [5]]
    assert [text for text, _ in said[:2]] == ["a", "b"]
    assert more == []


def test_words_for_groups():
    assert str(Group(0, (0, 1, 2))) == "all ranks"
    assert str(Group(2, (0, 2))) == "group [0, 2]"
    assert str(Group(2, (0, 2), 1)) == "group [0, 2] (the 2nd of these)"
    assert str(Group(2, (0, 2), 0, "tensor")) == "group [0, 2] 'tensor'"


# Real messages.


def _messages(backend):
    """Ends are noted for messages that are waited for, polled, or neither."""
    recorder, me = backend.root.recorder, backend.rank
    if me == 0:
        backend.send(np.ones(3), 1, tag=1)
        works = [backend.isend(np.ones(100_000), 1, tag=tag) for tag in (2, 3)]
        backend.barrier()
        assert all(work.done() for work in works)
    else:
        backend.recv(np.empty(3), 0, tag=1)
        started = backend.irecv(np.empty(100_000), 0, tag=2)
        backend.recv(np.empty(100_000), 0, tag=3)
        never = backend.irecv(np.empty(5), 0, tag=4)
        backend.barrier()
        assert started.done()
        assert not never.done()
    found = [
        (e.call.operation, e.call.tag, e.state) for e in recorder.entries()[:4] if not e.sequence
    ]
    if me == 0:
        assert found == [("send", 1, "done"), ("send", 2, "done"), ("send", 3, "done")]
    else:
        assert ("recv", 4, "started") in found
        assert found[:3] == [("recv", 1, "done"), ("recv", 2, "done"), ("recv", 3, "done")]
        assert recorder.status(0).text.startswith("finished"), "posting is not waiting"
    backend.barrier()  # a rank that leaves ends what others wait for of it


def test_messages_of_a_job():
    fc.launch(_messages, world_size=2)


def _withdrawn(backend):
    if backend.rank == 0:
        with pytest.raises(
            fc.CommTimeoutError, match=r"recv of float64 \(2,\) from rank 1 \(tag 3\)"
        ):
            backend.recv(np.empty(2), 1, tag=3, timeout=0.01)
        (entry,) = backend.root.recorder.entries()
        assert entry.state == "timed out"
    backend.barrier()


def test_a_receive_that_is_given_up():
    fc.launch(_withdrawn, world_size=2)


# Files.


def _operations(path):
    content = json.loads(path.read_text())
    assert (content["format"], content["version"]) == ("fsdpcore-trace", 1)
    return content["operations"]


def test_a_dump_has_everything(recorder, world, tmp_path):
    group = Backend(2**63, (1, 3), 1, "pair")
    finished(recorder, world, 1, label="loss")
    recorder.fail(recorder.begin(group, 2, Call(dtype=None, shape=())), ValueError("bad"))
    recorder.begin(world, 2, Call("barrier"))
    world.failure = fc.CommTimeoutError("late")
    before = time.time()
    recorder.dump(tmp_path / "file.json")
    content = json.loads((tmp_path / "file.json").read_text())
    assert (content["rank"], content["world_size"], content["complete"]) == (1, 4, True)
    assert content["failure"] == "CommTimeoutError: late"
    assert before <= content["written"] <= time.time()
    first, second, third = content["operations"]
    clock = content["clock"]
    wall = (first["start_ns"] - clock["monotonic_ns"] + clock["wall_ns"]) * 1e-9
    assert abs(wall - before) < 60, "the anchor is of the wall clock"
    shown = {k: first[k] for k in ("op", "sequence", "dtype", "shape", "bytes", "algorithm")}
    assert shown == {
        "op": "all_reduce",
        "sequence": 1,
        "dtype": "float32",
        "shape": [2, 3],
        "bytes": 24,
        "algorithm": "ring",
    }
    assert (first["label"], first["state"], first["error"]) == ("loss", "done", None)
    assert (second["state"], second["error"], second["dtype"]) == (
        "failed",
        "ValueError: bad",
        None,
    )
    assert (third["state"], third["end_ns"]) == ("started", None)
    groups = {item["channel"]: item for item in content["groups"]}
    assert groups[second["channel"]]["ranks"] == [1, 3]
    assert (groups[second["channel"]]["name"], groups[second["channel"]]["entered"]) == ("pair", 2)
    assert groups[first["channel"]]["entered"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"], "nothing else is left"


def test_a_full_ring_says_so(recorder, world, tmp_path):
    for number in range(1, 12):
        finished(recorder, world, number)
    recorder.dump(tmp_path / "file.json")
    assert json.loads((tmp_path / "file.json").read_text())["complete"] is False


def test_saving_never_raises(recorder, world, tmp_path, capsys):
    recorder.save()
    (tmp_path / "file").write_text("in the way")
    recorder.configure(str(tmp_path / "file"))
    recorder.save()
    assert "rank 1 cannot write its trace" in capsys.readouterr().err


def test_polling_does_not_write_every_time(recorder, world, tmp_path):
    recorder.configure(str(tmp_path))
    recorder.save(seldom=True)
    (tmp_path / "rank_1.json").unlink()
    recorder.save(seldom=True)
    assert list(tmp_path.iterdir()) == []
    recorder.save()
    assert [path.name for path in tmp_path.iterdir()] == ["rank_1.json"]


def _reduce(backend, rounds):
    for _ in range(rounds):
        fc.all_reduce(np.ones(3), backend)


def test_the_setting_writes_at_the_end(tmp_path):
    directory = tmp_path / "made" / "here"
    fc.launch(_reduce, world_size=3, args=(5,), trace=str(directory), trace_operations=4)
    assert sorted(p.name for p in directory.iterdir()) == [f"rank_{r}.json" for r in range(3)]
    for path in directory.iterdir():
        sequences = [item["sequence"] for item in _operations(path)]
        assert sequences == [2, 3, 4, 5]
        assert {item["op"] for item in _operations(path)} == {"all_reduce"}


def _fails(backend, ranks):
    ranks[backend.rank] = backend
    fc.all_reduce(np.ones(3), backend)
    if backend.rank == 1:
        while ranks[0].order.begun < 2:
            time.sleep(0.001)
        raise ValueError("no more")
    fc.all_reduce(np.ones(3), backend)


def test_the_setting_writes_at_a_failure(tmp_path):
    with pytest.raises(fc.RankFailedError, match="no more"):
        fc.launch(_fails, world_size=2, args=({},), trace=str(tmp_path))
    failed, victim = (_operations(tmp_path / f"rank_{rank}.json") for rank in (1, 0))
    assert [item["state"] for item in failed] == ["done"]
    assert [item["state"] for item in victim] == ["done", "failed"]
    assert "no more" in victim[1]["error"]


def _on_request(backend, directory):
    fc.all_reduce(np.ones(3), backend)
    return fc.dump_trace(backend.sub([0, 1]), directory)


def test_on_request(tmp_path):
    paths = fc.launch(_on_request, world_size=2, args=(tmp_path / "new",))
    assert paths == [tmp_path / "new" / f"rank_{rank}.json" for rank in range(2)]
    for path in paths:
        (item,) = _operations(path)
        assert (item["op"], item["state"]) == ("all_reduce", "done")


def _cannot_write(backend, path):
    with pytest.raises(fc.ArgumentError, match="cannot write"):
        fc.dump_trace(backend, path)


def test_a_request_that_cannot_be_met(tmp_path):
    (tmp_path / "file").write_text("in the way")
    fc.launch(_cannot_write, args=(tmp_path / "file",))


def test_settings(tmp_path):
    config = resolve({}, {"FSDPCORE_TRACE": "here", "FSDPCORE_TRACE_OPERATIONS": "5"})
    assert (config.trace, config.trace_operations) == ("here", 5)
    assert resolve({}, {}).trace == ""
    with pytest.raises(fc.ConfigError, match="trace_operations must be at least 1"):
        resolve({"trace_operations": 0}, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(fc.ConfigError, match="must be a directory"):
        resolve({"trace": str(tmp_path / "file")}, {})
