"""Who updates the parameters: ours by NumPy and by numba, and PyTorch's implementations."""

from __future__ import annotations

import dataclasses
import importlib
from abc import abstractmethod
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fsdpcore as fc
from fsdpcore import __version__
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.member import CaseRunner
from fsdpcore.bench.harness.options import check_known, check_torch
from fsdpcore.core.errors import ArgumentError

COMPILED = "fsdpcore-numba"
PEERS = {"torch-foreach": "foreach", "torch-fused": "fused"}
"""PyTorch's implementations by name: the argument of its optimizers that asks for each."""

POLICIES: dict[str, tuple[fc.optim.Optimizer, str, dict[str, Any]]] = {
    "adamw": (fc.optim.AdamW(lr=1e-3), "AdamW", {"lr": 1e-3}),
    "adam": (fc.optim.Adam(lr=1e-3), "Adam", {"lr": 1e-3}),
    "sgd": (fc.optim.SGD(1e-3, momentum=0.9), "SGD", {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (fc.optim.Adagrad(lr=1e-2), "Adagrad", {"lr": 1e-2}),
    "rmsprop": (fc.optim.RMSprop(lr=1e-2), "RMSprop", {"lr": 1e-2}),
}
"""Ours, and the name and arguments of PyTorch's with the same semantics."""

Array = NDArray[np.float32]


class Updated(CaseRunner):
    """Owns a copy of the parameters and its optimizer state; the gradient is always the same."""

    versions: dict[str, str]

    def barrier(self) -> None:
        """There are no other ranks."""

    @property
    @abstractmethod
    def param(self) -> Array:
        """The parameters, flat."""


class Ours(Updated):
    """One flat shard, as an engine has it."""

    def __init__(self, policy: fc.optim.Optimizer, param: Array, grad: Array) -> None:
        self._policy, self._param, self._grad = policy, param.copy(), grad
        self._state = policy.init_state(param.size, param.dtype)
        self._steps = 0
        self.versions = {"fsdpcore": __version__, "numpy": np.__version__}
        if getattr(policy, "fused", False):
            self.versions["numba"] = version("numba")

    def step(self) -> None:
        self._steps += 1
        self._policy.update(self._param, self._grad, self._state, step=self._steps)

    @property
    def param(self) -> Array:
        return self._param


class Torch(Updated):
    """PyTorch's optimizer on so many tensors of nearly the same size, in one thread."""

    def __init__(
        self, name: str, options: dict[str, Any], param: Array, grad: Array, tensors: int
    ) -> None:
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        self._params = []
        for values, slope in zip(
            np.array_split(param, tensors), np.array_split(grad, tensors), strict=True
        ):
            tensor = torch.nn.Parameter(torch.from_numpy(values.copy()))
            tensor.grad = torch.from_numpy(slope.copy())
            self._params.append(tensor)
        self._optimizer = getattr(torch.optim, name)(self._params, **options)
        self.versions = {"torch": torch.__version__}

    def step(self) -> None:
        self._optimizer.step()

    @property
    def param(self) -> Array:
        joined: Array = np.concatenate([tensor.detach().numpy() for tensor in self._params])
        return joined


def check(optimizer: str, against: tuple[str, ...]) -> None:
    """Check the names.

    Raises:
        ArgumentError: there is no such optimizer, peer, or implementation of the peer.
        MissingDependencyError: the peer is not installed.
    """
    check_known("--optimizer", [optimizer], POLICIES)
    check_known("--against", against, PEERS)
    if optimizer == "rmsprop" and "torch-fused" in against:
        raise ArgumentError("PyTorch has no fused RMSprop; leave torch-fused out")
    check_torch(against)


def contestants(
    optimizer: str, elements: int, tensors: int, against: tuple[str, ...]
) -> dict[str, Updated]:
    """Make all of them, ours first; that of numba where it is installed and has a kernel."""
    policy, name, options = POLICIES[optimizer]
    random = np.random.default_rng(0)
    param = random.standard_normal(elements, np.float32)
    grad = random.standard_normal(elements, np.float32)
    np.multiply(grad, 0.01, out=grad)
    found: dict[str, Updated] = {OURS: Ours(policy, param, grad)}
    if isinstance(policy, (fc.optim.Adam, fc.optim.AdamW)):
        compiled = dataclasses.replace(policy, fused="auto").resolved()
        if compiled != policy:
            found[COMPILED] = Ours(compiled, param, grad)
    for peer in against:
        found[peer] = Torch(name, {**options, PEERS[peer]: True}, param, grad, tensors)
    return found
