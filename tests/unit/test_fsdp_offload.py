"""Offloading changes where arrays are, and nothing else: no bit, no state, no file left behind."""

from __future__ import annotations

import collections
import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.mappings import unnamed

import fsdpcore as fc
from fsdpcore.fsdp.offload import mapped_file, stores
from fsdpcore.fsdp.offload.arrays import GRADIENTS, UPDATED, ArrayKind
from fsdpcore.fsdp.offload.mapped_file import PAGE, FileSpan, MappedFile, joined
from fsdpcore.fsdp.step.shards import in_turn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are mapped on Linux")

TESTS = Path(__file__).parents[1]
STRATEGIES = {
    "full_shard": fc.Strategy("full_shard"),
    "keep": fc.Strategy("full_shard", reshard_after_forward=False),
    "regather": fc.Strategy("full_shard", reshard_after_forward=2),
    "shard_grad_op": fc.Strategy("shard_grad_op"),
    "shard_optimizer": fc.Strategy("shard_optimizer"),
    "hybrid_shard": fc.Strategy("hybrid_shard", shard_group_size=2),
    "no_shard": fc.Strategy("no_shard"),
}
PRECISIONS = {"float32": None, "mixed": fc.Precision("bfloat16", "float32")}
GROUPS = {"*.b": fc.optim.SGD(lr=0.1, momentum=0.9), "*.w": fc.optim.AdamW(lr=0.01)}
FACTORED = {
    "*.b": fc.optim.AdamW(lr=0.01, amsgrad=True),
    "u2.w": fc.optim.Muon(lr=0.01),
    "*": fc.optim.Adafactor(),
}


@pytest.fixture
def disk(tmp_path):
    """A directory on a disk."""
    if not mapped_file.in_memory(str(tmp_path)):
        yield str(tmp_path)
        return
    with tempfile.TemporaryDirectory(dir=TESTS) as directory:
        if mapped_file.in_memory(directory):
            pytest.skip("no directory on a disk")
        yield directory


def run(body, world_size=4, args=(), **options):
    return fc.launch(body, world_size=world_size, transport="sim", timeout=30, args=args, **options)


def model():
    rng = np.random.default_rng(3)
    units = []
    for number, rows in enumerate((40, 1, 67)):
        params = {
            "w": rng.normal(size=(rows, 31)).astype(np.float32),
            "b": rng.normal(size=(31,)).astype(np.float32),
            "table": rng.normal(size=(17,)).astype(np.float16),
        }
        units.append(fc.Unit(f"u{number}", params, frozen="table"))
    return [*units, fc.Unit("tied", {"w": fc.Tied("u0", "w"), "b": np.ones(31, np.float32)})]


def one_step(engine, own, *, halved=False, **update):
    with engine.step() as step:
        for last in (False, True):
            for unit in engine.units:
                with step.forward(unit):
                    pass
            for unit in reversed(engine.units):
                with step.backward(unit) as (params, grads):
                    for name in ("w", "b"):
                        noise = own.normal(size=params[name].shape).astype(params[name].dtype)
                        grads[name] = params[name] * noise
            if halved and last:
                step.clip_grad_norm(0.5)
                with step.gradients(write=True) as found:
                    for array in found.values():
                        for piece in array.pieces:
                            piece.array[:] /= 2
                with step.gradients(full=True):
                    pass
            if last:
                step.update(**update)


def trained(backend, optimizer, options):
    """Everything that an engine knows after some steps, and a load in between."""
    engine = fc.FSDP(model(), backend, optimizer=optimizer, window=False, **options)
    own = np.random.default_rng(backend.rank)
    one_step(engine, own, clip=0.5)
    one_step(engine, own, clip_value=0.1)
    engine.units[2].load({"b": np.arange(31, dtype=np.float32)})
    one_step(engine, own, halved=True)
    one_step(engine, own)
    state = engine.state_dict(full=True)
    return {name: array.tobytes() for name, array in state.items()}


def compare(disk, optimizer, offloads, **options):
    plain = run(trained, args=(optimizer, options))
    for offload in offloads:
        changed = run(trained, args=(optimizer, {**options, "offload": offload}))
        assert changed == plain
    assert os.listdir(disk) == []


