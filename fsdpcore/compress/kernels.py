"""The passes over a tile of blocks, compiled by numba, which is imported at the first use.

They make the bits that ``Quantiser`` makes with NumPy.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.compiling import Kernel, compiled

TILE = 31 * 256
"""Elements of a tile, which stays in the first-level cache."""


@functools.cache
def encode() -> Kernel:
    """Return the kernel that encodes; its arguments are those of ``_encode``."""
    return compiled(_encode)


@functools.cache
def decode() -> Kernel:
    """Return the kernel that decodes; its arguments are those of ``_decode``."""
    return compiled(_decode)


def _encode(
    values: NDArray[Any],
    scales: NDArray[Any],
    codes: NDArray[Any],
    work: NDArray[Any],
    signs: NDArray[Any],
    rotation: bool,
    four: bool,
    top: Any,
    low: Any,
    high: Any,
    size: Any,
) -> None:
    # The loops over columns are what the compiler vectorises: each column of work is a block.
    count, block = values.shape
    for i in range(block):
        sign = signs[i] if rotation else signs[i] * signs[i]
        for j in range(count):
            work[i, j] = values[j, i] * sign
    if rotation:
        height = 1
        while height < block:
            for first in range(0, block, 2 * height):
                for i in range(first, first + height):
                    for j in range(count):
                        one = work[i, j]
                        other = work[i + height, j]
                        work[i, j] = one + other
                        work[i + height, j] = one - other
            height *= 2
    for j in range(count):
        scales[j] = 0
    for i in range(block):
        for j in range(count):
            value = abs(work[i, j])
            # What is nan stays: nothing is larger, and a nan is taken in any case.
            if value > scales[j] or value != value:
                scales[j] = value
    largest = scales.copy()
    for j in range(count):
        scales[j] = min(max(largest[j] / top, low), high)
        if not np.isfinite(largest[j]):
            scales[j] = 1
            for i in range(block):
                work[i, j] = 1
    half = block // 2
    for i in range(half if four else block):
        for j in range(count):
            code = np.int32(np.rint(work[i, j] / scales[j]))
            if four:
                upper = np.int32(np.rint(work[i + half, j] / scales[j]))
                code = (code & 15) | (upper << 4)
            codes[j, i] = np.uint8(code & 255)
    for j in range(count):
        if not np.isfinite(largest[j]):
            scales[j] = np.inf if largest[j] > 0 else np.nan
        elif rotation:
            scales[j] = scales[j] / size


def _decode(
    scales: NDArray[Any],
    codes: NDArray[Any],
    out: NDArray[Any],
    work: NDArray[Any],
    signs: NDArray[Any],
    rotation: bool,
    four: bool,
) -> None:
    count, block = out.shape
    half = block // 2
    for i in range(half if four else block):
        for j in range(count):
            code = np.int32(codes[j, i])
            if four:
                work[i, j] = np.float32(((code & 15) ^ 8) - 8) * scales[j]
                work[i + half, j] = np.float32(((code >> 4) ^ 8) - 8) * scales[j]
            else:
                work[i, j] = np.float32((code ^ 128) - 128) * scales[j]
    if rotation:
        height = 1
        while height < block:
            for first in range(0, block, 2 * height):
                for i in range(first, first + height):
                    for j in range(count):
                        one = work[i, j]
                        other = work[i + height, j]
                        work[i, j] = one + other
                        work[i + height, j] = one - other
            height *= 2
    for i in range(block):
        sign = signs[i] if rotation else signs[i] * signs[i]
        for j in range(count):
            out[j, i] = work[i, j] * sign
