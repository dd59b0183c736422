"""MPI, as a bare mpi4py program uses it: buffer methods on preallocated arrays."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np

from fsdpcore.bench.cases import Case
from fsdpcore.bench.contestants import Contestant, Step
from fsdpcore.core.buffers import Array

# MPI has no average: as its users do, the bench divides the sum.
_OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "prod": "PROD"}
_TYPES = {
    "int8": "INT8_T",
    "uint8": "UINT8_T",
    "int16": "INT16_T",
    "uint16": "UINT16_T",
    "int32": "INT32_T",
    "uint32": "UINT32_T",
    "int64": "INT64_T",
    "uint64": "UINT64_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
}


def refusal(case: Case) -> str:
    """Why MPI cannot do this; empty if it can."""
    if case.definition.reduces and case.dtype not in _TYPES:
        return f"MPI has no portable reduction of {case.dtype}"
    return ""


class Mpi(Contestant):
    """The ranks of COMM_WORLD, on a duplicate of it.

    In a process where our transport runs too, both use the one MPI library of that process.
    """

    def __init__(self) -> None:
        mpi4py: Any = importlib.import_module("mpi4py")
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD.Dup()
        self.rank = int(self._comm.Get_rank())
        self.world_size = int(self._comm.Get_size())
        library = str(self._mpi.Get_library_version()).partition("\n")[0]
        self.versions = {"mpi4py": str(mpi4py.__version__), "mpi": library.partition(",")[0]}

    def barrier(self) -> None:
        self._comm.Barrier()

    def close(self) -> None:
        self._comm.Free()

    def part(self, case: Case, source: Array) -> Array:
        return source[: case.count]  # where MPI leaves the result of a reduction in place

    def step(self, case: Case, source: Array | None, output: Array | None) -> Step:
        if case.operation == "broadcast":
            return self._broadcast(case, source, output)
        call = self._call(case, source, output)
        if case.op != "mean" or output is None:
            return call
        count = output.dtype.type(case.world_size)

        def step() -> None:
            call()
            np.divide(output, count, out=output)

        return step

    def _call(self, case: Case, source: Array | None, output: Array | None) -> Step:
        comm, here, root = self._comm, self._mpi.IN_PLACE, case.root
        at_root = self.rank == root
        give, take = self._spec(case, source), self._spec(case, output)
        if case.definition.reduces:
            op = getattr(self._mpi, _OPS[case.op])
            if case.operation == "all_reduce":
                return partial(comm.Allreduce, here if case.in_place else give, take, op)
            if case.operation == "reduce":
                give = here if case.in_place and at_root else give
                return partial(comm.Reduce, give, take, op, root)
            if case.in_place:
                return partial(comm.Reduce_scatter_block, here, give, op)
            return partial(comm.Reduce_scatter_block, give, take, op)
        if case.operation == "all_gather":
            return partial(comm.Allgather, here if case.in_place else give, take)
        if case.operation == "all_to_all":
            return partial(comm.Alltoall, give, take)
        if case.operation == "gather":
            give = here if case.in_place and at_root else give
            return partial(comm.Gather, give, take, root)
        return partial(comm.Scatter, give, here if case.in_place and at_root else take, root)

    def _broadcast(self, case: Case, source: Array | None, output: Array | None) -> Step:
        call: Step = partial(self._comm.Bcast, self._spec(case, output), case.root)
        if case.in_place or self.rank != case.root:
            return call
        assert source is not None
        assert output is not None
        given, taken = source, output

        def step() -> None:
            np.copyto(taken, given)
            call()

        return step

    def _spec(self, case: Case, array: Array | None) -> Any:
        """Buffer, count and type; the count is that of one rank where the buffer has all parts."""
        if array is None:
            return None
        if case.dtype in _TYPES:
            return [array, case.count, getattr(self._mpi, _TYPES[case.dtype])]
        return [array.view(np.uint16), case.count, self._mpi.UINT16_T]  # a half, only moved
