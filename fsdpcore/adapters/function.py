"""A step of training by a function that returns the loss and the gradients of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fsdpcore.core.checks import as_callable, kind_of
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.foreign import refuse_traced
from fsdpcore.fsdp.engine import FSDP
from fsdpcore.fsdp.step.whole import Named

Loss = TypeVar("Loss")


def train_step(
    engine: FSDP,
    loss_and_grads: Callable[..., tuple[Loss, Named]],
    *batch: Any,
    divisor: float | None = None,
    clip: float | None = None,
    norm_type: float = 2.0,
    clip_value: float | None = None,
    lr: float | None = None,
    skip_nonfinite: bool = False,
) -> Loss:
    """Take one step of training; all ranks call it, each with its part of the batch.

    All units are gathered at once, so it takes as much memory as the model; a ``LayerStack`` takes
    that of a few units. For several microbatches, evaluation, or the norm of the gradients use
    ``Step.whole`` itself.

    Args:
        engine: with an optimizer.
        loss_and_grads: called as ``loss_and_grads(params, *batch)``. ``params[unit][name]`` are
            read-only arrays in plain dictionaries, which are empty after the call. Where the engine
            was made of a tree, parameters are nested like that, and must not be used after the
            call. It returns the loss, and gradients that are nested like the parameters; what is
            missing or None counts as zeros, what is of frozen or ignored parameters is left out.
            Where the engine scales losses, the gradients are those of ``engine.loss_scale`` times
            the loss. In place of the loss it may return anything, such as the loss and new running
            statistics: ``((loss, aux), grads)``, as ``jax.value_and_grad(..., has_aux=True)`` does.
        *batch: of this rank.
        divisor: of the gradients, as of ``engine.step``.
        clip, norm_type, clip_value, lr, skip_nonfinite: as of ``Step.update``.

    Returns:
        What the function returned beside the gradients: the loss of this rank, or ``(loss, aux)``.

    Raises:
        ArgumentError: arguments in another order; or the function has returned something else, or
            gradients that do not fit: before anything was reduced.
        NonFiniteGradientError, MismatchError, StateError: as ``Step.update``.

    Example::

        def loss_and_grads(params, x, y):
            error = x @ params["out"]["w"] - y
            return float((error**2).mean()), {"out": {"w": 2 * x.T @ error / len(x)}}

        loss = fc.train_step(engine, loss_and_grads, x, y, clip=1.0)
    """
    call = "train_step(engine, loss_and_grads, *batch)"
    if not isinstance(engine, FSDP):
        raise ArgumentError(f"{call} needs an FSDP engine, got {kind_of(engine)}")
    as_callable(loss_and_grads, call, "params, *batch")
    refuse_traced(*batch)
    loss: Loss
    with engine.step(divisor=divisor) as step:
        with step.whole() as (params, grads):
            loss, found = loss_and_found(
                loss_and_grads(params, *batch), nested=engine.tree is not None
            )
            del params
            grads.update(found)
            del found  # what the gradients hold is freed unit by unit
        step.update(
            clip=clip,
            norm_type=norm_type,
            clip_value=clip_value,
            lr=lr,
            skip_nonfinite=skip_nonfinite,
        )
    return loss


def loss_and_found(result: Any, *, nested: bool = False) -> tuple[Any, Any]:
    """Return what a function of the whole model has returned; ArgumentError if it is no such.

    Args:
        result: of the function.
        nested: gradients come in a tree like that of the parameters.
    """
    if (
        isinstance(result, tuple)
        and len(result) == 2
        and (nested or isinstance(result[1], Mapping))
    ):
        return result
    gradients = "gradients nested like the parameters"
    if not nested:
        gradients = "a mapping from units to mappings from names to gradients"
    alone = (
        "; of a function of the loss alone, adapters.jax.loss_and_grads or jax.value_and_grad "
        "makes one"
    )
    raise ArgumentError(
        f"the function must return the loss, and {gradients}; got {type(result).__name__}"
        f"{'' if isinstance(result, tuple) else alone}"
    )
