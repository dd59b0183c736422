"""A byte-level GPT in plain NumPy or CuPy, as layers with hand-written backward passes.

A layer never owns its parameters. It computes with the arrays that it is handed by name, which
is all that a sharding engine needs from a model::

    y, saved = layer.forward(params, x)
    dx = layer.backward(params, saved, dy, grads)

``params`` maps names to arrays that may be read-only; ``grads[name]`` is a writable array of zeros
in the parameter's shape, into which the layer writes. No layer changes ``x`` or ``dy``. ``saved``
is private to the layer, holds no parameter and is good for one ``backward``. The floating-point
type of every result is that of the parameters, which may be 16 bits (see gpt_ops.py); ``dy`` may
have more. All arrays are of the module that the layers were built with, ``numpy`` or ``cupy``;
only initial values are always NumPy's.

The architecture is that of GPT-2 (Radford et al., 2019): pre-norm blocks, learned positions, GELU
in its tanh form. So is the initialisation (normal; what ends in the residual stream scaled down by
the depth), but for the standard deviation: GPT-2's 0.02 is made for widths around a thousand, while
a model of width 100 that starts so small spends most of a short run on a plateau. One over the
square root of the inputs suits every width. Shapes: B sequences, T positions, D = width.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gpt_arrays import Array, column_sum, narrow, sum_by_index, wide
from gpt_ops import (
    CausalAttention,
    Grads,
    Params,
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    layer_norm_init,
    linear,
    linear_backward,
    linear_init,
    normal,
)

from fsdpcore.core.errors import ArgumentError

BITS_PER_NAT = 1.0 / math.log(2.0)
"""Losses are in nats; a loss in nats per byte times this is in bits per byte."""


class Layer(Protocol):
    """What every layer here offers; the first two methods are what a training engine calls."""

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the output and whatever ``backward`` needs."""
        ...

    def backward(self, params: Params, saved: Any, dy: Array, grads: Grads) -> Array:
        """Write the gradient of every parameter into ``grads`` and return that of ``x``."""
        ...

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return new float32 parameters, in an order that never changes."""
        ...


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model; ``hidden`` is the width of the MLP and defaults to ``4 * width``.

    Raises:
        ArgumentError: a size is below one, or ``width`` is no multiple of ``heads``.
    """

    vocab: int = 256
    context: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 4
    hidden: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab", "context", "width", "heads", "layers", "hidden"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ArgumentError(f"GPTConfig.{name} is {size}; it must be at least 1")
        if self.width % self.heads:
            raise ArgumentError(
                f"GPTConfig.width {self.width} does not split into {self.heads} heads; "
                "choose a width that is a multiple of heads"
            )

    @property
    def mlp_width(self) -> int:
        """``hidden``, or its default."""
        return 4 * self.width if self.hidden is None else self.hidden


def build(config: GPTConfig, xp: Any = np) -> list[tuple[str, Layer]]:
    """Return the model's layers in the order of the forward pass, each with its name.

    They compute with arrays of the module ``xp``: ``engine.xp``, or ``numpy``, or ``cupy``.

    The names are ``embed``, ``block0``, ``block1``, ..., ``head``. The input of the first is an
    integer array (B, T) of byte values with T at most ``config.context``, the output of the last
    the logits (B, T, vocab).
    """
    blocks: list[tuple[str, Layer]] = [
        (f"block{i}", Block(config, xp)) for i in range(config.layers)
    ]
    return [("embed", Embedding(config, xp)), *blocks, ("head", Head(config, xp))]


