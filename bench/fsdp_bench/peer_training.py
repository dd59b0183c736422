"""The same GPT in PyTorch, trained with FSDP2 on Gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpt_model import GPTConfig, build
from torch_group import Group, torch

from fsdp_bench.cases import Array, Training
from fsdp_bench.job import StepJob
from fsdp_bench.peer_exchange import shard
from fsdp_bench.training import SEED

nn: Any = torch.nn
functional: Any = torch.nn.functional

# Ours is stored as (inputs, outputs), PyTorch's the other way round.
_ENDINGS = {"w": "weight", "b": "bias", "gain": "weight", "bias": "bias"}


class Embedding(nn.Module):  # type: ignore[misc]
    """Byte plus learned position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.byte = nn.Parameter(torch.empty(config.vocab, config.width))
        self.position = nn.Parameter(torch.empty(config.context, config.width))

    def forward(self, x: Any) -> Any:
        """Map (B, T) to (B, T, D)."""
        return functional.embedding(x, self.byte) + self.position[: x.shape[1]]


class Block(nn.Module):  # type: ignore[misc]
    """Attention and MLP, each after a layer norm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.mlp_width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        """Map (B, T, D) to (B, T, D)."""
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.norm1(x)).view(split).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Head(nn.Module):  # type: ignore[misc]
    """Layer norm and the projection to logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(config.width), nn.Linear(config.width, config.vocab)

    def forward(self, x: Any) -> Any:
        """Map (B, T, D) to (B, T, vocab)."""
        return self.out(self.norm(x))


class PeerTraining(StepJob):
    """Forward, loss, backward, clipping and AdamW, with our model's initial values."""

    def __init__(self, case: Training, group: Group) -> None:
        self._case, self._group = case, group
        config = case.model
        blocks = [Block(config) for _ in range(config.layers)]
        units: list[Any] = [Embedding(config), *blocks, Head(config)]
        rng = np.random.default_rng(SEED)
        for unit, (_, layer) in zip(units, build(config), strict=True):
            unit.load_state_dict({_name(k): _tensor(k, v) for k, v in layer.init(rng).items()})
        self._model = nn.Sequential(*units).to(group.device)
        shard(units, self._model, group, case.setting)
        # The fused kernel takes half of the time of the default, a loop over operations.
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=case.lr,
            betas=case.betas,
            weight_decay=case.weight_decay,
            fused=True,
        )
        x, y = case.rows(group.rank, group.world_size)
        self._x, self._y = (
            torch.from_numpy(rows.copy()).to(group.device) for rows in (x, y.reshape(-1))
        )

    def barrier(self) -> None:
        self._group.barrier()

    def step(self) -> Any:
        """Forward, loss, backward, clipping, AdamW; the loss."""
        logits = self._model(self._x)
        loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]), self._y)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._case.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def _name(ours: str) -> str:
    layer, _, ending = ours.rpartition(".")
    return f"{layer}.{_ENDINGS[ending]}" if layer else ending


def _tensor(name: str, value: Array) -> Any:
    return torch.from_numpy((value.T if name.endswith(".w") else value).copy())
