"""``cupy.cuda.Device``."""

from __future__ import annotations

from support.fake_cuda import current


class Device:
    """A GPU by its ordinal, the current one by default."""

    def __init__(self, device: int | Device | None = None) -> None:
        place = current.machine().place
        self.id = place.device if device is None else int(device)
        self._before: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __enter__(self) -> Device:
        place = current.machine().place
        self._before.append(place.device)
        place.set_device(self.id)
        return self

    def __exit__(self, *exc: object) -> None:
        current.machine().place.set_device(self._before.pop())

    def use(self) -> Device:
        """Make it the current device of this thread."""
        current.machine().place.set_device(self.id)
        return self

    def synchronize(self) -> None:
        """Block the host until it is through."""
        current.machine().synchronize(self.id)

    @property
    def pci_bus_id(self) -> str:
        """For instance "0000:01:00.0"."""
        return pci_bus_id(self.id)


def pci_bus_id(device: int) -> str:
    """Where an ordinal is on the bus: the same for two that are one GPU."""
    uuids = current.machine().faults.uuids
    return f"0000:{uuids.index(uuids[device]) + 1:02x}:00.0"