class Embedding:
    """Byte plus learned position: (B, T) integers to (B, T, D)."""

    def __init__(self, config: GPTConfig, xp: Any = np) -> None:
        self._config = config
        self._xp = xp

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return ``byte`` (vocab, D) and ``position`` (context, D)."""
        c = self._config
        std = 1.0 / math.sqrt(c.width)
        return {
            "byte": normal(rng, (c.vocab, c.width), std),
            "position": normal(rng, (c.context, c.width), std),
        }

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Look up. Raises ``ArgumentError`` for a sequence that is longer than the context."""
        length = x.shape[1]
        if length > self._config.context:
            raise ArgumentError(
                f"a sequence of {length} bytes exceeds the context of {self._config.context}; "
                "cut it, or build the model with a longer context"
            )
        y = params["byte"][x]
        y += params["position"][:length]
        return y, x

    def backward(self, params: Params, saved: Any, dy: Array, grads: Grads) -> Array:
        """Write both gradients; that of the bytes, which are no variables, is zero."""
        x: Array = saved
        length = x.shape[1]
        column_sum(self._xp, dy, out=grads["position"][:length])
        flat = x.reshape(-1)
        sum_by_index(self._xp, flat, dy.reshape(len(flat), -1), out=grads["byte"])
        dx: Array = self._xp.zeros(x.shape, dy.dtype)
        return dx


class Block:
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``: (B, T, D) to (B, T, D)."""

    def __init__(self, config: GPTConfig, xp: Any = np) -> None:
        self._config = config
        self._xp = xp
        self._attention = CausalAttention(config.heads, config.context, xp)

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return the parameters; a matrix is (inputs, outputs).

        The two projections that end in the residual stream start smaller, by one over the square
        root of their number in the model, so that its variance does not grow with the depth.
        """
        width, hidden = self._config.width, self._config.mlp_width
        residual = 1.0 / math.sqrt(2 * self._config.layers)
        return {
            **layer_norm_init("norm1", width),
            **linear_init("qkv", rng, width, 3 * width),
            **linear_init("proj", rng, width, width, residual),
            **layer_norm_init("norm2", width),
            **linear_init("up", rng, width, hidden),
            **linear_init("down", rng, hidden, width, residual),
        }

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Run the block on (B, T, D)."""
        xp = self._xp
        batch, length, width = x.shape
        rows = x.reshape(-1, width)

        normed1, norm1 = layer_norm(xp, params, "norm1", rows)
        qkv = linear(xp, params, "qkv", normed1).reshape(batch, length, 3, -1)
        mixed, attention = self._attention.forward(qkv)
        middle = linear(xp, params, "proj", mixed)
        middle += rows

        normed2, norm2 = layer_norm(xp, params, "norm2", middle)
        before = linear(xp, params, "up", normed2)
        active, gate = gelu(xp, before)
        y = linear(xp, params, "down", active)
        y += middle

        saved = (normed1, norm1, mixed, attention, normed2, norm2, before, active, gate)
        return y.reshape(x.shape), saved

    def backward(self, params: Params, saved: Any, dy: Array, grads: Grads) -> Array:
        """Go through the block backwards; the exact gradients."""
        xp = self._xp
        normed1, norm1, mixed, attention, normed2, norm2, before, active, gate = saved
        drows = dy.reshape(-1, dy.shape[-1])

        dactive = linear_backward(xp, params, "down", active, drows, grads)
        dbefore = gelu_backward(before, active, gate, dactive)
        dnormed2 = linear_backward(xp, params, "up", normed2, dbefore, grads)
        dmiddle = layer_norm_backward(xp, params, "norm2", norm2, dnormed2, grads)
        dmiddle += drows

        dmixed = linear_backward(xp, params, "proj", mixed, dmiddle, grads)
        dqkv = self._attention.backward(attention, dmixed)
        dnormed1 = linear_backward(xp, params, "qkv", normed1, dqkv, grads)
        dx = layer_norm_backward(xp, params, "norm1", norm1, dnormed1, grads)
        dx += dmiddle
        return dx.reshape(dy.shape)


class Head:
    """The last layer norm and the projection to logits: (B, T, D) to (B, T, vocab)."""

    def __init__(self, config: GPTConfig, xp: Any = np) -> None:
        self._config = config
        self._xp = xp

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return ``norm.gain``, ``norm.bias`` (D,), ``out.w`` (D, vocab) and ``out.b`` (vocab,)."""
        c = self._config
        return {**layer_norm_init("norm", c.width), **linear_init("out", rng, c.width, c.vocab)}

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the logits."""
        xp = self._xp
        normed, norm = layer_norm(xp, params, "norm", x.reshape(-1, x.shape[-1]))
        logits = linear(xp, params, "out", normed)
        return logits.reshape(*x.shape[:-1], -1), (normed, norm)

    def backward(self, params: Params, saved: Any, dy: Array, grads: Grads) -> Array:
        """Go back from the gradient of the logits."""
        xp = self._xp
        normed, norm = saved
        dlogits = narrow(dy.reshape(-1, dy.shape[-1]), normed.dtype)
        dnormed = linear_backward(xp, params, "out", normed, dlogits, grads)
        dx = layer_norm_backward(xp, params, "norm", norm, dnormed, grads)
        return dx.reshape(*dy.shape[:-1], -1)


def keep_freed_memory() -> bool:
    """Ask the C library to keep what NumPy frees, instead of handing it back to the system.

    A training step frees and allocates the same large arrays over and over. The GNU C library
    returns them to the kernel in between, and every page is then cleared and mapped anew, which was
    measured to take 30 percent of a step of this model. It is a setting of the whole process, so
    a program makes it, never a library. Returns whether the C library took it; others than GNU's
    do not know it.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # the M_* names of mallopt(3)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # 32 MiB is the largest mmap threshold that is accepted. Threads other than the first have
    # heaps of 64 MiB, and only a padding of that size keeps those.
    settings = ((trim_threshold, 2**31 - 1), (mmap_threshold, 2**25), (top_pad, 2**26))
    return all(mallopt(name, value) == 1 for name, value in settings)


