"""Puts the stand-in where ``import cupy`` finds it, and takes it away again."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from support.fake_cuda import current, device, memory, nccl, runtime, streams
from support.fake_cuda.compiler import CompileException
from support.fake_cuda.errors import CUDARuntimeError, NcclError
from support.fake_cuda.machine import Machine
from support.fake_cuda.namespace import names

_OURS = "fsdpcore.transports."


@contextlib.contextmanager
def installed(
    devices: int = 4,
    *,
    seed: int = 0,
    delays: bool = True,
    nccl_at: str = "there",
    check: bool = True,
    forget: Sequence[str] = (),
) -> Iterator[Machine]:
    """Have ``cupy`` be the stand-in, with so many GPUs.

    Modules that are imported within and have it as ``cupy`` are forgotten at the end, as are the
    modules named by ``forget`` and ``fsdpcore.transports.nccl.*``: the next one
    who imports them gets new ones. At the end, unless ``check`` is false or the body raised:
    work that failed, races, misuses, and communicators that nobody ended raise ``AssertionError``.
    ``nccl_at`` is "there", "unavailable" (``nccl.available`` is false) or "missing" (cannot be
    imported).
    """
    machine = Machine(devices, seed, delays)
    current.switch_on(machine)
    try:
        with _in_its_place(nccl_at, forget):
            try:
                yield machine
                if check:
                    machine.check()
            finally:
                machine.close()
    finally:
        current.switch_off()
        gc.collect()
    machine.check_threads()


@contextlib.contextmanager
def _in_its_place(nccl_at: str, forget: Sequence[str]) -> Iterator[None]:
    before = {name: made for name, made in sys.modules.items() if _is_cupy(name)}
    _forget(forget)
    for name in before:
        del sys.modules[name]
    known = set(sys.modules)
    sys.modules.update(_modules(nccl_at))
    try:
        yield
    finally:
        new = [name for name in sys.modules if name not in known]
        bound = [name for name in new if _is_bound(sys.modules[name])]
        for name in [name for name in sys.modules if _is_cupy(name)]:
            del sys.modules[name]
        _forget([*bound, *forget])
        sys.modules.update(before)


def _is_cupy(name: str) -> bool:
    return name.split(".")[0] in ("cupy", "cupyx")


def _is_bound(module: Any) -> bool:
    return any(
        isinstance(getattr(module, name, None), ModuleType)
        and _is_cupy(getattr(module, name).__name__)
        for name in ("cupy", "cp", "nccl", "runtime")
    )


def _forget(named: Sequence[str]) -> None:
    for name in list(sys.modules):
        ours = name.startswith(f"{_OURS}nccl")
        if ours or name in named:
            module = sys.modules.pop(name)
            parent, _, last = name.rpartition(".")
            if parent in sys.modules and getattr(sys.modules[parent], last, None) is module:
                delattr(sys.modules[parent], last)


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    made = ModuleType(name, "A stand-in.")
    made.__dict__.update(contents)
    made.__path__ = []
    return made


def _modules(nccl_at: str) -> dict[str, Any]:
    every = names()
    made: dict[str, Any] = {}

    def add(name: str, contents: dict[str, Any]) -> None:
        made[name] = _module(name, contents)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, made[name])

    add("cupy", {name: value for name, value in every.items() if "." not in name})
    made["cupy"].__version__ = "14.2.0"
    made["cupy"].is_available = _is_available
    head = "linalg."
    found = {n.removeprefix(head): v for n, v in every.items() if n.startswith(head)}
    add("cupy.linalg", found)
    add("cupy.cuda", _cuda())
    add("cupy.cuda.runtime", {**runtime.CONSTANTS, **runtime.FUNCTIONS})
    made["cupy.cuda.runtime"].CUDARuntimeError = CUDARuntimeError
    add("cupy.cuda.device", {"Device": device.Device})
    add("cupy.cuda.memory", {n: getattr(memory, n) for n in _MEMORY})
    add("cupy.cuda.pinned_memory", {n: getattr(memory, n) for n in _PINNED})
    add("cupy.cuda.stream", {n: getattr(streams, n) for n in _STREAM})
    add("cupy.cuda.compiler", {"CompileException": CompileException})
    if nccl_at == "missing":
        made["cupy.cuda.nccl"] = None
    else:
        add("cupy.cuda.nccl", _nccl(nccl_at == "there"))
    return made


_MEMORY = ["BaseMemory", "MemoryPointer", "MemoryPool", "UnownedMemory", "alloc"]
_PINNED = ["PinnedMemory", "PinnedMemoryPointer", "PinnedMemoryPool", "alloc_pinned_memory"]
_STREAM = ["Event", "ExternalStream", "Stream", "get_current_stream", "get_elapsed_time"]


def _cuda() -> dict[str, Any]:
    return {
        **{n: getattr(memory, n) for n in (*_MEMORY, *_PINNED)},
        **{n: getattr(streams, n) for n in _STREAM},
        "Device": device.Device,
        "is_available": _is_available,
    }


def _nccl(available: bool) -> dict[str, Any]:
    if not available:
        return {"available": False}
    functions = ["get_unique_id", "get_version", "get_build_version", "groupStart", "groupEnd"]
    classes = ["NcclCommunicator", "NcclConfig"]
    found = {name: getattr(nccl, name) for name in (*functions, *classes)}
    return {**found, **nccl.CONSTANTS, "NcclError": NcclError, "available": True}


def _is_available() -> bool:
    try:
        return runtime.getDeviceCount() > 0
    except CUDARuntimeError:
        return False
