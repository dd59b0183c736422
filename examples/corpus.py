"""A training text that every machine already has: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.errors import ArgumentError, ConfigError

# Every twentieth file of the sorted list, from the fifth on, is held out.
_HOLD_OUT_EVERY = 20
_HOLD_OUT_FIRST = 4


def load(max_bytes: int | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return training and validation text as two uint8 arrays, the same on every call.

    The text is that of the top-level ``*.py`` files of the running interpreter's standard library,
    sorted by name. Whole files are held out, 5 percent of them, spread over the alphabet.
    Interpreters of different versions have different texts. ``max_bytes`` limits both parts
    together; each is cut at its end in proportion.

    Raises:
        ArgumentError: ``max_bytes`` is too small for both parts to have a byte.
        ConfigError: this interpreter comes without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    texts = _read_sources(folder)
    if len(texts) < 2:
        raise ConfigError(
            f"found {len(texts)} readable *.py files in {folder}, but the training text is made of "
            "this interpreter's standard library; run with a Python that has its source files"
        )
    held_out = range(min(_HOLD_OUT_FIRST, len(texts) - 1), len(texts), _HOLD_OUT_EVERY)
    train = b"".join(text for i, text in enumerate(texts) if i not in held_out)
    validation = b"".join(texts[i] for i in held_out)
    if max_bytes is not None:
        train, validation = _cut(train, validation, max_bytes)
    return np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8)


def batch(
    data: NDArray[Any], *, step: int, seed: int, batch_size: int, context: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return inputs and targets, both uint8 (batch_size, context), from random places in ``data``.

    A target is the byte after its input. The places follow from ``seed`` and ``step`` alone: every
    rank draws the same global batch and takes its own rows.

    Raises:
        ArgumentError: ``data`` is no longer than ``context``, or a number is negative.
    """
    if min(step, seed) < 0 or min(batch_size, context) < 1:
        raise ArgumentError(
            f"step {step} and seed {seed} must be at least 0, batch_size {batch_size} and "
            f"context {context} at least 1"
        )
    if len(data) <= context:
        raise ArgumentError(
            f"the text has {len(data)} bytes, a context of {context} needs at least "
            f"{context + 1}; load more text or use a shorter context"
        )
    rng = np.random.default_rng([seed, step])
    starts = rng.integers(len(data) - context, size=batch_size)
    windows = data[starts[:, None] + np.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def _read_sources(folder: Path) -> list[bytes]:
    texts = []
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        try:
            text = path.read_bytes()
        except OSError:
            continue  # a broken link or a file of another user; the rest is text enough
        if text:
            texts.append(text)
    return texts


def _cut(train: bytes, validation: bytes, max_bytes: int) -> tuple[bytes, bytes]:
    total = len(train) + len(validation)
    if max_bytes >= total:
        return train, validation
    for_validation = max_bytes * len(validation) // total
    if for_validation < 1:
        raise ArgumentError(
            f"max_bytes {max_bytes} leaves no byte for validation; allow at least "
            f"{-(-total // len(validation))}"
        )
    return train[: max_bytes - for_validation], validation[:for_validation]
