"""What ranks tell ``fsdpcore run`` about why they fail, and what is a consequence of what."""

from __future__ import annotations

import os

from fsdpcore.core.errors import PeerFailedError, RankFailedError, in_one_line
from fsdpcore.launch.failure_report import (
    VARIABLE,
    FailureReport,
    FailureReports,
    is_consequence,
    report,
)


def test_the_last_report_of_each_rank_arrives_in_order():
    with FailureReports() as reports:
        environ = {VARIABLE: reports.value}
        report(2, ValueError("first"), environ)
        report(1, PeerFailedError("rank 2 failed", 2), environ)
        report(2, KeyError("again"), environ)
        assert list(reports.read().values()) == [
            FailureReport(1, "PeerFailedError: rank 2 failed", True),
            FailureReport(2, "KeyError: 'again'", False),
        ]
        assert reports.read() == {}


def test_a_long_error_is_cut_to_one_short_line():
    with FailureReports() as reports:
        report(0, ValueError("a" * 10_000 + "\nsecond line"), {VARIABLE: reports.value})
        (told,) = reports.read().values()
        assert told.error.startswith("ValueError: aaa")
        assert len(told.error) <= 600
        assert "second" not in told.error


def test_a_long_error_ends_with_a_whole_word():
    for before in range(20):
        with FailureReports() as reports:
            report(0, ValueError("b" * before + " again" * 200), {VARIABLE: reports.value})
            (told,) = reports.read().values()
        assert told.error.endswith(" again ...")
        assert 590 < len(told.error) <= 600


def test_an_error_with_advice_is_told_whole():
    words = "no GPU can be used " + "(why) " * 50 + "install the driver"
    with FailureReports() as reports:
        report(0, RuntimeError(words), {VARIABLE: reports.value})
        (told,) = reports.read().values()
    assert told.error == f"RuntimeError: {words}"


def test_an_error_in_any_writing_fits_the_pipe():
    for letter in ("\N{GRINNING FACE}", "\u00e9", '"', "\udc80"):
        with FailureReports() as reports:
            report(0, ValueError(letter * 3000), {VARIABLE: reports.value})
            (told,) = reports.read().values()
        assert told.error.startswith(f"ValueError: {letter}")
        assert told.error.endswith(" ...")


def test_a_full_pipe_holds_nobody_up():
    with FailureReports() as reports:
        for _ in range(2000):
            report(0, ValueError("x" * 200), {VARIABLE: reports.value})
        assert set(reports.read()) == {0}


def test_what_is_not_the_pipe_is_left_alone(tmp_path):
    """A process that a rank has started has the variable, and other files in that place."""
    path = tmp_path / "data"
    with path.open("wb") as file, FailureReports() as reports:
        _, _, inode = reports.value.partition(":")
        for value in ("", "x", "99999:1", f"{file.fileno()}:{inode}", f"{reports.fd}:1"):
            report(0, ValueError("lost"), {VARIABLE: value})
        report(0, ValueError("lost"), {})
        assert reports.read() == {}
    assert path.read_bytes() == b""


def test_what_else_is_written_to_the_pipe_is_ignored():
    with FailureReports() as reports:
        os.write(reports.fd, b'nonsense\n[1]\n{"a": 1}\n')
        report(3, ValueError("told"), {VARIABLE: reports.value})
        assert list(reports.read()) == [3]


def raised(error, cause=None, context=None):
    error.__cause__, error.__context__ = cause, context
    return error


def test_consequences():
    peer = PeerFailedError("rank 1 failed", 1)
    assert is_consequence(peer)
    assert is_consequence(raised(ValueError("on the way out"), context=peer))
    assert is_consequence(raised(ValueError(), cause=raised(KeyError(), cause=peer)))
    assert not is_consequence(ValueError("my own"))
    assert not is_consequence(raised(RankFailedError("rank 0 failed", 0), cause=peer))
    circle = ValueError("round and round")
    circle.__cause__ = raised(KeyError(), cause=circle)
    assert not is_consequence(circle)


def test_descriptions_are_one_line():
    assert in_one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert in_one_line(ValueError("late:\n  rank 2 is missing\n  rank 3 is missing")) == (
        "ValueError: late: rank 2 is missing; rank 3 is missing"
    )
    assert in_one_line(ValueError("why:\nthis\nand more")) == "ValueError: why: this"
    assert in_one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
