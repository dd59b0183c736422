"""A stand-in for ``cupy`` and ``cupy.cuda.nccl`` where there is no GPU.

It shows whether code enqueues the right things in the right order, with the right counts and
dtypes, waits where it must, and gets over failures. It shows nothing about speed, and no more about
numbers than NumPy does.

Arrays are memory of the host that only work on a stream touches. Every stream is a thread, which
does its work in order and now and then late; nothing is done before it is enqueued, and whoever
reads without waiting reads too early. Beside that, ``machine.races`` has all pairs of work on the
same memory that nothing orders, found from the waits alone, however the threads happened to run.
Memory that an array gave back is handed out again at once on the same stream, as CuPy's pool does,
even while other streams use it.
"""

from support.fake_cuda.errors import CUDARuntimeError, NcclError, NoCompiler, SwitchedOff
from support.fake_cuda.faults import ANY
from support.fake_cuda.install import installed
from support.fake_cuda.machine import Entry, Machine

__all__ = [
    "ANY",
    "CUDARuntimeError",
    "Entry",
    "Machine",
    "NcclError",
    "NoCompiler",
    "SwitchedOff",
    "installed",
]
