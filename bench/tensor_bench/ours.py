"""The block of ``fsdpcore.parallel``."""

from __future__ import annotations

import numpy as np
from gpt_model import keep_freed_memory

import fsdpcore as fc
from fsdpcore.bench.harness.member import CaseRunner
from fsdpcore.parallel import ParallelBlock
from tensor_bench.cases import Array, Case

_NAMES = {"qkv": "attention", "proj": "attention", "up": "mlp", "down": "mlp"}


class OurBlock(CaseRunner):
    """Parameters are plain arrays, this rank's parts; gradients are written over old ones."""

    def __init__(self, case: Case, backend: fc.Backend) -> None:
        keep_freed_memory()
        self._case, self._backend = case, backend
        self._block = ParallelBlock(
            case.width, case.heads, case.hidden, backend, sequence_parallel=case.sequence
        )
        whole = {_named(name): value for name, value in case.params.items()}
        self._params: dict[str, Array] = {}
        for name, initial in self._block.init(np.random.default_rng(0)).items():
            value = whole[name].reshape(initial.shape)
            if isinstance(initial, fc.BoxShard):
                value = value[initial.box.slices]
            self._params[name] = np.ascontiguousarray(value)
        self._grads = {name: np.empty_like(value) for name, value in self._params.items()}
        self._x, self._dy = (
            np.ascontiguousarray(case.own(array, backend.rank, backend.world_size))
            for array in case.data
        )

    def barrier(self) -> None:
        self._backend.barrier()

    def step(self) -> tuple[Array, Array]:
        """Forward and backward; the output and the gradient of the input."""
        y, saved = self._block.forward(self._params, self._x)
        return y, self._block.backward(self._params, saved, self._dy, self._grads)

    def check(self) -> int:
        return self._case.wrong(*self.step(), self._backend.rank, self._backend.world_size)


def _named(name: str) -> str:
    part = _NAMES.get(name.partition(".")[0])
    return f"{part}.{name}" if part else name
