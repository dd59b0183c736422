"""What is said about functions and parameters that cannot be used, alike by all adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.step.whole import Named

Loss = TypeVar("Loss")


def check_callable(function: object, where: str, takes: str) -> None:
    """Raise ArgumentError unless what was passed can be called.

    Args:
        function: what was passed.
        where: the call it was passed to, in words.
        takes: the arguments it will be called with.
    """
    if not callable(function):
        raise ArgumentError(f"{where} needs a function of ({takes}), got {type(function).__name__}")


def check_init(init: object) -> None:
    """Raise ArgumentError unless a layer can have its initial parameters from this."""
    if not isinstance(init, Mapping) and not callable(init):
        raise ArgumentError(
            "init must be a mapping from names to arrays, or a function of a generator that "
            f"returns one, got {type(init).__name__}"
        )


def loss_and_found(result: tuple[Loss, Named]) -> tuple[Loss, Named]:
    """Return what a function of the whole model has returned; ArgumentError if it is no such."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise ArgumentError(
            "the function must return the loss, and a mapping from units to mappings from names to "
            f"gradients; got {type(result).__name__}"
        )
    return result
