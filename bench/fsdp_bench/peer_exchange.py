"""PyTorch's FSDP2 on Gloo: its settings, and the exchange of one step.

Why this is the same exchange. Each unit is a module of its own under ``fully_shard`` with
``reshard_after_forward=True``, so FSDP2 gathers it before its forward pass, frees it, gathers it
again before its backward pass, frees it, and reduces its gradient, divided by the number of ranks,
to shards: 26 units are 52 all_gathers and 26 reduce_scatters of 4 MiB, as ours are. The modules
compute nothing: ``_Touch`` passes a single number on, and hands out memory that nobody has written
as the gradient, as ours is. There is no optimizer; gradients are
dropped at the end of a step, as ours are.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

from gpt_model import keep_freed_memory
from torch_group import Group, torch

from fsdp_bench.cases import Array, Exchange
from fsdp_bench.job import StepJob

fsdp: Any = importlib.import_module("torch.distributed.fsdp")


def shard(units: list[Any], root: Any, group: Group, setting: str) -> None:
    """Apply ``fully_shard`` to each unit and to the root, with one of ``cases.SETTINGS``."""
    for module in (*units, root):
        fsdp.fully_shard(module, mesh=group.mesh, reshard_after_forward=True, **group.policy)
    if "malloc" in setting:
        keep_freed_memory()
    if "prefetch" not in setting:
        return
    for before, after in itertools.pairwise(units):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    # Without it, the gathers that are begun ahead block on a CPU, which has no streams.
    if "async" in setting:
        root._set_unshard_async_op(True)


class _Touch(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, x: Any, weight: Any, module: Any) -> Any:
        if module.look is not None:
            module.look(weight)
        context.module, context.shape = module, weight.shape
        return x + 1  # a view would make FSDP2 warn

    @staticmethod
    def backward(context: Any, dy: Any) -> tuple[Any, Any, None]:
        module = context.module
        gradient = torch.empty(context.shape)
        if module.look is not None:
            module.look(module.weight)
            gradient.copy_(module.known_gradient())
        return dy, gradient, None


class _Unit(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, case: Exchange, number: int, rank: int) -> None:
        super().__init__()
        self.case, self.number, self.rank = case, number, rank
        self.weight = torch.nn.Parameter(torch.empty(case.rows, case.columns))
        self.look: Any = None  # where parameters are to be checked, and gradients known

    def forward(self, x: Any) -> Any:
        return _Touch.apply(x, self.weight, self)

    def known_gradient(self) -> Any:
        size = self.case.rows * self.case.columns
        values = self.case.gradients(self.number, self.rank, 0, size)
        return torch.from_numpy(values).view(self.case.rows, self.case.columns)


class PeerExchange(StepJob):
    """A forward and a backward pass through modules that compute nothing."""

    def __init__(self, case: Exchange, group: Group) -> None:
        self._case = case
        self._group = group
        with torch.device("meta"):
            units = [_Unit(case, number, group.rank) for number in range(case.units)]
            root = torch.nn.Sequential(*units)
        shard(units, root, group, case.setting)
        root.to_empty(device="cpu")
        self._units, self._root = units, root
        self._wrong = 0
        with torch.no_grad():
            for number, unit in enumerate(units):
                local, values = self._shard_of(unit.weight), case.weights(number, *self._range())
                local.view(-1).copy_(torch.from_numpy(values))

    def barrier(self) -> None:
        self._group.barrier()

    def step(self) -> None:
        """Forward and backward; the gradients are dropped."""
        self._root(torch.zeros(1, requires_grad=True)).backward()
        self._root.zero_grad()

    def check(self) -> int:
        """Make the same step with gradients of known values, and look at everything."""
        self._wrong = 0
        for unit in self._units:
            unit.look = lambda weight, unit=unit: self._look(weight, unit)
        self._root(torch.zeros(1, requires_grad=True)).backward()
        for number, unit in enumerate(self._units):
            unit.look = None
            right = self._case.mean_gradients(number, self._group.world_size, *self._range())
            self._compare(self._shard_of(unit.weight.grad), right)
        self._root.zero_grad()
        return self._wrong

    def _look(self, weight: Any, unit: Any) -> None:
        size = self._case.rows * self._case.columns
        self._compare(weight.detach(), self._case.weights(unit.number, 0, size))

    def _compare(self, found: Any, right: Array) -> None:
        # In PyTorch: memory that NumPy has seen, FSDP2 cannot free.
        self._wrong += int((found.reshape(-1) != torch.from_numpy(right)).sum())

    def _range(self) -> tuple[int, int]:
        """Which elements of a flattened parameter are this rank's: whole rows."""
        rows, columns, ranks = self._case.rows, self._case.columns, self._group.world_size
        share = -(-rows // ranks)
        start = min(rows, share * self._group.rank)
        return start * columns, min(rows, start + share) * columns

    @staticmethod
    def _shard_of(tensor: Any) -> Any:
        return tensor.detach().to_local()
