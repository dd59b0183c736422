"""The passes over a tile of blocks, compiled by numba, which is imported at the first use.

They make the bits that ``Quantiser`` makes with NumPy. The size of a block is a constant of the
compiled code: loops of a fixed length, over two arrays that share no memory, take a third of the
time.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.compiling import Kernel, compiled


@functools.cache
def encode(block: int) -> Kernel:
    """Return the kernel that encodes blocks of a size; all its arrays are contiguous.

    It takes values (blocks, block) of float32; writes scales (blocks,) of float32 and codes
    (blocks, width) of uint8; and takes the signs, whether to rotate, whether integers have 4 bits,
    ``Format.reach``, ``Format.bounds`` and ``ROUNDING``.
    """
    half = block // 2
    twice, odd = divmod(block.bit_length() - 1, 2)

    def kernel(
        values: NDArray[Any],
        scales: NDArray[Any],
        codes: NDArray[Any],
        signs: NDArray[Any],
        rotation: bool,
        four: bool,
        longer: Any,
        shorter: Any,
        low: Any,
        high: Any,
        huge: Any,
        rounding: Any,
    ) -> None:
        found = scales.view(np.int32)
        now, then = np.empty(block, np.float32), np.empty(block, np.float32)
        # As integers, the bits of numbers above zero are in order; those of numbers below zero are
        # behind all of them and in order of their size, if no integer has a sign; nan is the last.
        ints, bits = now.view(np.int32), now.view(np.uint32)
        for j in range(values.shape[0]):
            if rotation:
                # Neighbours are added and subtracted; sums go to the first half, differences to
                # the second. After as many passes as an index has bits, all are in their order.
                for i in range(half):
                    one = values[j, 2 * i] * signs[2 * i]
                    other = values[j, 2 * i + 1] * signs[2 * i + 1]
                    then[i], then[i + half] = one + other, one - other
                for i in range(half):
                    now[i] = then[2 * i] + then[2 * i + 1]
                    now[i + half] = then[2 * i] - then[2 * i + 1]
                for _ in range(twice - 1):
                    for i in range(half):
                        then[i] = now[2 * i] + now[2 * i + 1]
                        then[i + half] = now[2 * i] - now[2 * i + 1]
                    for i in range(half):
                        now[i] = then[2 * i] + then[2 * i + 1]
                        now[i + half] = then[2 * i] - then[2 * i + 1]
                if odd:
                    for i in range(half):
                        then[i] = now[2 * i] + now[2 * i + 1]
                        then[i + half] = now[2 * i] - now[2 * i + 1]
                    for i in range(block):
                        now[i] = then[i]
            else:
                for i in range(block):
                    now[i] = values[j, i]
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
            scales[j] = scale / np.float32(block) if rotation else scale
            factor = np.float32(1) / scale
            for i in range(block):
                now[i] = now[i] * factor + rounding
            if four:
                for i in range(half):
                    codes[j, i] = np.uint8((bits[i] & 15) | ((bits[i + half] & 15) << 4))
            else:
                for i in range(block):
                    codes[j, i] = np.uint8(bits[i] & 255)

    return compiled(kernel)


@functools.cache
def decode(block: int) -> Kernel:
    """Return the kernel that decodes blocks of a size: scales and codes to values, as above."""
    half = block // 2
    twice, odd = divmod(block.bit_length() - 1, 2)

    def kernel(
        scales: NDArray[Any],
        codes: NDArray[Any],
        out: NDArray[Any],
        signs: NDArray[Any],
        rotation: bool,
        four: bool,
    ) -> None:
        now, then = np.empty(block, np.float32), np.empty(block, np.float32)
        for j in range(out.shape[0]):
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
            # As in ``encode``.
            for _ in range(twice):
                for i in range(half):
                    then[i] = now[2 * i] + now[2 * i + 1]
                    then[i + half] = now[2 * i] - now[2 * i + 1]
                for i in range(half):
                    now[i] = then[2 * i] + then[2 * i + 1]
                    now[i + half] = then[2 * i] - then[2 * i + 1]
            if odd:
                for i in range(half):
                    then[i] = now[2 * i] + now[2 * i + 1]
                    then[i + half] = now[2 * i] - now[2 * i + 1]
                for i in range(block):
                    now[i] = then[i]
            for i in range(block):
                out[j, i] = now[i] * signs[i]

    return compiled(kernel)