MIXED = ["keep", "shard_grad_op", "no_shard"]
# Where parameters alone are in files too; the others keep them as one of these does.
PARAMETERS = [("full_shard", "float32"), ("shard_optimizer", "float32"), ("no_shard", "mixed")]
COMMON = [(name, "mixed" if name in MIXED else "float32") for name in STRATEGIES]
RARE = [(name, "float32" if name in MIXED else "mixed") for name in STRATEGIES]


@pytest.mark.campaign
@pytest.mark.parametrize(("strategy", "precision"), RARE)
def test_not_a_bit_changes_in_the_other_precision(disk, strategy, precision):
    test_not_a_bit_changes(disk, strategy, precision)


@pytest.mark.parametrize(("strategy", "precision"), COMMON)
def test_not_a_bit_changes(disk, strategy, precision):
    parameters = [fc.Offload(disk)] if (strategy, precision) in PARAMETERS else []
    compare(
        disk,
        GROUPS,
        [*parameters, fc.Offload(disk, "all")],
        strategy=STRATEGIES[strategy],
        precision=PRECISIONS[precision],
    )


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
def test_not_a_bit_changes_with_an_optimizer_of_whole_parameters(disk, strategy):
    compare(disk, FACTORED, [fc.Offload(disk, "all")], strategy=STRATEGIES[strategy])


def test_not_a_bit_changes_whatever_is_loaded_when(disk):
    offloads = [
        fc.Offload(disk, "all", ahead=0),
        fc.Offload(disk, "all", ahead=9),
        fc.Offload(disk, "all", evict=False),
        fc.Offload(Path(disk), "all"),
    ]
    compare(disk, GROUPS, offloads, prefetch=2)


