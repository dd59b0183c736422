"""What the layers of a transformer compute, unsharded: formulas for autograd to differentiate.

Parameters are by name, in the whole shapes of the parallel layers.
"""

from __future__ import annotations

import autograd
import autograd.numpy as anp


def layer_norm(params, name, x, eps=1e-5):
    centred = x - anp.mean(x, axis=-1, keepdims=True)
    variance = anp.mean(centred**2, axis=-1, keepdims=True)
    return centred / anp.sqrt(variance + eps) * params[f"{name}.gain"] + params[f"{name}.bias"]


def attention(params, x, *, causal=True, prefix=""):
    projected = anp.einsum("btw,wjhd->jbhtd", x, params[f"{prefix}qkv.w"])
    query, key, value = projected + params[f"{prefix}qkv.b"][:, None, :, None, :]
    scores = anp.einsum("bhtd,bhsd->bhts", query, key) / anp.sqrt(query.shape[-1])
    if causal:
        positions = anp.arange(x.shape[1])
        scores = anp.where(positions[:, None] >= positions, scores, -1e300)
    weights = anp.exp(scores - anp.max(scores, axis=-1, keepdims=True))
    weights = weights / anp.sum(weights, axis=-1, keepdims=True)
    mixed = anp.einsum("bhts,bhsd->bthd", weights, value)
    return anp.einsum("bthd,hdw->btw", mixed, params[f"{prefix}proj.w"]) + params[f"{prefix}proj.b"]


FUNCTIONS = {
    "gelu": lambda x: 0.5 * x * (1 + anp.tanh(anp.sqrt(2 / anp.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: anp.maximum(x, 0.0),
    "silu": lambda x: x / (1 + anp.exp(-x)),
}


def mlp(params, x, *, activation="gelu", prefix=""):
    hidden = anp.dot(x, params[f"{prefix}up.w"]) + params[f"{prefix}up.b"]
    active = FUNCTIONS[activation](hidden)
    return anp.dot(active, params[f"{prefix}down.w"]) + params[f"{prefix}down.b"]


def block(params, x, *, causal=True, activation="gelu"):
    normed = layer_norm(params, "norm1", x)
    middle = x + attention(params, normed, causal=causal, prefix="attention.")
    normed = layer_norm(params, "norm2", middle)
    return middle + mlp(params, normed, activation=activation, prefix="mlp.")


def block_shapes(width, heads, hidden):
    size = width // heads
    return {
        "norm1.gain": (width,),
        "norm1.bias": (width,),
        "attention.qkv.w": (width, 3, heads, size),
        "attention.qkv.b": (3, heads, size),
        "attention.proj.w": (heads, size, width),
        "attention.proj.b": (width,),
        "norm2.gain": (width,),
        "norm2.bias": (width,),
        "mlp.up.w": (width, hidden),
        "mlp.up.b": (hidden,),
        "mlp.down.w": (hidden, width),
        "mlp.down.b": (width,),
    }


def passes(function, params, x, dy):
    """Return the output, the gradient of the input and those of the parameters."""
    backward, y = autograd.make_vjp(lambda both: function(*both))((params, x))
    grads, dx = backward(dy)
    return y, dx, grads
