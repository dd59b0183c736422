"""``fsdpcore bench``: real ranks, small sizes, and what its user is told."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from support.jobs import clean_environ, finished, python
from typer.testing import CliRunner

from fsdpcore import collectives
from fsdpcore.bench.cases import MEASURED
from fsdpcore.comm import registry
from fsdpcore.commands.main import app

QUICK = ["--rounds", 2, "--seconds", 0.001, "--warmup", 1]
TINY = [*QUICK, "-b", 64, "-e", 64]
# Two ranks as threads of this process, as 'fsdpcore run -n 2 --transport sim' would start them.
IN_THREADS = {"FSDPCORE_THREADS": "2", "FSDPCORE_TRANSPORT": "sim"}
ROOT = Path(__file__).parents[2]

HAS_MPI = importlib.util.find_spec("mpi4py") is not None and (
    Path(sys.executable).with_name("mpirun").is_file() or shutil.which("mpirun") is not None
)
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def bench(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)

    def bench(*arguments, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return CliRunner().invoke(app, ["bench", *map(str, arguments)])

    return bench


def lines(result):
    """The lines of numbers, in cells."""
    return [line.split() for line in result.output.splitlines() if not line.startswith("#")]


def only_line(result):
    (line,) = result.output.splitlines()
    assert line.startswith("fsdpcore: ")
    return line


def test_a_small_run(bench):
    result = bench("-n", 2, "--transport", "zmq", *QUICK, "-b", 8, "-e", "4KiB", "-f", 8)
    assert result.exit_code == 0, result.output
    assert [line[:5] for line in lines(result)] == [
        ["8", "2", "float32", "sum", "-1"],
        ["64", "16", "float32", "sum", "-1"],
        ["512", "128", "float32", "sum", "-1"],
        ["4096", "1024", "float32", "sum", "-1"],
    ]
    for line in lines(result):
        (time, *_, wrong), (in_place, *_, also) = line[5:9], line[9:13]
        assert float(time) > 0
        assert float(in_place) > 0
        assert (wrong, also) == ("0", "0")
    assert "transport zmq, 2 ranks" in result.output
    assert "# Wrong values      : 0 OK" in result.output


def test_every_operation_among_ranks_that_a_launcher_started(bench):
    result = bench("all", *TINY, **IN_THREADS)
    assert result.exit_code == 0, result.output
    shown = [line[2:] for line in result.output.splitlines() if line[2:] in MEASURED]
    assert shown == list(MEASURED)
    assert len(lines(result)) == len(MEASURED)
    assert [line[-1] for line in lines(result)] == [*["0"] * 7, "N/A"]


@pytest.mark.parametrize(("what", "dtype"), [("all", "bfloat16"), ("all_reduce", "int8")])
def test_other_dtypes_and_one_place(bench, what, dtype):
    result = bench(what, *TINY, "--dtype", dtype, "--op", "max", "--place", "in", **IN_THREADS)
    assert result.exit_code == 0, result.output
    assert lines(result)
    assert all(line[2] == dtype for line in lines(result))
    assert "out-of-place" not in result.output


def test_a_wrong_result_is_counted_and_fails(bench, monkeypatch):
    right = collectives.all_reduce

    def almost_right(array, backend, *, out, **keywords):
        right(array, backend, out=out, **keywords)
        if backend.rank == 1:
            out[3] += 1

    monkeypatch.setattr(collectives, "all_reduce", almost_right)
    result = bench(*TINY, **IN_THREADS)
    assert result.exit_code == 1
    assert [line[8] for line in lines(result)] == ["1"]
    assert "# Wrong values      : 2 FAILED" in result.output
    assert bench(*TINY, "--no-check", **IN_THREADS).exit_code == 0


def test_a_collective_that_does_nothing_is_all_wrong(bench, monkeypatch):
    monkeypatch.setattr(collectives, "all_gather", lambda *_, **__: None)
    result = bench("all_gather", *TINY, "--place", "out", **IN_THREADS)
    assert result.exit_code == 1
    assert [line[8] for line in lines(result)] == ["32"]  # 16 elements on each of two ranks


def test_an_input_that_does_not_survive_is_wrong(bench, monkeypatch):
    right = collectives.all_reduce

    def greedy(array, backend, **keywords):
        right(array, backend, **keywords)
        array[0] = np.nan

    monkeypatch.setattr(collectives, "all_reduce", greedy)
    assert bench(*TINY, "--place", "out", **IN_THREADS).exit_code == 1


def test_files(bench, tmp_path):
    pytest.importorskip("matplotlib")
    result = bench(*TINY, "--json", "r.json", "--plot", "r.png", **IN_THREADS)
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["settings"]["transport"] == "sim"
    assert {row["place"] for row in content["rows"]} == {"in", "out"}
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["allreduce"], "did you mean 'all_reduce'"),
        (["-b", "eight"], "'eight' is no size"),
        (["-b", "16", "-e", "8"], "smaller than the first"),
        (["-f", "1"], "at least 2"),
        (["--dtype", "float23"], "did you mean 'float32'"),
        (["--op", "summ"], "did you mean 'sum'"),
        (["--root", "2"], "root 2 is not a rank of 2"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--place", "here"], "--place must be one of both, out, in"),
        (["all_to_all", "--place", "in"], "all_to_all cannot be measured in place"),
        (["--memory", "gpu"], "--memory must be one of"),
        (["--against", "glooo"], "did you mean 'gloo'"),
        (["--json", "none/r.json"], "there is no directory none"),
        (["--json", "."], "cannot write .: it is a directory"),
        (["--transport", "zqm"], "did you mean 'zmq'"),
    ],
)
def test_what_is_wrong_is_one_line(bench, options, words):
    result = bench("-n", 2, *options)
    assert result.exit_code == 2
    assert words in only_line(result)


def test_the_number_of_ranks_has_to_be_known(bench):
    assert "how many ranks?" in only_line(bench())
    result = bench("-n", 3, **IN_THREADS)
    assert "-n 3 contradicts the launcher, which started 2 ranks" in only_line(result)


def test_an_algorithm_that_does_not_exist(bench):
    result = bench("-n", 2, "--transport", "sim", *TINY, "--algorithm", "magic")
    assert result.exit_code == 2
    assert "no algorithm 'magic'" in result.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("peer", "package", "words"),
    [
        ("gloo", "torch", "pip install torch --index-url"),
        ("mpi", "mpi4py", 'pip install "fsdpcore[mpi]"'),
    ],
)
def test_a_peer_that_is_not_installed(bench, monkeypatch, peer, package, words):
    monkeypatch.setitem(sys.modules, package, None)
    result = bench("-n", 2, *TINY, "--against", peer)
    assert result.exit_code == 2
    assert words in only_line(result)


def test_a_picture_cannot_be_drawn(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = bench("-n", 2, *TINY, "--plot", "r.png")
    assert result.exit_code == 2
    assert 'pip install "fsdpcore[bench]"' in only_line(result)


def test_peers_start_processes_of_their_own(bench):
    result = bench(*TINY, "--against", "gloo", **IN_THREADS)
    assert result.exit_code == 2
    assert "leave the launcher out" in only_line(result)


def compared(bench, *arguments):
    result = bench("all", "-n", 2, *TINY, *arguments)
    assert result.exit_code == 0, result.output
    assert "# Wrong values      : 0 OK" in result.output
    assert len(lines(result)) == 2 * len(MEASURED) - 1
    for line in lines(result):
        assert all(float(number) > 0 for number in (line[5], line[7], line[9]))
    return result


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_beside_gloo(bench):
    compared(bench, "--transport", "sim", "--against", "gloo")


@pytest.mark.tools
@pytest.mark.skipif(
    not HAS_MPI or "mpi" not in registry.schemes(), reason="needs mpi4py, mpirun, the transport"
)
def test_beside_mpi_and_a_bare_loop_in_our_own_processes(bench):
    result = compared(bench, "--transport", "mpi", "--against", "mpi")
    assert "ours-bare" in result.output


def test_the_script_of_a_checkout():
    script = ROOT / "bench" / "collectives.py"
    done = finished(python(script, "-n", 1, "--transport", "sim", *TINY))
    assert done.code == 0, done.err
    assert "# Wrong values      : 0 OK" in done.out