def test_not_a_bit_changes_on_a_system_that_knows_less(disk, monkeypatch):
    """No populating, no clearing of ranges, and no files that never had a name."""
    unknown = 9999  # advice that no system knows
    monkeypatch.setattr(mapped_file, "_MADV_POPULATE_READ", unknown)
    monkeypatch.setattr(mapped_file, "_MADV_POPULATE_WRITE", unknown)
    monkeypatch.setattr(mapped_file, "_FALLOC_ZERO_RANGE", 1 << 30)
    opened = os.open

    def without_tmpfile(path, flags, *args, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return opened(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", without_tmpfile)
    compare(disk, GROUPS, [fc.Offload(disk, "all")])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", [GROUPS, FACTORED, None], ids=["groups", "factored", "none"])
def test_the_file_has_room_for_all_there_is_and_no_more(disk, strategy, optimizer):
    def body(backend):
        options = {"strategy": STRATEGIES[strategy], "precision": PRECISIONS["mixed"]}
        engine = fc.FSDP(
            model(), backend, optimizer=optimizer, offload=fc.Offload(disk, "all"), **options
        )
        for unit in engine.units:
            if unit.trainable:
                unit.reduce_gradients({})
        held = engine.held()
        arrays = [
            array
            for unit in engine._model.units
            for kind in ArrayKind
            for array in (span for span in unit.store._spans[kind] if kind is not ArrayKind.OWN)
        ]
        assert sum(span.nbytes for span in arrays) == engine.offload_stats.held
        left = [
            span
            for unit in engine._model.units
            for free in unit.store._free.values()
            for span in free
        ]
        assert sum(span.nbytes for span in left) == 0
        held_bytes = held.parameters + held.gradients + held.optimizer
        assert held_bytes <= engine.offload_stats.held < held_bytes + PAGE * (len(arrays) + 1)

    run(body)


@pytest.mark.parametrize("passes", [1, 2])
def test_what_is_moved_is_counted(disk, monkeypatch, passes):
    """16 pages of each array: parameters, gradients, and two of the optimizer."""
    elements, pages = 2 * 16 * PAGE // 4, 16 * PAGE
    to_write = []  # bytes that were loaded to be written; else each page would stop the writer
    forgotten = collections.Counter()  # by each rank
    load, discard = mapped_file.MappedFile.load, mapped_file.MappedFile.discard

    def noted(file, span, *, write):
        to_write.append(span.nbytes if write else 0)
        load(file, span, write=write)

    def discarded(file, span):
        forgotten[threading.get_ident()] += span.nbytes
        return discard(file, span)

    monkeypatch.setattr(mapped_file.MappedFile, "load", noted)
    monkeypatch.setattr(mapped_file.MappedFile, "discard", discarded)

    def body(backend):
        units = [fc.Unit(f"u{i}", {"w": np.ones(elements, np.float32)}) for i in range(3)]
        engine = fc.FSDP(
            units, backend, optimizer=fc.optim.AdamW(), prefetch=0, offload=fc.Offload(disk, "all")
        )
        assert not engine.windowed
        with engine.step() as step:
            for _ in range(passes):
                for unit in engine.units:
                    with step.forward(unit):
                        pass
                for unit in reversed(engine.units):
                    with step.backward(unit) as (_, grads):
                        grads["w"] = np.ones(elements, np.float32)
            step.update(clip=1.0)
            # Gradients, before the end of the step: they are not written to the disk.
            assert forgotten[threading.get_ident()] == 3 * pages
        stats = engine.offload_stats
        assert stats.held == 3 * 4 * pages
        # Parameters in each pass, gradients where others are added, and for the norm, for the
        # update everything.
        assert stats.used == 3 * (2 * passes + passes - 1 + 1 + 4) * pages
        assert stats.written == 3 * (passes + 3) * pages
        assert 0 <= stats.ready <= stats.used
        assert stats.read <= stats.used
        assert stats.waited > 0
        assert stats.flushed > 0
        # After a step no array is left in memory, but for what the system may hold on to.
        file = engine._model.units[0].store._files.file
        assert file.resident(FileSpan(0, file.nbytes)) < pages

    run(body, 2)
    # Of both ranks: gradients to which others are added, parameters and the optimizer's state.
    assert sum(to_write) == 2 * 3 * (passes - 1 + 3) * pages


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_units_in_turn_are_announced_so_far_ahead(depth):
    announced = []

    def unit(number):
        store = SimpleNamespace(depth=depth, ahead=lambda kinds: announced.append((number, kinds)))
        return SimpleNamespace(number=number, store=store)

    seen = {}
    for each in in_turn(map(unit, range(4)), UPDATED, GRADIENTS):
        seen[each.number] = list(announced)
        announced.clear()
    assert seen == {
        number: [
            (ahead, kinds)
            for ahead in range(number, min(number + depth, 3) + 1)
            for kinds in (UPDATED, GRADIENTS)
        ]
        for number in range(4)
    }


def test_what_a_gathering_renews_is_written(disk):
    """Every rank has all parameters, 32 pages, and updates a half of them."""
    elements, pages = 2 * 16 * PAGE // 4, 16 * PAGE

    def body(backend):
        engine = fc.FSDP(
            [fc.Unit("u", {"w": np.ones(elements, np.float32)})],
            backend,
            strategy="shard_optimizer",
            optimizer=fc.optim.SGD(lr=0.1),
            offload=fc.Offload(disk, "parameters"),
        )
        (unit,) = engine.units
        for _ in range(2):
            with engine.step() as step:
                with step.forward(unit):
                    pass
                with step.backward(unit) as (_, grads):
                    grads["w"] = np.ones(elements, np.float32)
                step.update()
            # What is gathered, and in the update its own half.
            assert engine.offload_stats.written == (2 + 1) * pages

    run(body, world_size=2)


def test_without_offload_nothing_is_counted():
    def body(backend):
        engine = fc.FSDP(model(), backend)
        assert engine.offload_stats == type(engine.offload_stats)()

    run(body, 1)


def test_the_file_ends_with_the_engine(disk):
    def body(backend):
        engine = fc.FSDP(model(), backend, offload=fc.Offload(disk))
        assert len(unnamed(disk)) == 1
        shard = engine.units[0].shard
        before = shard.copy()
        del engine
        gc.collect()
        np.testing.assert_array_equal(shard, before)  # an array keeps the memory that it is on

    run(body, 1)
    gc.collect()
    assert unnamed(disk) == {}


# Errors.


def refused(offload, units=model, world_size=2):
    """Return the message with which all ranks refuse it."""

    def body(backend):
        with pytest.raises(fc.ConfigError) as caught:
            fc.FSDP(units(), backend, optimizer=fc.optim.AdamW(), offload=offload)
        return str(caught.value)

    messages = run(body, world_size)
    assert len(set(messages)) == 1
    gc.collect()
    return messages[0]


def test_a_directory_that_is_not_there(disk):
    message = refused(fc.Offload(f"{disk}/nowhere"))
    assert "rank 0" in message
    assert f"'{disk}/nowhere'" in message
    assert "No such file or directory" in message
    assert "bytes)" in message


def test_a_directory_that_is_a_file(disk):
    Path(disk, "file").touch()
    assert "Not a directory" in refused(fc.Offload(f"{disk}/file"))


def test_a_directory_where_no_file_can_be_made():
    assert "cannot be used" in refused(fc.Offload("/proc/self"))


def test_a_directory_in_memory(disk, monkeypatch):
    assert mapped_file.in_memory("/proc") == ""
    monkeypatch.setattr(stores, "in_memory", lambda directory: "tmpfs")
    assert "file system in memory" in refused(fc.Offload(disk))


def test_file_systems_in_memory_are_known(tmp_path, monkeypatch):
    device = os.stat(tmp_path).st_dev
    here = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "1 2 0:9999 / /elsewhere rw - ext4 /dev/a rw\n"
        f"3 4 {here} / /tmp rw,nosuid shared:2 - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(mapped_file, "_MOUNTS", mounts)
    assert mapped_file.in_memory(str(tmp_path)) == "tmpfs"


def test_a_model_that_is_larger_than_the_disk(disk):
    def petabytes():
        return [fc.Unit("u", {"w": fc.Spec((1 << 50,), np.float32)})]

    message = refused(fc.Offload(disk), petabytes)
    assert f"({(1 << 50) * 4 // 2} bytes)" in message
    assert "free, which is too little" in message
    assert os.listdir(disk) == []


def test_a_disk_that_is_full_on_one_rank(disk, monkeypatch):
    reserve = os.posix_fallocate
    reserved = []

    def full_the_second_time(*args):
        reserved.append(args)
        if len(reserved) == 2:
            raise OSError(errno.ENOSPC, "full")
        reserve(*args)

    monkeypatch.setattr(os, "posix_fallocate", full_the_second_time)
    assert "No space left on device" in refused(fc.Offload(disk))
    assert unnamed(disk) == {}


def test_no_directory():
    assert "needs a directory" in refused(fc.Offload())


def test_ranks_that_want_different_things(disk):
    def body(backend):
        offload = fc.Offload(disk) if backend.rank else None
        with pytest.raises(fc.MismatchError):
            fc.FSDP(model(), backend, offload=offload)

    run(body, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"directory": ""},
        {"directory": b"/tmp"},
        {"directory": 3},
        {"directory": "/tmp", "what": "gradients"},
        {"directory": "/tmp", "ahead": -1},
        {"directory": "/tmp", "ahead": 1.5},
        {"directory": "/tmp", "evict": "yes"},
    ],
)
def test_options_that_make_no_sense(options):
    with pytest.raises(fc.ConfigError):
        fc.Offload(**options)


