"""The same block in PyTorch, cut by ``torch.distributed.tensor.parallel``, on Gloo."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from gpt_model import keep_freed_memory
from torch_group import Group, torch

from fsdpcore.bench.harness.member import CaseRunner
from tensor_bench.cases import Array, Case

nn: Any = torch.nn
functional: Any = torch.nn.functional
tensor: Any = importlib.import_module("torch.distributed.tensor")
parallel: Any = importlib.import_module("torch.distributed.tensor.parallel")


class Block(nn.Module):  # type: ignore[misc]
    """Attention and MLP; the outputs of ``qkv`` are ordered by heads, so that they are cut so."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width, hidden = case.width, case.hidden
        self.size = width // case.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        """Map (B, T, D), or this rank's part of the sequence, to the same shape."""
        qkv = self.qkv(self.norm1(x))
        batch, length, features = qkv.shape
        split = (batch, length, features // (3 * self.size), 3, self.size)
        query, key, value = qkv.view(split).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, features // 3))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PeerBlock(CaseRunner):
    """Column- and row-wise plans, as PyTorch's tutorial on tensor parallelism has them."""

    def __init__(self, case: Case, group: Group) -> None:
        keep_freed_memory()
        self._case, self._group = case, group
        self._block = Block(case)
        self._block.load_state_dict({k: torch.from_numpy(v) for k, v in _values(case).items()})
        parallel.parallelize_module(self._block, group.mesh, _plan(case))
        x, dy = (
            np.ascontiguousarray(case.own(array, group.rank, group.world_size))
            for array in case.data
        )
        self._x, self._dy = torch.from_numpy(x).requires_grad_(), torch.from_numpy(dy)

    def barrier(self) -> None:
        self._group.barrier()

    def step(self) -> Any:
        """Forward and backward; the output."""
        self._block.zero_grad()
        self._x.grad = None
        y = self._block(self._x)
        y.backward(self._dy)
        return y

    def check(self) -> int:
        y = self.step().detach().numpy()
        return self._case.wrong(y, self._x.grad.numpy(), self._group.rank, self._group.world_size)


def _plan(case: Case) -> dict[str, Any]:
    columns, rows = parallel.ColwiseParallel, parallel.RowwiseParallel
    if not case.sequence:
        return {"qkv": columns(), "proj": rows(), "up": columns(), "down": rows()}
    part = tensor.Shard(1)
    # Norms compute on local parts; their gradients are summed when an optimizer asks for them.
    return {
        "norm1": parallel.SequenceParallel(use_local_output=True),
        "qkv": columns(input_layouts=part),
        "proj": rows(output_layouts=part),
        "norm2": parallel.SequenceParallel(use_local_output=True),
        "up": columns(input_layouts=part),
        "down": rows(output_layouts=part),
    }


def _values(case: Case) -> dict[str, Array]:
    """The initial values by PyTorch's names and in its shapes, (outputs, inputs)."""
    size = case.width // case.heads
    found = {}
    for name, value in case.params.items():
        layer, kind = name.split(".")
        if layer == "qkv":
            split = value.reshape(-1, 3, case.heads, size).swapaxes(1, 2)
            value = split.reshape(value.shape)
        ending = "bias" if kind in ("b", "bias") else "weight"
        found[f"{layer}.{ending}"] = np.ascontiguousarray(value.T)
    return found
