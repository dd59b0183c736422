"""A byte-level GPT in plain NumPy, as layers with hand-written backward passes.

A layer never owns its parameters. It computes with the arrays that it is handed by name, which
is all that a sharding engine needs from a model::

    y, saved = layer.forward(params, x)
    dx = layer.backward(params, saved, dy, grads)

``params`` maps names to arrays that may be read-only; ``grads[name]`` is a writable array of the
parameter's shape, which the layer overwrites. No layer changes ``x`` or ``dy``. ``saved`` is
private to the layer and stays valid for one ``backward``. The floating-point type of every
result is that of the parameters.

Architecture and initialisation are those of GPT-2 (Radford et al., 2019): pre-norm blocks, learned
positions, GELU in its tanh form. Shapes: B sequences, T positions, D = width, H = heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fsdpcore.errors import ArgumentError

Array = NDArray[Any]
Params = Mapping[str, Array]
Grads = MutableMapping[str, Array]

BITS_PER_NAT = 1.0 / math.log(2.0)
"""Losses are in nats; a loss in nats per byte times this is in bits per byte."""

_INIT_STD = 0.02
_NORM_EPS = 1e-5


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


def build(config: GPTConfig) -> list[tuple[str, Layer]]:
    """Return the model's layers in the order of the forward pass, each with its name.

    The names are ``embed``, ``block0``, ``block1``, ..., ``head``. The input of the first is an
    integer array (B, T) of byte values with T at most ``config.context``, the output of the last
    the logits (B, T, vocab).
    """
    blocks: list[tuple[str, Layer]] = [(f"block{i}", Block(config)) for i in range(config.layers)]
    return [("embed", Embedding(config)), *blocks, ("head", Head(config))]


class Embedding:
    """Byte plus learned position: (B, T) integers to (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        self._config = config

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return ``byte`` (vocab, D) and ``position`` (context, D)."""
        c = self._config
        return {
            "byte": _normal(rng, (c.vocab, c.width)),
            "position": _normal(rng, (c.context, c.width)),
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
        np.sum(dy, axis=0, out=grads["position"][:length])
        # Rows of equal bytes are brought together and added up run by run, which takes an eighth
        # of the time of np.add.at and has an order that depends on nothing but x.
        flat = x.reshape(-1)
        order = np.argsort(flat, kind="stable")
        ordered = flat[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        rows = dy.reshape(len(flat), -1)[order]
        grads["byte"][ordered[starts]] = np.add.reduceat(rows, starts, axis=0)
        return np.zeros(x.shape, dy.dtype)


class Block:
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``: (B, T, D) to (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        self._config = config
        self._attention = _CausalAttention(config.heads, config.context)

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return the parameters; a matrix is (inputs, outputs).

        The two projections that end in the residual stream start smaller, by one over the square
        root of their number in the model, so that its variance does not grow with the depth.
        """
        width, hidden = self._config.width, self._config.mlp_width
        residual_std = _INIT_STD / math.sqrt(2 * self._config.layers)
        return {
            **_norm_init("norm1", width),
            **_linear_init("qkv", rng, width, 3 * width),
            **_linear_init("proj", rng, width, width, residual_std),
            **_norm_init("norm2", width),
            **_linear_init("up", rng, width, hidden),
            **_linear_init("down", rng, hidden, width, residual_std),
        }

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Run the block on (B, T, D)."""
        batch, length, width = x.shape
        rows = x.reshape(-1, width)

        normed1, norm1 = _norm(params, "norm1", rows)
        qkv = _linear(params, "qkv", normed1).reshape(batch, length, 3, -1)
        mixed, attention = self._attention.forward(qkv)
        middle = _linear(params, "proj", mixed)
        middle += rows

        normed2, norm2 = _norm(params, "norm2", middle)
        before = _linear(params, "up", normed2)
        active, gate = _gelu(before)
        y = _linear(params, "down", active)
        y += middle

        saved = (normed1, norm1, mixed, attention, normed2, norm2, before, active, gate)
        return y.reshape(x.shape), saved

    def backward(self, params: Params, saved: Any, dy: Array, grads: Grads) -> Array:
        """Go through the block backwards; the exact gradients."""
        normed1, norm1, mixed, attention, normed2, norm2, before, active, gate = saved
        drows = dy.reshape(-1, dy.shape[-1])

        dactive = _linear_backward(params, "down", active, drows, grads)
        dbefore = _gelu_backward(before, active, gate, dactive)
        dnormed2 = _linear_backward(params, "up", normed2, dbefore, grads)
        dmiddle = _norm_backward(params, "norm2", norm2, dnormed2, grads)
        dmiddle += drows

        dmixed = _linear_backward(params, "proj", mixed, dmiddle, grads)
        dqkv = self._attention.backward(attention, dmixed)
        dnormed1 = _linear_backward(params, "qkv", normed1, dqkv, grads)
        dx = _norm_backward(params, "norm1", norm1, dnormed1, grads)
        dx += dmiddle
        return dx.reshape(dy.shape)


class Head:
    """The last layer norm and the projection to logits: (B, T, D) to (B, T, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        self._config = config

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return ``norm.gain``, ``norm.bias`` (D,), ``out.w`` (D, vocab) and ``out.b`` (vocab,)."""
        c = self._config
        return {**_norm_init("norm", c.width), **_linear_init("out", rng, c.width, c.vocab)}

    def forward(self, params: Params, x: Array) -> tuple[Array, Any]:
        """Return the logits."""
        normed, norm = _norm(params, "norm", x.reshape(-1, x.shape[-1]))
        logits = _linear(params, "out", normed)
        return logits.reshape(*x.shape[:-1], -1), (normed, norm)

    def backward(self, params: Params, saved: Any, dy: Array, grads: Grads) -> Array:
        """Go back from the gradient of the logits."""
        normed, norm = saved
        dlogits = dy.reshape(-1, dy.shape[-1])
        dnormed = _linear_backward(params, "out", normed, dlogits, grads)
        dx = _norm_backward(params, "norm", norm, dnormed, grads)
        return dx.reshape(*dy.shape[:-1], -1)


class _CausalAttention:
    """Multi-head attention in which position t sees the positions up to t; no parameters."""

    def __init__(self, heads: int, context: int) -> None:
        self._heads = heads
        self._mask = np.triu(np.full((context, context), -np.inf, np.float32), k=1)

    def forward(self, qkv: Array) -> tuple[Array, Any]:
        """Map (B, T, 3, D) to rows (B * T, D). Owns ``qkv`` from here on and scales its queries.

        The softmax is not divided out: ``weights`` are the exponentials, and the division by their
        sum happens on the result, which is H * T / D times smaller.
        """
        batch, length, _, width = qkv.shape
        query, key, value = self._split(qkv)
        query *= 1.0 / math.sqrt(width // self._heads)
        weights = query @ key.swapaxes(-1, -2)
        weights += self._mask[:length, :length]
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        total = weights @ np.ones((length, 1), qkv.dtype)

        mixed = np.empty((batch, length, width), qkv.dtype)
        out = self._heads_first(mixed)
        np.matmul(weights, value, out=out)
        out /= total
        return mixed.reshape(-1, width), (qkv, weights, total, mixed)

    def backward(self, saved: Any, dmixed: Array) -> Array:
        """Map the gradient (B * T, D) of the result to that of qkv, (B * T, 3 * D).

        With p the softmax of the scores and o = p v, the gradient of the scores is
        p * (do v^T - rowsum(do * o)) (Dao et al., 2022, FlashAttention, appendix B.2).
        """
        qkv, weights, total, mixed = saved
        query, key, value = self._split(qkv)
        out = self._heads_first(mixed)
        dout = self._heads_first(dmixed.reshape(mixed.shape)) / total
        dqkv = np.empty_like(qkv)
        dquery, dkey, dvalue = self._split(dqkv)

        np.matmul(weights.swapaxes(-1, -2), dout, out=dvalue)
        dscores = dout @ value.swapaxes(-1, -2)
        dscores -= np.vecdot(dout, out)[..., None]
        dscores *= weights
        np.matmul(dscores, key, out=dquery)
        dquery *= 1.0 / math.sqrt(query.shape[-1])
        np.matmul(dscores.swapaxes(-1, -2), query, out=dkey)
        return dqkv.reshape(len(dmixed), -1)

    def _split(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Return three views (B, H, T, D / H)."""
        query, key, value = (self._heads_first(qkv[:, :, i]) for i in range(3))
        return query, key, value

    def _heads_first(self, x: Array) -> Array:
        """Return (B, T, D) as a view (B, H, T, D / H)."""
        batch, length, width = x.shape
        return x.reshape(batch, length, self._heads, width // self._heads).swapaxes(1, 2)


def cross_entropy(logits: Array, targets: Array) -> tuple[float, Array]:
    """Return the mean loss in nats and its gradient in the logits.

    ``logits`` is (..., vocab) of any floating-point type, ``targets`` (...) of integers. The
    gradient is new, has the type of the logits and is that of the mean over all targets.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    rows = np.arange(len(flat))
    wanted = targets.reshape(-1)
    shifted = flat - flat.max(axis=-1, keepdims=True)
    right = shifted[rows, wanted]
    probability = np.exp(shifted, out=shifted)
    total = probability.sum(axis=-1, keepdims=True)
    loss = float(np.mean(np.log(total[:, 0]) - right, dtype=np.float64))
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

    ``forward`` maps uint8 (1, T), T at most ``context``, to logits (1, T, 256). It is called
    ``length`` times, so ranks that gather parameters in it must all sample, and generators with
    the same seed keep them on the same bytes. Temperature 0 always takes the likeliest byte.

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


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float = _INIT_STD) -> Array:
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= std
    return values


def _norm_init(name: str, width: int) -> dict[str, Array]:
    return {f"{name}.gain": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}


def _linear_init(
    name: str, rng: np.random.Generator, inputs: int, outputs: int, std: float = _INIT_STD
) -> dict[str, Array]:
    weight = _normal(rng, (inputs, outputs), std)
    return {f"{name}.w": weight, f"{name}.b": np.zeros(outputs, np.float32)}


def _linear(params: Params, name: str, x: Array) -> Array:
    """(N, inputs) to (N, outputs)."""
    y: Array = x @ params[f"{name}.w"]
    y += params[f"{name}.b"]
    return y


def _linear_backward(params: Params, name: str, x: Array, dy: Array, grads: Grads) -> Array:
    np.matmul(x.T, dy, out=grads[f"{name}.w"])
    np.sum(dy, axis=0, out=grads[f"{name}.b"])
    dx: Array = dy @ params[f"{name}.w"].T
    return dx


def _row_mean(x: Array) -> Array:
    """Mean of each row of (N, D), as (N, 1); a matrix product is four times as fast as a sum."""
    mean: Array = x @ np.full((x.shape[1], 1), 1.0 / x.shape[1], x.dtype)
    return mean


def _norm(params: Params, name: str, x: Array) -> tuple[Array, tuple[Array, Array]]:
    """Layer norm of each row of (N, D)."""
    unit = x - _row_mean(x)
    scale = 1.0 / np.sqrt(np.vecdot(unit, unit)[:, None] / x.shape[1] + _NORM_EPS)
    unit *= scale
    y = unit * params[f"{name}.gain"]
    y += params[f"{name}.bias"]
    return y, (unit, scale)


def _norm_backward(
    params: Params, name: str, saved: tuple[Array, Array], dy: Array, grads: Grads
) -> Array:
    """Overwrites ``dy``, which only the caller's next line would still hold, and returns dx.

    With u the normalised row and g = dy * gain: dx = scale * (g - mean(g) - u * mean(g * u)).
    """
    unit, scale = saved
    np.einsum("nd,nd->d", dy, unit, out=grads[f"{name}.gain"])
    np.sum(dy, axis=0, out=grads[f"{name}.bias"])
    dy *= params[f"{name}.gain"]
    along = np.vecdot(dy, unit)[:, None] / dy.shape[1]
    dy -= _row_mean(dy)
    dy -= unit * along
    dy *= scale
    return dy


_GELU_LINEAR = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


def _gelu(x: Array) -> tuple[Array, Array]:
    """Return ``x * gate`` and the gate, (1 + tanh(a x + b x^3)) / 2 (Hendrycks, Gimpel, 2016)."""
    gate = x * x
    gate *= _GELU_CUBIC
    gate += _GELU_LINEAR
    gate *= x
    np.tanh(gate, out=gate)
    gate *= 0.5
    gate += 0.5
    return x * gate, gate


def _gelu_backward(x: Array, y: Array, gate: Array, dy: Array) -> Array:
    """Return dy * (gate + y * (1 - gate) * (2 a + 6 b x^2)); the gate's slope needs no tanh."""
    slope = x * x
    slope *= 6.0 * _GELU_CUBIC
    slope += 2.0 * _GELU_LINEAR
    slope *= y
    slope *= 1.0 - gate
    slope += gate
    slope *= dy
    return slope
