"""What ranks print, line by line."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from fsdpcore.core.errors import ConfigError
from fsdpcore.launch.config import resolve
from fsdpcore.launch.output import LoggedOutput, OutputPipes, PrefixedOutput
from fsdpcore.launch.run.scripts import JobShare, run_share


def lines_of(*pieces):
    """What a handler is called with, for pieces written one after the other."""
    seen = []
    with OutputPipes() as pipes, pipes.ending_in(seen.append) as (end,):
        for piece in pieces:
            os.write(end, piece)
    return seen


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\n\n", b"c"], [b"ab", b"", b"c"]),
        ([b"a\r\nb\r\n"], [b"a", b"b"]),
        ([b"\r 1%", b"\r 2%", b"\r 3%\n"], [b" 1%", b" 2%", b" 3%"]),
        ([b"\xff\x00\n"], [b"\xff\x00"]),
        ([], []),
    ],
)
def test_lines_are_what_was_written(pieces, lines):
    assert lines_of(*pieces) == lines


def test_a_line_without_an_end_does_not_fill_the_memory():
    assert b"".join(found := lines_of(*[b"x" * 50_000] * 5)) == b"x" * 250_000
    assert len(found) > 1


@pytest.mark.parametrize("then", ["sleep 100", "yes"])
def test_a_process_that_holds_its_output_open_keeps_nobody(capfdbinary, then):
    with OutputPipes() as pipes:
        output = PrefixedOutput()
        with pipes.ending_in(lambda line: output.write(7, False, line)) as (end,):
            process = subprocess.Popen(then.split(), stdout=end)
            os.write(end, b"said\n")
            os.write(end, b"last words")
        time.sleep(0.2)
    process.kill()
    process.wait()
    out = capfdbinary.readouterr().out
    assert b"[7] said\n" in out
    assert (b"[7] last words\n" in out) or then == "yes", "which speaks in between"


def test_where_lines_cannot_be_written_they_are_read_all_the_same(caplog):
    def refuse(line):
        raise RuntimeError("no such stream")

    with OutputPipes() as pipes, pipes.ending_in(refuse) as (end,):
        for _ in range(100):  # more than a pipe holds
            os.write(end, b"line\n" * 1000)
    assert [record.message for record in caplog.records] == [
        "what ranks print is lost from here on: RuntimeError: no such stream"
    ]


def test_whoever_prints_where_nobody_reads_is_told():
    def refuse(line):
        raise BrokenPipeError

    with (
        OutputPipes() as pipes,
        pipes.ending_in(refuse) as (end,),
        pytest.raises(BrokenPipeError),
    ):
        for _ in range(1000):
            os.write(end, b"line\n" * 1000)


def test_lines_come_when_they_are_printed():
    """Not when the rank ends, though Python would keep what it prints into a pipe."""
    heard = []

    class Output(PrefixedOutput):
        def write(self, rank, error, line):
            heard.append((time.monotonic(), rank, line))

    program = [sys.executable, "-S", "-c", "import time; print('said'); time.sleep(0.8)"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    config = resolve({"transport": "zmq"}, {})
    ends = run_share(program, config, environ, JobShare(1, 1), Output())
    (moment, *said), ended = *heard, time.monotonic()
    assert ends.first is None
    assert said == [0, b"said"]
    assert ended - moment > 0.4


def test_the_traceback_of_the_culprit_is_last(capfd):
    output = PrefixedOutput(lambda rank: f"host:{rank}")
    for rank in (0, 1, 2):
        output.write(rank, True, b"rank %d failed:" % rank)
        output.write(rank, True, b"  Traceback of %d" % rank)
    output.write(3, True, b"rank 3: stopped")
    output.write(1, False, b"out")
    output.finish(1)
    out, err = capfd.readouterr()
    assert out == "[host:1] out\n"
    assert err == "[host:3] rank 3: stopped\n" + "".join(
        f"[host:{rank}] rank {rank} failed:\n[host:{rank}]   Traceback of {rank}\n"
        for rank in (0, 2, 1)
    )


def test_a_file_for_each_rank(tmp_path, capfd):
    output = LoggedOutput(tmp_path / "new" / "logs")
    output.write(0, False, b"fine")
    for line in (b"a warning", b"rank 3 failed:", b"ValueError"):
        output.write(3, True, line)
    output.finish(3)
    assert capfd.readouterr() == ("", "rank 3 failed:\nValueError\n")
    logs = {path.name: path.read_text() for path in (tmp_path / "new" / "logs").iterdir()}
    assert logs == {
        "rank_0.log": "fine\n",
        "rank_3.log": "a warning\nrank 3 failed:\nValueError\n",
    }


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--log-dir"):
        LoggedOutput(tmp_path / "file" / "logs")