class Hoarding(fc.optim.Adafactor):
    """Makes more state than it declares."""

    def init_pieces(self, specs, dtype):
        states = super().init_pieces(specs, dtype)
        for spec in specs:
            states[spec.name]["more"] = np.zeros(spec.size, dtype)
        return states

    def update_pieces(self, pieces, **options):
        declared = []
        for piece in pieces:
            state = dict(piece.state)
            state.pop("more")[:] += 1
            declared.append(replace(piece, state=state))
        super().update_pieces(declared, **options)


@pytest.mark.parametrize("window", [True, False])
def test_state_that_was_not_declared_is_measured_and_not_planned(window):
    def body(backend):
        options = {"backend": backend, "window": window}
        plain = fc.FSDP(model(), optimizer=fc.optim.Adafactor(), **options)
        engine = fc.FSDP(model(), optimizer=Hoarding(), **options)
        one_step(engine, np.random.default_rng(backend.rank))
        more = 4 * sum(unit.valid_size for unit in engine.units)
        assert engine.held().optimizer == plain.held().optimizer + more
        assert engine.plan().persistent == plain.plan().persistent
        report = engine.report()
        assert report.measured.peak_bytes == report.plan.peak_bytes + more
        return more

    assert sum(run(body)) > 0


def test_state_that_was_not_declared_has_no_room_in_a_file(disk):
    def body(backend):
        offload = fc.Offload(disk, what="all")
        with pytest.raises(fc.ArgumentError) as error:
            fc.FSDP(model(), backend, optimizer=Hoarding(), offload=offload)
        return str(error.value)

    (text,) = run(body, world_size=1)
    declared = 4 * (40 + 31 + 31)  # rows and columns of u0.w, and u0.b
    made = declared + 4 * (40 * 31 + 31)
    assert f"unit 'u0': the optimizer's state takes {made} bytes" in text
    assert f"has {declared} for it" in text
    assert "state_shapes of Hoarding" in text


