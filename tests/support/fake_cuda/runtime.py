"""``cupy.cuda.runtime``: what of it is used."""

from __future__ import annotations

from typing import Any

from support.fake_cuda import copies, current
from support.fake_cuda.device import pci_bus_id
from support.fake_cuda.errors import CUDARuntimeError

CONSTANTS = {
    "memcpyHostToHost": copies.HOST_TO_HOST,
    "memcpyHostToDevice": copies.HOST_TO_DEVICE,
    "memcpyDeviceToHost": copies.DEVICE_TO_HOST,
    "memcpyDeviceToDevice": copies.DEVICE_TO_DEVICE,
    "memcpyDefault": copies.DEFAULT,
    "hostAllocDefault": 0,
    "hostAllocPortable": 1,
    "hostAllocMapped": 2,
    "hostAllocWriteCombined": 4,
    "streamDefault": 0,
    "streamNonBlocking": 1,
    "streamLegacy": 1,
    "is_hip": False,
}


def getDeviceCount() -> int:
    current.machine().faults.check_driver()
    return current.machine().devices


def getDevice() -> int:
    return current.machine().place.device


def setDevice(device: int) -> None:
    current.machine().place.set_device(device)


def getDeviceProperties(device: int) -> dict[str, Any]:
    machine = current.machine()
    machine.faults.check_driver()
    if not 0 <= device < machine.devices:
        raise CUDARuntimeError(101)
    return {
        "name": b"Stand-in GPU",
        "uuid": machine.faults.uuids[device],
        "totalGlobalMem": machine.faults.limit,
        "major": 9,
        "minor": 0,
        "pciBusID": int(pci_bus_id(device).split(":")[1], 16),
        "pciDeviceID": 0,
        "pciDomainID": 0,
        "multiProcessorCount": 132,
        "warpSize": 32,
        "canMapHostMemory": 1,
        "unifiedAddressing": 1,
        "integrated": 0,
    }


def driverGetVersion() -> int:
    """0 without a driver, as CUDA has it."""
    return 12090 if current.machine().faults.driver else 0


def runtimeGetVersion() -> int:
    return 12090


def deviceSynchronize() -> None:
    machine = current.machine()
    machine.synchronize(machine.place.device)


def deviceGetPCIBusId(device: int) -> str:
    return pci_bus_id(device)


def memGetInfo() -> tuple[int, int]:
    machine = current.machine()
    limit = machine.faults.limit
    return limit - machine.memories.used(machine.place.device), limit


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    copies.memcpy_async(dst, src, size, kind, stream)


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    copies.memcpy_async(dst, src, size, kind, 0)
    streamSynchronize(0)


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    copies.memset_async(ptr, value, size, stream)


def streamSynchronize(stream: int) -> None:
    from support.fake_cuda.streams import _BaseStream

    _BaseStream(stream, -1).synchronize()


def eventQuery(event: int) -> int:
    """0, or 600 for not yet, or what has failed: it raises nothing."""
    found = current.machine().events.get(event)
    return 400 if found is None else found._query()


FUNCTIONS = {
    function.__name__: function
    for function in (
        getDeviceCount, getDevice, setDevice, getDeviceProperties, driverGetVersion,
        runtimeGetVersion, deviceSynchronize, deviceGetPCIBusId, memGetInfo, memcpyAsync, memcpy,
        memsetAsync, streamSynchronize, eventQuery,
    )
}  # fmt: skip
