"""The bench's tables, read back; the record and the picture."""

from __future__ import annotations

import json

import pytest

from fsdpcore.bench import plot, table
from fsdpcore.bench.cases import Case
from fsdpcore.bench.harness import record
from fsdpcore.bench.harness.memory import MIB, Memory
from fsdpcore.bench.harness.table import microseconds
from fsdpcore.bench.rows import Row, content
from fsdpcore.core.errors import MissingDependencyError


def row(contestant, seconds, operation="all_reduce", count=250_000, wrong=0, in_place=False):
    """A row of 1 MB on four ranks, if not told otherwise; three rounds."""
    op, root = ("sum", -1) if operation == "all_reduce" else ("none", 0)
    case = Case(operation, count, "float32", op, root, 4, in_place)
    samples = [[factor * seconds] * 4 for factor in (1, 0.9, 1.1)]
    # Two processes with two ranks each.
    memory = [Memory(number // 2, 30 * MIB, (8 + number // 2) * MIB) for number in range(4)]
    return Row(contestant, 20, wrong, samples, memory, case=case)


def cells(line):
    return line.lstrip("#").split()


def test_the_columns_of_nccl_tests():
    groups, names, units = table.plain_header(["out", "in"])
    assert all(line.startswith("#") for line in (groups, names, units))
    assert cells(groups) == ["out-of-place", "in-place"]
    place = ["time", "algbw", "busbw", "#wrong"]
    assert cells(names) == ["size", "count", "type", "redop", "root", *place, *place]
    assert cells(units) == ["(B)", "(elements)", *["(us)", "(GB/s)", "(GB/s)"] * 2]


def test_a_line_of_numbers():
    line = table.plain_line([row("fsdpcore", 0.002), row("fsdpcore", 50e-6, wrong=7)])
    # 1 MB in 2 ms is 0.5 GB/s, times 2 * 3/4 for the bus.
    first, second = ["2000", "0.50", "0.75", "0"], ["50.00", "20.00", "30.00", "7"]
    assert cells(line) == ["1000000", "250000", "float32", "sum", "-1", *first, *second]
    names = table.plain_header(["out", "in"])[1]
    assert len(line) == len(names)


def test_what_was_not_measured_or_not_checked():
    line = table.plain_line([row("fsdpcore", 0.002, wrong=None), None])
    assert cells(line)[5:] == ["2000", "0.50", "0.75", "N/A", "N/A", "N/A", "N/A", "N/A"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234e-6, "1.23"), (0.0001234, "123.4"), (0.0123, "12300"), (2.6e-8, "0.03")],
)
def test_microseconds(seconds, text):
    assert microseconds(seconds) == text


def test_contestants_side_by_side():
    names = ["fsdpcore", "gloo", "mpi"]
    place, groups, columns, _ = table.versus_header(names, "out", "mpi")
    assert place == "# out-of-place"
    assert cells(groups) == names
    peer = ["time", "busbw", "ratio", "min", "max"]
    key = ["size", "count", "type", "redop", "root"]
    assert cells(columns) == [*key, "time", "busbw", *peer, *peer, "ours-bare", "overhead", "best"]
    ours, gloo = row("fsdpcore", 1e-3), row("gloo", 4e-3)
    mpi = row("mpi", 1e-3)
    mpi.samples[:] = [[0.5e-3] * 4, [1e-3] * 4, [1e-3] * 4]
    line = table.versus_line({"fsdpcore": ours, "gloo": gloo, "mpi": mpi}, names, "mpi")
    assert len(line) == len(columns)
    assert cells(line)[5:] == [
        *["1000", "1.50"],
        *["4000", "0.38", "4.00", "4.00", "4.00"],
        # Round by round 0.5 of 1, 1 of 0.9 and 1 of 1.1 ms.
        *["1000", "1.50", "0.91", "0.50", "1.11", "+100.00", "+10.0", "+400.00"],
    ]


def test_a_contestant_that_cannot_do_it():
    names = ["fsdpcore", "gloo", "mpi"]
    rows = {"fsdpcore": row("fsdpcore", 1e-3), "gloo": row("gloo", 1e-3)}
    line = table.versus_line(rows, names, "mpi")
    assert cells(line)[-8:] == ["N/A"] * 8
    assert len(line) == len(table.versus_header(names, "out", "mpi")[2])


