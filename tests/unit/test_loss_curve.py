"""The example's picture of a training run."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import loss_curve
import numpy as np
import pytest

from fsdpcore.core.errors import ArgumentError, MissingDependencyError


def size(path: Path) -> tuple[int, int]:
    """Width and height as a PNG's first chunk has them."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    return int(width), int(height)


@pytest.mark.parametrize("points", [[], [(0, 9.1), (60, 4.0), (120, 3.2)]])
def test_a_curve_is_a_png_of_the_promised_size(
    tmp_path: Path, points: list[tuple[int, float]]
) -> None:
    losses = [3 + 5 / (1 + step / 10) for step in range(120)]
    loss_curve.save_png(tmp_path / "loss.png", losses, points, "A run")
    assert size(tmp_path / "loss.png") == (1600, 900)
    loss_curve.save_png(tmp_path / "again.png", losses, points, "Another run")
    assert (tmp_path / "again.png").read_bytes() != (tmp_path / "loss.png").read_bytes()


def test_one_step_is_enough(tmp_path: Path) -> None:
    loss_curve.save_png(tmp_path / "loss.png", [8.3], [(0, 8.3)], "One step")
    assert size(tmp_path / "loss.png") == (1600, 900)


def test_smoothing_keeps_a_straight_line_and_evens_out_noise() -> None:
    line = np.linspace(8, 2, 400)
    np.testing.assert_allclose(loss_curve._smoothed(line), line, rtol=1e-12)
    noise = np.random.default_rng(0).standard_normal(400)
    assert loss_curve._smoothed(line + noise)[20:-20] == pytest.approx(line[20:-20], abs=1.0)
    assert loss_curve._smoothed(noise)[20:-20].std() < 0.4


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one step"):
        loss_curve.save_png(tmp_path / "loss.png", [], [], "Nothing")


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "fsdpcore\[examples\]"'):
        loss_curve.save_png(tmp_path / "loss.png", [8.0], [], "No matplotlib")
