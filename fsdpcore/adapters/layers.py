"""Layers with hand-written forward and backward passes, each a unit of the engine."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np

from fsdpcore.buffers import Array
from fsdpcore.errors import ArgumentError
from fsdpcore.fsdp.spec import Spec
from fsdpcore.fsdp.step import Step
from fsdpcore.fsdp.unit import Unit


class Layer(Protocol):
    """A function with parameters and its derivative. It owns no parameters.

    On a GPU all arrays but those of ``init`` are CuPy's: parameters and gradients come so from the
    engine, and inputs are best made so, by ``engine.xp.asarray(batch)``.
    """

    def init(self, rng: np.random.Generator) -> Mapping[str, Array | Spec]:
        """Return the initial parameters by name, always in the same order.

        NumPy arrays are fine on a GPU, too: the engine moves them.
        """

    def forward(self, params: Mapping[str, Array], x: Any) -> tuple[Any, Any]:
        """Return the output and what ``backward`` needs; must not keep ``params`` itself."""

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Any, grads: MutableMapping[str, Array]
    ) -> Any:
        """Write the parameters' gradients into ``grads``, return the input's gradient."""


class LayerStack:
    """Layers one after the other, each gathered for its own forward and backward pass only.

    Args:
        layers: pairs of a unit's name and its layer, in order.
    """

    def __init__(self, layers: Sequence[tuple[str, Layer]]) -> None:
        names = [name for name, _ in layers]
        if len(set(names)) != len(names):
            raise ArgumentError(f"the names of layers must be unique, got {names}")
        self.layers = tuple(layers)

    def units(self, rng: np.random.Generator) -> list[Unit]:
        """Initialise all layers, in order, with one generator."""
        return [Unit(name, layer.init(rng)) for name, layer in self.layers]

    def forward(self, step: Step, x: Any) -> tuple[Any, list[Any]]:
        """Run all layers; returns the output and what ``backward`` needs."""
        saved = []
        for name, layer in self.layers:
            with step.forward(name) as params:
                x, kept = layer.forward(params, x)
            saved.append(kept)
        return x, saved

    def backward(self, step: Step, saved: list[Any], dy: Any) -> Any:
        """Run all layers backwards, consuming ``saved``; returns the gradient of the input."""
        for name, layer in reversed(self.layers):
            with step.backward(name) as unit:
                dy = layer.backward(unit.params, saved.pop(), dy, unit.grads)
        return dy
