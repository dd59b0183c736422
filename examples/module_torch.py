"""A module of PyTorch, sharded: its parameters by name, torch.func.functional_call, its optimizer.

    python examples/module_torch.py                      # 3 ranks, threads of this process
    fsdpcore run -n 2 examples/module_torch.py runs/pt   # saves there; again: it goes on

It learns where four frequencies are strongest (pip install torch). Loss, gradients and the update
are PyTorch's; its tensors share the engine's memory.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

import fsdpcore as fc
from fsdpcore.adapters import arrays

BATCH = 48
torch.manual_seed(0)
MODEL = torch.nn.Sequential(
    torch.nn.Conv1d(1, 8, 5, padding=2),
    torch.nn.GELU(),
    torch.nn.Conv1d(8, 8, 5, stride=2),
    torch.nn.Flatten(),
    torch.nn.LayerNorm(80),
    torch.nn.Linear(80, 4),
)


def batch(step: int) -> Any:
    rng = np.random.default_rng(step)
    kinds = rng.integers(4, size=BATCH)
    waves = np.sin((1 + kinds[:, None]) * np.arange(24) / 4 + 6 * rng.random((BATCH, 1)))
    x = waves + rng.normal(size=waves.shape)
    return x[:, None].astype(np.float32), kinds


def main(backend: fc.Backend, folder: str = "", steps: int = 60) -> Any:
    """Train on one rank, from the checkpoint if there is one; returns parameters by name."""
    model = copy.deepcopy(MODEL)  # functional_call changes it for a while: each rank its own

    def loss_and_grads(params: dict[str, Any], x: Any, kinds: Any) -> Any:
        params = {name: tensor.requires_grad_() for name, tensor in params.items()}
        logits = functional_call(model, params, (x,))
        loss = torch.nn.functional.cross_entropy(logits, kinds, reduction="sum")
        found = torch.autograd.grad(loss, list(params.values()))
        return loss, dict(zip(params, found, strict=True))

    rate = fc.optim.schedules.Cosine(0.01, warmup=5, total=100)
    optimizer = fc.optim.Torch(torch.optim.AdamW, lr=rate, weight_decay=0.1)
    # Units are "0", "2", ...: what their parameters' names begin with.
    engine = fc.FSDP(dict(MODEL.named_parameters()), backend, optimizer=optimizer)
    if folder and fc.checkpoint.steps(folder):
        fc.checkpoint.load(folder, engine, backend)
    function, loss = arrays.function(loss_and_grads, torch), 0.0
    while engine.steps < steps:
        x, kinds = (np.array_split(each, backend.world_size) for each in batch(engine.steps))
        mine = x[backend.rank], kinds[backend.rank]
        loss = fc.train_step(engine, function, *mine, divisor=BATCH, clip=1.0)
    if folder:
        fc.checkpoint.save(folder, engine, backend)
    total = fc.all_reduce(np.float64(loss), backend) / BATCH
    if backend.rank == 0:
        print(f"{backend.world_size} ranks, step {engine.steps}: loss {total:.2f}")
    return engine.full_tree()


if __name__ == "__main__":
    fc.launch(main, world_size=3, args=tuple(sys.argv[1:2]))