# The file.


def test_spans_are_joined():
    spans = [FileSpan(8, 12), FileSpan(0, 4), FileSpan(4, 6), FileSpan(20, 20), FileSpan(9, 10)]
    assert joined(spans) == [FileSpan(0, 6), FileSpan(8, 12)]
    assert joined([]) == []


def test_pages_come_and_go_and_keep_what_they_hold(disk):
    file = MappedFile(disk, 8 * PAGE)
    array = file.array(2 * PAGE, PAGE, np.dtype(np.float32))
    span = file.span(array)
    assert span == FileSpan(2 * PAGE, 6 * PAGE)
    assert not array.any()
    array[:] = np.arange(PAGE)
    assert file.resident(span) == span.nbytes
    for _ in range(3):
        file.release(span)
        assert sum(unnamed(disk).values()) <= 4 * PAGE  # what is beside it may have come along
        file.write(span)
        file.evict(span)
        file.ahead(span)
        file.load(span, write=True)
        assert file.resident(span) == span.nbytes
        np.testing.assert_array_equal(array, np.arange(PAGE))
    if file.discard(span):
        assert not array.any()


# Processes.

BIG = 5 << 20  # elements: 20 MiB of parameters, as many of gradients, twice as many of state

PROGRAM = """
import os, sys
import numpy as np
import fsdpcore as fc

def memory(what):
    for line in open("/proc/self/status"):
        if line.startswith(what):
            return int(line.split()[1]) * 1024

def main(backend, directory, elements):
    units = [fc.Unit(f"u{i}", {"w": fc.Spec((elements // 16,))}) for i in range(16)]
    offload = fc.Offload(directory, "all") if directory else None
    before = memory("VmRSS")
    engine = fc.FSDP(
        units, backend, optimizer=fc.optim.AdamW(), strategy="full_shard", window=False,
        offload=offload,
    )
    for _ in range(2):
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit):
                    pass
            for unit in reversed(engine.units):
                with step.backward(unit) as (params, grads):
                    grads["w"] = np.ones_like(params["w"])
            step.update(clip=1.0)
    print(memory("VmRSS") - before, memory("VmHWM") - before, engine.offload_stats.held, flush=True)
    if sys.argv[2] == "wait":
        sys.stdin.read()
    if sys.argv[2] == "fork":
        child = os.fork()
        if child == 0:
            same = all((unit.shard == unit.shard[0]).all() for unit in engine.units)
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
        with engine.units[0].writing() as shard:
            shard[:] = 7
        engine.units[0].unshard()
        assert (engine.units[0].params["w"] == 7).all()

if __name__ == "__main__":
    fc.launch(main, world_size=1, transport="sim", args=(sys.argv[1], int(sys.argv[3])))
"""


def program(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def measured(directory):
    with program(directory, "end", BIG) as process:
        rss, peak, held = map(int, process.stdout.read().split())
    assert process.returncode == 0
    return rss, peak, held


def test_the_memory_of_the_process_falls_by_what_is_offloaded(disk):
    rss, peak, none = measured("")
    off_rss, off_peak, held = measured(disk)
    assert none == 0
    assert held == 4 * 4 * BIG
    slack = 16 << 20
    assert rss - off_rss > held - slack
    # Never is more than a unit of it in the process, and the one that comes next.
    assert peak - off_peak > held - 2 * held // 16 - slack


def test_no_file_is_left_by_a_process_that_is_killed(disk):
    with program(disk, "wait", 1 << 16, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline()
        assert len(unnamed(disk, process.pid)) == 1
        assert os.listdir(disk) == []
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert os.listdir(disk) == []
    assert unnamed(disk, process.pid) == {}


def test_a_forked_process_sees_the_arrays_and_disturbs_nothing(disk):
    with program(disk, "fork", 1 << 16) as process:
        assert process.stdout.readline()
    assert process.returncode == 0
