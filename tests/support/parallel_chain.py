"""A small language model of every layer of ``fsdpcore.parallel``, and the same unsharded."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import ml_dtypes
import numpy as np
from support.spmd import run
from support.tensor_parallel import joined, own_values, random_values

import fsdpcore as fc
from fsdpcore import parallel
from fsdpcore.parallel import Scope, prefixed

VOCAB, WIDTH, HIDDEN, LENGTH, BATCH = 13, 6, 9, 7, 3
SHAPES = {
    "embed.w": (VOCAB, WIDTH),
    "norm.gain": (WIDTH,),
    "norm.bias": (WIDTH,),
    "up.w": (WIDTH, HIDDEN),
    "up.b": (HIDDEN,),
    "down.w": (HIDDEN, WIDTH),
    "down.b": (WIDTH,),
    "last.gain": (WIDTH,),
    "out.w": (WIDTH, VOCAB),
    "out.b": (VOCAB,),
}


def layers(group, dtype, along):
    options = {"sequence_parallel": along, "dtype": dtype}
    stretch = (lambda layer: [layer(group)]) if along else (lambda layer: [])
    return [
        ("embed", parallel.VocabParallelEmbedding(VOCAB, WIDTH, group, dtype=dtype)),
        *[("begin", layer) for layer in stretch(parallel.ScatterSequence)],
        ("norm", parallel.LayerNorm(WIDTH, group, **options)),
        ("up", parallel.ColumnParallelLinear(WIDTH, HIDDEN, group, **options)),
        ("down", parallel.RowParallelLinear(HIDDEN, WIDTH, group, **options)),
        ("last", parallel.RMSNorm(WIDTH, group, **options)),
        *[("end", layer) for layer in stretch(parallel.GatherSequence)],
        # The input of this one is whole, and its gradient is summed.
        ("out", parallel.ColumnParallelLinear(WIDTH, VOCAB, group, dtype=dtype)),
    ]


def text():
    rng = np.random.default_rng(6)
    x, y = rng.integers(VOCAB, size=(2, BATCH, LENGTH))
    return x, y


def values(dtype):
    return random_values(SHAPES, np.random.default_rng(9), dtype)


def passed(group, dtype, along, xp=np):
    """Loss and gradients, with the boxes of this rank."""
    chain = layers(group, dtype, along)
    rng = np.random.default_rng(0)
    initial = {}
    for name, layer in chain:
        initial.update(prefixed(f"{name}.", layer.init(rng)))
    params = {name: xp.asarray(part) for name, part in own_values(initial, values(dtype)).items()}
    grads = {
        name: xp.zeros(part.shape, np.promote_types(dtype, np.float32))
        for name, part in params.items()
    }
    x, targets = (xp.asarray(array) for array in text())
    saved = []
    for name, layer in chain:
        x, kept = layer.forward(Scope(params, f"{name}."), x)
        saved.append(kept)
    loss, d = parallel.cross_entropy(x, targets, group, vocab=VOCAB)
    for name, layer in reversed(chain):
        d = layer.backward(Scope(params, f"{name}."), saved.pop(), d, Scope(grads, f"{name}."))
    return loss, {
        name: fc.BoxShard(value.shape, value.start, grads[name])
        if isinstance(value, fc.BoxShard)
        else grads[name]
        for name, value in initial.items()
    }


def both_ways(backend):
    """Without and with a stretch that is cut along the sequence."""
    return [passed(backend, np.float32, along) for along in (False, True)]


def _loss(params, x, targets):
    h = params["embed.w"][x]
    centred = h - anp.mean(h, axis=-1, keepdims=True)
    unit = centred / anp.sqrt(anp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    h = anp.dot(unit * params["norm.gain"] + params["norm.bias"], params["up.w"]) + params["up.b"]
    h = anp.dot(h, params["down.w"]) + params["down.b"]
    h = h / anp.sqrt(anp.mean(h**2, axis=-1, keepdims=True) + 1e-5) * params["last.gain"]
    logits = anp.dot(h, params["out.w"]) + params["out.b"]
    logsum = anp.log(anp.sum(anp.exp(logits), axis=-1))
    wanted = logits[anp.arange(BATCH)[:, None], anp.arange(LENGTH), targets]
    return anp.mean(logsum - wanted)


def unsharded():
    """Loss and gradients in float64, of the values that float32 holds."""
    params = {name: value.astype(np.float64) for name, value in values(np.float32).items()}
    return autograd.value_and_grad(_loss)(params, *text())


# Of values on two devices: the rounding of a type, with which a few layers were computed.
DEVICE_TOLERANCES = [
    (np.dtype(np.float64), 1e-12),
    (np.dtype(np.float32), 2e-5),
    (np.dtype(np.float16), 2e-2),
    (np.dtype(ml_dtypes.bfloat16), 1e-1),
]


def on_device(backend, dtype, along):
    """``passed`` with arrays of the backend's device, and its results on the host."""
    loss, grads = passed(backend, dtype, along, backend.device.xp)
    return float(loss), {name: _to_host(backend, value) for name, value in grads.items()}


def _to_host(backend, value):
    if isinstance(value, fc.BoxShard):
        return fc.BoxShard(value.shape, value.start, backend.device.to_host(value.array))
    return backend.device.to_host(value)


def check_device(there, dtype, along, tolerance):
    """Compare what ``on_device`` returned on all ranks with the same on the host."""
    here = run(passed, transport="sim", world_size=len(there), args=(dtype, along))
    for (mine, _), (theirs, _) in zip(there, here, strict=True):
        assert abs(mine - float(theirs)) <= tolerance * float(theirs)
    found, wanted = (joined([grads for _, grads in side]) for side in (there, here))
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        error = np.linalg.norm(found[name].astype(np.float64) - array)
        assert error <= tolerance * max(np.linalg.norm(array), 1e-2), name
