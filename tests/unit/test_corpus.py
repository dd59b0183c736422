"""The example's training text and its batches."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import corpus
import numpy as np
import pytest

from fsdpcore.core.errors import ArgumentError, ConfigError


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of 40 files of 30 bytes, each full of its own number."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    for i in range(40):
        (tmp_path / f"m{i:02}.py").write_bytes(bytes([i]) * 30)
    return tmp_path


def test_corpus_is_the_standard_library_and_always_the_same() -> None:
    train, validation = corpus.load()
    again = corpus.load()
    assert train.dtype == validation.dtype == np.uint8
    np.testing.assert_array_equal(train, again[0])
    np.testing.assert_array_equal(validation, again[1])
    assert len(validation) < len(train) / 4
    assert b"import sys" in train.tobytes()
    assert b"import" in validation.tobytes()


def test_corpus_holds_out_whole_files_and_skips_what_it_cannot_read(library: Path) -> None:
    (library / "m39x.py").mkdir()
    (library / "m39y.py").symlink_to(library / "nowhere")
    (library / "m39z.txt").write_bytes(b"no source")
    train, validation = corpus.load()
    assert validation.tobytes() == bytes([4]) * 30 + bytes([24]) * 30
    expected = b"".join(bytes([i]) * 30 for i in range(40) if i not in (4, 24))
    assert train.tobytes() == expected


def test_corpus_cuts_both_parts_in_proportion(library: Path) -> None:
    train, validation = corpus.load(max_bytes=600)
    assert (len(train), len(validation)) == (570, 30)
    assert sum(map(len, corpus.load(max_bytes=10**9))) == 1200
    with pytest.raises(ArgumentError, match="at least 20"):
        corpus.load(max_bytes=19)


def test_corpus_without_sources_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match="has its source files"):
        corpus.load()


def test_batches_are_windows_that_depend_on_seed_and_step_only() -> None:
    data = np.arange(200, dtype=np.uint8)
    x, y = corpus.batch(data, step=3, seed=1, batch_size=5, context=9)
    assert x.shape == y.shape == (5, 9)
    assert x.dtype == y.dtype == np.uint8
    # The text counts upwards, so windows do, and targets are the next numbers.
    np.testing.assert_array_equal(x, x[:, :1] + np.arange(9))
    np.testing.assert_array_equal(y, x + 1)
    np.testing.assert_array_equal(x, corpus.batch(data, step=3, seed=1, batch_size=5, context=9)[0])
    for other in ({"step": 4, "seed": 1}, {"step": 3, "seed": 2}, {"step": 1, "seed": 3}):
        assert not np.array_equal(x, corpus.batch(data, **other, batch_size=5, context=9)[0])


def test_batches_reach_both_ends_of_the_text() -> None:
    data = np.arange(12, dtype=np.uint8)
    x, y = corpus.batch(data, step=0, seed=0, batch_size=200, context=10)
    assert set(x[:, 0]) == {0, 1}
    assert y.max() == 11
    with pytest.raises(ArgumentError, match="load more text"):
        corpus.batch(data, step=0, seed=0, batch_size=1, context=12)
    with pytest.raises(ArgumentError, match="at least 0"):
        corpus.batch(data, step=-1, seed=0, batch_size=1, context=2)