def test_the_last_lines():
    good = table.footer([row("fsdpcore", 1e-3), row("gloo", 2e-3)])
    assert good == [
        "# Wrong values      : 0 OK",
        "# Avg bus bandwidth : 1.5 GB/s (fsdpcore)",
        "# Avg bus bandwidth : 0.75 GB/s (gloo)",
        "# Memory per rank   : 30.0 MiB at most, 4.2 PSS (fsdpcore)",
        "# Memory per rank   : 30.0 MiB at most, 4.2 PSS (gloo)",
    ]
    bad = table.footer([row("fsdpcore", 1e-3), row("gloo", 2e-3, wrong=5)])
    assert bad[:2] == ["# Wrong values      : 5 FAILED", "#   gloo: 5 in all_reduce"]
    assert "not checked" in table.footer([row("fsdpcore", 1e-3, wrong=None)])[0]


RESULTS = [
    {"fsdpcore": row("fsdpcore", 1e-3), "gloo": row("gloo", 4e-3)},
    {"fsdpcore": row("fsdpcore", 2e-3, count=500_000), "gloo": row("gloo", 4e-3, count=500_000)},
    {"fsdpcore": row("fsdpcore", 1e-3, "broadcast", in_place=True)},
]


def test_a_record_has_what_the_schema_says(tmp_path):
    run, path = record.RunRecord("collectives"), tmp_path / "results.json"
    with pytest.raises(TypeError, match="settings"):
        run.save(path, versions={}, rows=[])
    with pytest.raises(ValueError, match="machine"):
        run.save(path, versions={}, settings={}, machine={})
    assert not path.exists()


def test_the_record(tmp_path):
    record.RunRecord("collectives", ["fsdpcore", "bench"]).save(
        tmp_path / "results.json",
        versions={"fsdpcore": {"numpy": "2.0"}, "gloo": {"torch": "2.13"}},
        settings={"dtype": "float32"},
        **content(RESULTS),
    )
    read = json.loads((tmp_path / "results.json").read_text())
    assert read["schema"] == "fsdpcore.bench.collectives/1"
    assert read["machine"]["cores"] >= 1
    assert [(r["contestant"], r["operation"], r["size"], r["place"]) for r in read["rows"]] == [
        ("fsdpcore", "all_reduce", 1_000_000, "out"),
        ("gloo", "all_reduce", 1_000_000, "out"),
        ("fsdpcore", "all_reduce", 2_000_000, "out"),
        ("gloo", "all_reduce", 2_000_000, "out"),
        ("fsdpcore", "broadcast", 1_000_000, "in"),
    ]
    first = read["rows"][0]
    assert [len(ranks) for ranks in first["samples_us"]] == [4, 4, 4]
    times = {"avg": 1000, "min": 1000, "max": 1000, "best": 900}
    assert first["time_us"] == pytest.approx(times)
    assert (first["algbw_gbs"], first["busbw_gbs"]) == pytest.approx((1.0, 1.5))
    assert first["memory_mib"] == {"peak_rss": 30.0, "pss": 4.25}
    assert [item["peer"] for item in read["comparisons"]] == ["gloo", "gloo"]
    compared = read["comparisons"][0]
    assert compared["ratio"]["median"] == pytest.approx(4.0)
    assert compared["difference_us"]["median"] == pytest.approx(-3000)
    assert compared["best_difference_us"] == pytest.approx(900 - 3600)
    assert compared["overhead_percent"]["median"] == pytest.approx(-75)


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.png"
    labels = {"fsdpcore": "fsdpcore (zmq)", "gloo": "gloo"}
    plot.save_png(path, RESULTS, labels, "4 ranks")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 60_000
    assert int.from_bytes(content[16:20], "big") > 700  # pixels wide


def test_a_picture_of_one_rank_has_no_lines_and_is_drawn_all_the_same(tmp_path):
    pytest.importorskip("matplotlib")
    case = Case("all_reduce", 4, "float32", "sum", -1, 1, in_place=False)
    alone = Row("fsdpcore", 5, 0, [[1e-6]], case=case)
    plot.save_png(tmp_path / "alone.png", [{"fsdpcore": alone}], {"fsdpcore": "ours"}, "1 rank")
    assert (tmp_path / "alone.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(tmp_path, without):
    without("matplotlib")
    with pytest.raises(MissingDependencyError, match=r'pip install "fsdpcore\[bench\]"'):
        plot.save_png(tmp_path / "none.png", RESULTS, {}, "")


@pytest.fixture
def without(monkeypatch):
    """Make a package look as if it were not installed."""
    return lambda name: monkeypatch.setitem(__import__("sys").modules, name, None)
