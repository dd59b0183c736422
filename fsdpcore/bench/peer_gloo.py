"""Gloo, as PyTorch users have it: torch.distributed on CPU tensors."""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import Any

import numpy as np

from fsdpcore.bench.cases import Case
from fsdpcore.bench.contestants import Contestant, Step
from fsdpcore.core.buffers import BFLOAT16, Array

# Gloo has no averages: as its users do, the bench divides the sum.
_OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}
_DTYPES = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def refusal(case: Case) -> str:
    """Why Gloo cannot do this; empty if it can."""
    return "" if case.dtype in _DTYPES else f"gloo has no {case.dtype}"


class Gloo(Contestant):
    """torch.distributed with the gloo backend on the loopback interface.

    Args:
        rank, world_size: of this process.
        store: path of a file that does not exist yet, through which the ranks meet.
    """

    def __init__(self, rank: int, world_size: int, store: str) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch: Any = importlib.import_module("torch")
        self._torch = torch
        self._dist: Any = importlib.import_module("torch.distributed")
        torch.set_num_threads(1)
        self.rank = rank
        self._dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        self.versions = {"torch": str(torch.__version__)}

    def barrier(self) -> None:
        self._dist.barrier()

    def close(self) -> None:
        self._dist.destroy_process_group()

    def step(self, case: Case, source: Array | None, output: Array | None) -> Step:
        given = None if source is None else self._tensor(source)
        taken = None if output is None else self._tensor(output)
        if case.operation in ("all_reduce", "reduce", "broadcast"):
            return self._over_one_tensor(case, given, taken)
        finish = self._division(case, taken)
        plain = self._between_tensors(case, given, taken)
        if finish is None:
            return plain

        def step() -> None:
            plain()
            finish()

        return step

    def _over_one_tensor(self, case: Case, given: Any, taken: Any) -> Step:
        """Operations that gloo has in place only: out of place, the input is copied first."""
        dist = self._dist
        target = taken
        if target is None:  # no root; a reduction leaves partial sums in what it is given
            target = given if case.in_place else self._torch.empty_like(given)
        if case.operation == "all_reduce":
            call: Step = partial(dist.all_reduce, target, self._op(case))
        elif case.operation == "reduce":
            call = partial(dist.reduce, target, case.root, self._op(case))
        else:
            call = partial(dist.broadcast, target, case.root)
        mine = case.operation != "broadcast" or self.rank == case.root
        copy = partial(target.copy_, given) if mine and not case.in_place else None
        finish = self._division(case, taken)
        if copy is None and finish is None:
            return call

        def step() -> None:
            if copy is not None:
                copy()
            call()
            if finish is not None:
                finish()

        return step

    def _between_tensors(self, case: Case, given: Any, taken: Any) -> Step:
        dist, p = self._dist, case.world_size
        if case.operation == "all_gather":  # renamed in 2.13
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return partial(gather, taken, given)
        if case.operation == "reduce_scatter":
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return partial(scatter, taken, given, self._op(case))
        if case.operation == "all_to_all":
            return partial(dist.all_to_all_single, taken, given)
        if case.operation == "gather":
            parts = None if taken is None else list(taken.chunk(p))
            return partial(dist.gather, given, parts, case.root)
        parts = None if given is None else list(given.chunk(p))
        return partial(dist.scatter, taken, parts, case.root)

    def _op(self, case: Case) -> Any:
        return getattr(self._dist.ReduceOp, _OPS[case.op])

    def _division(self, case: Case, taken: Any) -> Step | None:
        if case.op != "mean" or not case.definition.reduces or taken is None:
            return None
        return partial(taken.div_, case.world_size)

    def _tensor(self, array: Array) -> Any:
        """A tensor that shares the array's memory."""
        if array.dtype == BFLOAT16:
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)
