"""A step of training by a function that returns the loss and the gradients of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fsdpcore.core.checks import as_callable, kind_of
from fsdpcore.core.errors import ArgumentError
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
            read-only arrays in plain dictionaries, which are empty after the call. It returns the
            loss, and gradients that are mappings of the same kind; what is missing or None counts
            as zeros, what is of frozen or ignored parameters is left out. Where the engine scales
            losses, the gradients are those of ``engine.loss_scale`` times the loss.
        *batch: of this rank.
        divisor: of the gradients, as of ``engine.step``.
        clip, norm_type, clip_value, lr, skip_nonfinite: as of ``Step.update``.

    Returns:
        The loss as the function returned it: this rank's own.

    Raises:
        ArgumentError: arguments in another order; or the function has returned something else, or
            gradients that do not fit: before anything was reduced.
        NonFiniteGradientError, MismatchError, StateError: as ``Step.update``.
    """
    call = "train_step(engine, loss_and_grads, *batch)"
    if not isinstance(engine, FSDP):
        raise ArgumentError(f"{call} needs an FSDP engine, got {kind_of(engine)}")
    as_callable(loss_and_grads, call, "params, *batch")
    with engine.step(divisor=divisor) as step:
        with step.whole() as (params, grads):
            loss, found = loss_and_found(loss_and_grads(params, *batch))
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


def loss_and_found(result: tuple[Loss, Named]) -> tuple[Loss, Named]:
    """Return what a function of the whole model has returned; ArgumentError if it is no such."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise ArgumentError(
            "the function must return the loss, and a mapping from units to mappings from names to "
            f"gradients; got {type(result).__name__}"
        )
    return result
