"""``GpuQuantiser``: what ``Quantiser`` does, of arrays of a GPU, in one kernel each way.

A thread has a block, and does with it what ``quantiser.py`` says, in the same order, so that the
bits are those of NumPy, but for what kernels take for zero (``core/gpu_kernel.py``). What a thread
reads does not lie beside what its neighbours read, so memory is not read as fast as it could be;
links that need compression are slower by far.
"""

from __future__ import annotations

import functools
import string
from typing import Any

from fsdpcore.compress.quantiser import ROUNDING, Bytes, Floats, Format
from fsdpcore.core.gpu_kernel import KernelSource

TILE = 1 << 20
"""Elements that are worked on at once, at most: so much scratch memory has whoever adds up."""

_COMMON = string.Template(
    """
static const int BLOCK = $block, WIDTH = $width, ROTATED = $rotation, FOUR_BITS = $four;
static inline __device__ void rotate(float *now) {
  for (int height = 1; height < BLOCK; height *= 2)
    for (int at = 0; at < BLOCK; ++at)
      if (!(at & height)) {
        const float one = now[at], other = now[at + height];
        now[at] = one + other;
        now[at + height] = one - other;
      }
}
"""
)

_ENCODE = """
const long long first = (long long)i * BLOCK;
float now[BLOCK];
for (int at = 0; at < BLOCK; ++at) {
  now[at] = first + at < n ? values[first + at] : 0.0f;
  if (ROTATED) now[at] *= signs[at];
}
if (ROTATED) rotate(now);
float above = now[0], below = -now[0];
bool found_nan = false;
for (int at = 0; at < BLOCK; ++at) {
  found_nan |= now[at] != now[at];
  above = now[at] > above ? now[at] : above;
  below = -now[at] > below ? -now[at] : below;
}
const float most = above > below ? above : below, least = above > below ? below : above;
float scale = most / longer;
if (least / shorter > scale) scale = least / shorter;
if (low > scale) scale = low;
if (scale > high) scale = huge;
if (above > below) scale = -scale;
const bool found_inf = most - most != 0.0f, broken = found_nan || found_inf;
const float factor = 1.0f / scale;
unsigned char *out = &codes[(long long)i * WIDTH];
for (int at = 0; at < WIDTH; ++at) {
  const int low_bits = broken ? 1 : __float_as_int(now[at] * factor + rounding);
  if (FOUR_BITS) {
    const int high_bits = broken ? 1 : __float_as_int(now[at + WIDTH] * factor + rounding);
    out[at] = (unsigned char)((low_bits & 15) | (high_bits & 15) << 4);
  } else out[at] = (unsigned char)(low_bits & 255);
}
if (broken) scales[i] = __int_as_float(found_nan ? 0x7fc00000 : 0x7f800000);
else scales[i] = ROTATED ? scale / (float)BLOCK : scale;
"""

_DECODE = """
const long long first = (long long)i * BLOCK;
const float scale = scales[i];
const unsigned char *in = &codes[(long long)i * WIDTH];
float now[BLOCK];
for (int at = 0; at < WIDTH; ++at) {
  const int code = in[at];
  if (FOUR_BITS) {
    now[at] = (float)(((code & 15) ^ 8) - 8) * scale;
    now[at + WIDTH] = (float)(((code >> 4) ^ 8) - 8) * scale;
  } else now[at] = (float)((code ^ 128) - 128) * scale;
}
if (ROTATED) rotate(now);
for (int at = 0; at < BLOCK && first + at < n; ++at)
  values[first + at] = ROTATED ? now[at] * signs[at] : now[at];
"""


class GpuQuantiser:
    """Encodes and decodes; see ``Quantiser``. Enqueues on the current stream, and does not wait.

    Args:
        cupy: the module.
        form: how values travel.
    """

    tile = TILE

    def __init__(self, cupy: Any, form: Format) -> None:
        self.form = form
        self._encoding, self._decoding = _kernels(cupy, form)
        self._signs = cupy.asarray(form.signs)
        self._numbers = (*form.reach, *form.bounds, ROUNDING)

    def encode(self, values: Floats, packed: Bytes, start: int = 0) -> None:
        """Write values ``[start, start + values.size)``; see ``Quantiser.encode``."""
        scales, codes, count = self._parts(packed, start, values.size)
        if count:
            self._encoding(
                *(values, self._signs, *self._numbers, values.size, scales, codes), size=count
            )

    def decode(self, packed: Bytes, out: Floats, start: int = 0) -> None:
        """Write values ``[start, start + out.size)`` of those encoded; see ``Quantiser.decode``."""
        scales, codes, count = self._parts(packed, start, out.size)
        if count:
            self._decoding(scales, codes, self._signs, out.size, out, size=count)

    def _parts(self, packed: Bytes, start: int, size: int) -> tuple[Floats, Bytes, int]:
        """Return the scales of some values, their integers, and of how many blocks they are."""
        form = self.form
        first, count = start // form.block, form.blocks(size)
        scales, codes = form.parts(packed)
        here = slice(first, first + count)
        return scales[here], codes[here].reshape(-1), count


def encode_source(form: Format) -> KernelSource:
    """Return the kernel that encodes blocks."""
    numbers = ("longer", "shorter", "low", "high", "huge", "rounding")
    return KernelSource(
        in_params=", ".join(
            [
                "raw float32 values, raw float32 signs",
                *(f"float32 {name}" for name in numbers),
                "int64 n",
            ]
        ),
        out_params="raw float32 scales, raw uint8 codes",
        operation=_ENCODE,
        name=f"encode_{_name(form)}",
        preamble=_preamble(form),
    )


def decode_source(form: Format) -> KernelSource:
    """Return the kernel that decodes blocks."""
    return KernelSource(
        in_params="raw float32 scales, raw uint8 codes, raw float32 signs, int64 n",
        out_params="raw float32 values",
        operation=_DECODE,
        name=f"decode_{_name(form)}",
        preamble=_preamble(form),
    )


def _name(form: Format) -> str:
    return f"{form.bits}_bits_by_{form.block}{'_rotated' if form.rotation else ''}"


def _preamble(form: Format) -> str:
    return _COMMON.substitute(
        block=form.block, width=form.width, rotation=int(form.rotation), four=int(form.bits == 4)
    )


@functools.cache
def _kernels(cupy: Any, form: Format) -> tuple[Any, Any]:
    return encode_source(form).compiled(cupy), decode_source(form).compiled(cupy)
