"""Random models, and engines that shard them in random ways."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from support.fsdp_states import Layout

import fsdpcore as fc

OPTIMIZERS = {
    "AdamW": fc.optim.AdamW(amsgrad=True),
    "SGD": fc.optim.SGD(lr=0.1, momentum=0.9),
    "Adafactor": fc.optim.Adafactor(beta1=0.5),
}
FROZEN_DTYPES = [np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.bool_, np.uint64]


@st.composite
def layouts(draw):
    size = draw(st.integers(1, 5))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    group = draw(st.sampled_from(divisors))
    strategy = draw(
        st.sampled_from(
            [
                "full_shard",
                "shard_grad_op",
                "shard_optimizer",
                "no_shard",
                fc.Strategy("hybrid_shard", shard_group_size=group),
                fc.Strategy(reshard_after_forward=group),
                fc.Strategy(reshard_after_forward=False),
            ]
        )
    )
    return Layout(size, strategy, draw(st.booleans()), draw(st.booleans()))


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def models(draw):
    """For each unit: trained shapes and frozen shapes with dtypes, of which there may be none."""
    units = []
    for _ in range(draw(st.integers(1, 3))):
        trained = draw(st.lists(shapes, max_size=3))
        frozen = draw(st.lists(st.tuples(shapes, st.sampled_from(FROZEN_DTYPES)), max_size=2))
        units.append((trained, frozen))
    return units


def arrays_of(model, dtype, seed):
    """Every bit pattern of integers, and floating values that float16 and bfloat16 can hold."""
    rng = np.random.default_rng(seed)
    made = {}
    for u, (trained, frozen) in enumerate(model):
        for n, shape in enumerate(trained):
            made[f"u{u}.p{n}"] = rng.normal(size=shape).astype(dtype)
        for n, (shape, kind) in enumerate(frozen):
            made[f"u{u}.f{n}"] = rng.integers(0, 2 if kind is np.bool_ else 100, shape).astype(kind)
    return made


def made(backend, model, layout, optimizer, dtype, seed):
    given = arrays_of(model, dtype, seed)
    units = []
    for u in range(len(model)):
        own = {n.split(".")[1]: a for n, a in given.items() if n.startswith(f"u{u}.")}
        units.append(fc.Unit(f"u{u}", own, frozen=[n for n in own if n.startswith("f")]))
    return fc.FSDP(
        units,
        backend,
        strategy=layout.strategy,
        optimizer=OPTIMIZERS[optimizer],
        window=layout.window,
        precision=fc.Precision(ml_dtypes.bfloat16) if layout.half else None,
    )


def take_a_step(engine):
    """One update, with each parameter as its own gradient."""
    with engine.step() as step:
        for unit in engine.units:
            with step.forward(unit):
                pass
        for unit in reversed(engine.units):
            with step.backward(unit) as (params, grads):
                for name in grads:
                    grads[name] = params[name]
        step.update()
