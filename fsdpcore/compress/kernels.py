"""The passes over a tile of blocks, compiled by numba, which is imported at the first use.

They make the bits that ``Quantiser`` makes with NumPy.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.compiling import Kernel, compiled


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
    longer: Any,
    shorter: Any,
    low: Any,
    high: Any,
    huge: Any,
    size: Any,
    rounding: Any,
) -> None:
    count, block = values.shape
    half = block // 2
    found = scales.view(np.int32)
    now, then = work[0], work[1]
    for j in range(count):
        if rotation:
            for i in range(block):
                now[i] = values[j, i] * signs[i]
            # Neighbours are added and subtracted; sums go to the first half, differences to the
            # second. After as many passes as an index has bits, all are back in their order.
            width = block
            while width > 1:
                for i in range(half):
                    then[i] = now[2 * i] + now[2 * i + 1]
                    then[i + half] = now[2 * i] - now[2 * i + 1]
                now, then = then, now
                width //= 2
        else:
            for i in range(block):
                now[i] = values[j, i]
        # As integers, the bits of numbers above zero are in order; those of numbers below zero are
        # behind all of them and in order of their size, if no integer has a sign; nan is the last.
        ints, bits = now.view(np.int32), now.view(np.uint32)
        over, under = np.int32(0), np.uint32(0x80000000)
        for i in range(block):
            over = max(over, ints[i])
            under = max(under, bits[i])
        below = np.int32(under & np.uint32(0x7FFFFFFF))
        largest = max(over, below)
        if largest >= np.int32(0x7F800000):
            scales[j] = np.inf if largest == np.int32(0x7F800000) else np.nan
            codes[j, :] = 17 if four else 1
            continue
        found[j] = largest
        scale = scales[j] / longer
        found[j] = min(over, below)
        scale = max(max(scale, scales[j] / shorter), low)
        if scale > high:
            scale = huge
        if over > below:
            scale = -scale
        scales[j] = scale / size if rotation else scale
        factor = np.float32(1) / scale
        for i in range(block):
            now[i] = now[i] * factor + rounding
        if four:
            for i in range(half):
                codes[j, i] = np.uint8((bits[i] & 15) | ((bits[i + half] & 15) << 4))
        else:
            for i in range(block):
                codes[j, i] = np.uint8(bits[i] & 255)


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
    now, then = work[0], work[1]
    for j in range(count):
        scale = scales[j]
        if four:
            for i in range(half):
                code = np.int32(codes[j, i])
                now[i] = np.float32(((code & 15) ^ 8) - 8) * scale
                now[i + half] = np.float32(((code >> 4) ^ 8) - 8) * scale
        else:
            for i in range(block):
                now[i] = np.float32((np.int32(codes[j, i]) ^ 128) - 128) * scale
        if not rotation:
            for i in range(block):
                out[j, i] = now[i]
            continue
        width = block
        while width > 1:
            for i in range(half):
                then[i] = now[2 * i] + now[2 * i + 1]
                then[i + half] = now[2 * i] - now[2 * i + 1]
            now, then = then, now
            width //= 2
        for i in range(block):
            out[j, i] = now[i] * signs[i]