def cross_entropy(logits: Array, targets: Array, xp: Any = np) -> tuple[Any, Array]:
    """Return the mean loss in nats and its gradient in the logits.

    ``logits`` is (..., vocab) of any floating-point type, ``targets`` (...) of integers. The loss
    is a scalar of ``xp`` in float64: on a GPU ``float(loss)`` waits for it. The gradient is new,
    that of the mean over all targets, and has the type of the logits; but float32 for 16 bits,
    where it is too small before it is multiplied by the scale of the loss.
    """
    flat = wide(logits.reshape(-1, logits.shape[-1]))
    rows = xp.arange(len(flat))
    wanted = targets.reshape(-1)
    shifted = flat - flat.max(axis=-1, keepdims=True)
    right = shifted[rows, wanted]
    probability = xp.exp(shifted, out=shifted)
    total = probability.sum(axis=-1, keepdims=True)
    loss = xp.mean(xp.log(total[:, 0]) - right, dtype=np.float64)
    probability /= total * len(flat)
    probability[rows, wanted] -= 1.0 / len(flat)
    return loss, probability.reshape(logits.shape)


def sample(
    forward: Callable[[Array], Array],
    prompt: bytes,
    length: int,
    context: int,
    rng: np.random.Generator,
    temperature: float = 1.0,
) -> bytes:
    """Return ``length`` bytes that continue ``prompt`` (which is not repeated in the result).

    ``forward`` maps uint8 (1, T), T at most ``context``, to logits (1, T, 256), both of them NumPy
    arrays wherever it computes. It is called ``length`` times, so ranks that gather parameters in
    it must all sample, and generators with the same seed keep them on the same bytes. Temperature 0
    always takes the likeliest byte.

    Raises:
        ArgumentError: the prompt is empty or the temperature negative.
    """
    if not prompt:
        raise ArgumentError("the prompt is empty; give at least one byte to continue")
    if temperature < 0:
        raise ArgumentError(f"the temperature is {temperature}; it must not be negative")
    text = bytearray(prompt)
    for _ in range(length):
        window = np.frombuffer(bytes(text[-context:]), np.uint8)
        logits = forward(window[None])[0, -1].astype(np.float64)
        if temperature > 0:
            # The largest of the logits plus Gumbel noise is a draw from their softmax.
            logits = logits / temperature + rng.gumbel(size=logits.shape)
        text.append(int(logits.argmax()))
    return bytes(text[len(prompt) :])
