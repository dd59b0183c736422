"""The elementwise optimizers' formulas in C, for passes over memory on a GPU.

Each does what the ``update_block`` of its optimizer does, in the same order of operations. Its
variables are ``param``, ``grad``, which is scaled already and may be changed, and the names that it
lists, of the type ``W``: float or double, as the parameter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fsdpcore.fsdp.gpu.kernel import Formula


@dataclass(frozen=True)
class Update:
    """An optimizer's step on one element.

    Attributes:
        name: of the optimizer.
        state: names of its state arrays.
        scalars: names of the numbers that it takes.
        body: C statements.
    """

    name: str
    state: tuple[str, ...]
    scalars: tuple[str, ...]
    body: str


@functools.cache
def formula(update: Update, *, rounded: bool) -> Formula:
    """Return the pass that applies an update; ``rounded`` has one more array, ``out``."""
    return Formula(
        name=f"{update.name}_rounded" if rounded else update.name,
        reads=("grad",),
        updates=("param", *update.state),
        writes=("out",) if rounded else (),
        scalars=("grad_scale", *update.scalars),
        body=f"grad = grad * grad_scale;\n{update.body}" + ("out = param;\n" if rounded else ""),
    )


_DECAYED = """
if (weight_decay != 0) grad = grad + param * weight_decay;
"""

_BETAS = ("beta1", "rest1", "beta2", "rest2")
_MOMENTS = (
    _DECAYED
    + """
exp_avg = exp_avg * beta1 + grad * rest1;
exp_avg_sq = exp_avg_sq * beta2 + grad * grad * rest2;
"""
)

ADAM = Update(
    name="adam",
    state=("exp_avg", "exp_avg_sq"),
    scalars=("weight_decay", *_BETAS, "eps", "rate", "keep"),
    body=_MOMENTS
    + """
param = param * keep - exp_avg / (sqrt(exp_avg_sq) + eps) * rate;
""",
)

AMSGRAD = Update(
    name="amsgrad",
    state=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    scalars=("weight_decay", *_BETAS, "eps", "rate", "keep"),
    body=_MOMENTS
    + """
if (!(exp_avg_sq <= max_exp_avg_sq) && max_exp_avg_sq == max_exp_avg_sq)  // nan stays
    max_exp_avg_sq = exp_avg_sq;
param = param * keep - exp_avg / (sqrt(max_exp_avg_sq) + eps) * rate;
""",
)

NADAM = Update(
    name="nadam",
    state=("exp_avg", "exp_avg_sq"),
    scalars=("weight_decay", *_BETAS, "eps", "ahead", "rate", "keep"),
    body=_MOMENTS
    + """
param = param * keep - (grad * ahead + exp_avg * rate) / (sqrt(exp_avg_sq) + eps);
""",
)

RADAM_WARMUP = Update(
    name="radam_warmup",
    state=("exp_avg", "exp_avg_sq"),
    scalars=("weight_decay", *_BETAS, "rate", "keep"),
    body=_MOMENTS
    + """
param = param * keep - exp_avg * rate;
""",
)

SGD = Update(
    name="sgd",
    state=(),
    scalars=("rate", "weight_decay"),
    body=_DECAYED
    + """
param = param - grad * rate;
""",
)

_MOMENTUM = """
momentum_buffer = momentum_buffer * momentum + grad;
"""

SGD_MOMENTUM = Update(
    name="sgd_momentum",
    state=("momentum_buffer",),
    scalars=("rate", "weight_decay", "momentum"),
    body=_DECAYED
    + _MOMENTUM
    + """
param = param - momentum_buffer * rate;
""",
)

SGD_NESTEROV = Update(
    name="sgd_nesterov",
    state=("momentum_buffer",),
    scalars=("rate", "weight_decay", "momentum"),
    body=_DECAYED
    + _MOMENTUM
    + """
param = param - (grad + momentum_buffer * momentum) * rate;
""",
)

ADAGRAD = Update(
    name="adagrad",
    state=("sum",),
    scalars=("rate", "weight_decay", "eps"),
    body=_DECAYED
    + """
sum = sum + grad * grad;
param = param - grad / (sqrt(sum) + eps) * rate;
""",
)

LION = Update(
    name="lion",
    state=("exp_avg",),
    scalars=("rate", "keep", "ratio", "beta2", "rest2"),
    body="""
W sign = exp_avg * ratio + grad;
if (sign > 0) sign = 1; else if (sign < 0) sign = -1; else if (sign == 0) sign = 0;  // nan stays
param = param * keep - sign * rate;
exp_avg = exp_avg * beta2 + grad * rest2;
""",
)


@functools.cache
def rmsprop(*, centered: bool, momentum: bool) -> Update:
    """Return RMSprop with the state that it has with these options."""
    variance = """
W variance = square_avg;
"""
    if centered:
        variance = """
grad_avg = grad_avg * alpha + grad * rest;
W variance = square_avg - grad_avg * grad_avg;
if (variance < 0) variance = 0;
"""
    step = """
W step = grad / (sqrt(variance) + eps);
"""
    if momentum:
        step += """
step = momentum_buffer = momentum_buffer * momentum + step;
"""
    state = ["square_avg"]
    state += ["grad_avg"] if centered else []
    state += ["momentum_buffer"] if momentum else []
    return Update(
        name="_".join(["rmsprop", *state[1:]]),
        state=tuple(state),
        scalars=(
            *("rate", "weight_decay", "alpha", "rest", "eps"),
            *(("momentum",) if momentum else ()),
        ),
        body=_DECAYED
        + """
square_avg = square_avg * alpha + grad * grad * rest;
"""
        + variance
        + step
        + """
param = param - step * rate;
""",
    )


ALL = (
    *(ADAM, AMSGRAD, NADAM, RADAM_WARMUP),
    *(SGD, SGD_MOMENTUM, SGD_NESTEROV, ADAGRAD, LION),
    *(rmsprop(centered=c, momentum=m) for c in (False, True) for m in (False, True)),
)
"""Every one of them, for what checks them all."""
