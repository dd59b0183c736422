"""``bench/gpu.py`` and ``gpu_all.py`` where there is no GPU: limits, tables, what is laid out."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import fake_cuda
from support.jobs import SOON

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of the bench by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    return lambda name: importlib.import_module(f"gpu_bench.{name}")


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that does all of it, as a module."""
    pytest.importorskip("tomllib", reason="bench/gpu_all.py is for Python 3.11")
    spec = importlib.util.spec_from_file_location("gpu_all", BENCH / "gpu_all.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_all", made)  # where dataclasses look
    spec.loader.exec_module(made)
    return made


def _row(operation: str, size: int, ratio: float, more: float, wrong: int = 0) -> dict[str, Any]:
    one = {"device_us": 10.0, "host_us": 5.0, "algbw_gbs": 1.0, "busbw_gbs": 0.5}
    return {
        "operation": operation,
        "size": size,
        "place": "out",
        "wrong": wrong,
        "contestants": {"fsdpcore": one, "cupy": one},
        "bandwidth_ratio": ratio,
        "host_us_more": more,
    }


def _part(*rows: dict[str, Any]) -> dict[str, Any]:
    made = {"part": "collectives", "ranks": 2, "share_gpu": True, "took_s": 1.0}
    return {**made, "rows": list(rows)}


def _found(targets: list[dict[str, Any]]) -> list[bool | None]:
    return [target["reached"] for target in targets]


def test_targets_count_large_ones_by_bandwidth_and_small_ones_by_time(module: Any) -> None:
    report = module("report")
    good = _part(_row("all_reduce", 8, 0.1, 14.9), _row("all_reduce", 1 << 20, 0.981, 99.0))
    assert _found(report.targets([good])) == [True, True, None, None, True]
    slow = _part(_row("broadcast", 8, 0.1, 15.1), _row("reduce", 1 << 21, 0.979, 0.0, wrong=1))
    targets = report.targets([slow])
    assert _found(targets) == [False, False, None, None, False]
    assert "reduce 2097152 B 0.979" in targets[0]["below"]
    composed = _part(_row("scatter", 8, 0.1, 50.0), _row("all_reduce", 8, 0.1, 1.0))
    assert _found(report.targets([composed])) == [None, True, None, False, True]
    optimizer = {"part": "optimizer", "rows": [{"name": "a", "share_of_copy": 0.79, "target": 1}]}
    assert _found(report.targets([optimizer])) == [False]
    assert _found(report.targets([_part()])) == [None] * 5


def test_tables_have_a_line_for_every_row_and_say_what_failed(module: Any) -> None:
    report = module("report")
    part = {
        **_part(_row("all_reduce", 8, 0.5, 3.0), {"left_out": {"size": 16}}),
        "error": "not done after 3 s",
        "output": "first\nlast",
    }
    text = report.text({"cpu": "x"}, [part], report.targets([part]))
    for words in ("all_reduce            8  out", "FAILED: not done after 3 s", "| last"):
        assert words in text, text
    assert 'left out, for want of time: {"size": 16}' in text
    assert "not measured: at least 98% of bare NCCL's bandwidth from 1 MiB" in text


def test_parts_share_the_time_and_have_ranks_that_share_a_gpu(module: Any) -> None:
    parts = module("parts")
    found = parts.chosen(["collectives", "training"], 2, 1, 100.0)
    assert [(part.name, part.ranks, part.share_gpu) for part in found] == [
        ("collectives", 1, False),
        ("training", 1, False),
        ("collectives", 2, True),
        ("training", 2, True),
    ]
    assert sum(part.seconds for part in found) == pytest.approx(100.0)
    assert "share_gpu" in found[2].transport
    assert not any(part.share_gpu for part in parts.chosen(["collectives"], 2, 2, 10.0))


def test_a_part_that_fails_says_why(module: Any, tmp_path: Path) -> None:
    """Here there is no CuPy or no GPU; with both it would be the measurement itself."""
    parts = module("parts")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"row": {"of": "another part"}}) + "\n")
    result = parts.run(parts.Part("nothing", 1, False, 60.0), rows, quick=True)
    assert result["error"] == "ended with code 1"
    assert "KeyError: 'nothing'" in result["output"]
    assert result["rows"] == []


def test_a_part_that_takes_too_long_is_ended(module: Any, tmp_path: Path) -> None:
    parts = module("parts")
    result = parts.run(parts.Part("training", 1, False, 0.05), tmp_path / "rows", quick=True)
    assert result["error"] == "not done after 0 s"


def test_what_is_laid_out_is_what_a_wheel_installs(everything: Any, tmp_path: Path) -> None:
    everything.lay_out(tmp_path)
    assert (tmp_path / "fsdpcore" / "transports" / "nccl" / "backend.py").exists()
    assert (tmp_path / "fsdpcore" / "collectives" / "costs.toml").exists()
    assert (tmp_path / "tests" / "gpu" / "conftest.py").exists()
    found = [
        point
        for distribution in importlib.metadata.distributions(path=[str(tmp_path)])
        for point in distribution.entry_points
        if point.group == "fsdpcore.transports"
    ]
    assert {point.name for point in found} >= {"sim", "zmq", "mpi", "nccl"}


def test_steps_name_tests_that_exist_and_their_shares_are_all_the_time(everything: Any) -> None:
    for names in everything.TESTS:
        for name in names:
            assert (ROOT / "tests" / "gpu" / f"{name}.py").exists(), name
    named = {name for names in everything.TESTS for name in names}
    there = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert there == named, "a file of tests that nobody runs"
    steps = list(everything.steps(["probes", "tests", "bench"], Path("out"), quick=False))
    assert sum(step.share for step in steps) == pytest.approx(1.0)


def test_without_a_gpu_nothing_is_begun(
    everything: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # where there is one
    monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--out", str(tmp_path / "all")])
    assert everything.main() == 1
    told = capsys.readouterr().out
    assert "there is no usable GPU: transport 'nccl'" in told
    assert "===" not in told, "a step was begun"
    found = _measure(tmp_path / "some")
    assert found.returncode == 1
    (line,) = found.stderr.splitlines()
    assert line.startswith("there is no usable GPU: transport 'nccl'")
    assert not (tmp_path / "some").exists()


def test_where_there_is_a_gpu_nothing_is_in_the_way(module: Any) -> None:
    with fake_cuda.installed(1) as machine:
        assert module("usable").why_not() == ""
        machine.faults.devices = 0
        assert "no GPU can be used" in module("usable").why_not()


def test_who_wants_it_tries_everything_without_a_gpu(
    everything: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = _measure(tmp_path, "--parts", "optimizer", "--seconds", "20", "--without-gpu")
    assert found.returncode == 0, found.stderr
    (part,) = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert part["error"]
    (step,) = everything.steps(["bench"], tmp_path, quick=True, without_gpu=True)
    assert step.command[-2:] == ("--quick", "--without-gpu")


def test_steps_that_there_are_not(
    everything: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for arguments, code in ((["--steps", "probes,nothing"], 2), (["--help"], 0)):
        monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--out", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as ended:
            everything.main()
        assert ended.value.code == code
        told = capsys.readouterr()
        for name in everything.STEPS:
            assert name in told.out + told.err
        assert ("no step 'nothing'" in told.err) == (code == 2)


def _measure(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / "gpu.py"), "--out", str(out), "--ranks", "1", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_a_step_is_ended_with_all_that_it_started(everything: Any, tmp_path: Path) -> None:
    log = everything.Log(tmp_path)
    code = (
        "import subprocess, sys, time; "
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], "
        "start_new_session=True).pid, flush=True); time.sleep(99)"
    )
    step = everything.Step("one", ("-c", code), 1.0)
    environ = everything.environment(tmp_path, tmp_path)
    pids: list[str] = []
    for seconds in (0.7, 10.0, 50.0):  # on a busy machine it takes a while to print
        if not pids:
            assert not everything.perform(step, seconds, environ, tmp_path, log)
            pids = [line for line in log.file.read_text().splitlines() if line.isdecimal()]
    end = time.monotonic() + SOON
    while _runs(int(pids[0])) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _runs(int(pids[0]))
    assert "its time was over" in (tmp_path / "summary.txt").read_text()


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
