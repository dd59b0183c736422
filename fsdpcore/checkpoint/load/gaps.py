"""What a checkpoint and the target of a load do not have in common, and whether that will do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdpcore.core.errors import ArgumentError, CheckpointError
from fsdpcore.core.text import listed
from fsdpcore.fsdp.state.state import OPTIMIZER_PREFIX, Progress, of_compression

_SHOWN = 8  # names in a message, before they are grouped


class Gaps(NamedTuple):
    """Names of arrays, the same on all ranks.

    Attributes:
        missing: of the target, which are not in the checkpoint.
        unexpected: of the checkpoint, which no rank has.
        uncovered: of the target, of which elements are not in the checkpoint.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    uncovered: tuple[str, ...]

    def check_none(self, what: str, beside: str, ending: str) -> None:
        """Raise if there are any, but for what engines with compression do without.

        Args:
            what: is being loaded.
            beside: what else the message hints at.
            ending: a sentence that ends the message.

        Raises:
            ArgumentError: arrays are missing or unexpected.
            CheckpointError: elements of some are.
        """
        missing, unexpected = (
            [name for name in names if not of_compression(name)]
            for names in (self.missing, self.unexpected)
        )
        hint = "strict=False loads what fits"
        if any(name.startswith(OPTIMIZER_PREFIX) for name in (*missing, *unexpected)):
            hint += ", and optimizer=False leaves the optimizer alone"
        hint += beside
        parts = []
        if missing:
            parts.append(f"missing in the checkpoint are {_few(missing)}")
        if unexpected:
            parts.append(f"unexpected are {_few(unexpected)}")
        if parts:
            raise ArgumentError(f"{what}: {'; '.join(parts)} ({hint}). {ending}")
        if self.uncovered:
            raise CheckpointError(
                f"{what}: not all elements were saved of {listed(self.uncovered)} ({hint}). "
                f"{ending}"
            )


def _few(names: Sequence[str]) -> str:
    """Return names in words, many of them by what they are below: ``'history/*'``."""
    for parts in (-1, 1):
        if len(names) > _SHOWN:
            below = ["/".join(name.split("/")[:parts]) for name in names]
            often = {each for each, number in Counter(below).items() if each and number > 1}
            pairs = zip(names, below, strict=True)
            names = list(dict.fromkeys(f"{up}/*" if up in often else name for name, up in pairs))
    return listed(names)


def check_info(what: str, name: str, info: Mapping[str, Any], ending: str) -> None:
    """Raise ArgumentError unless an engine, of this name, can go on from what was saved of it."""
    if not info:
        it = f"{name!r:.80}" if name else "it"
        raise ArgumentError(
            f"{what}: {it} was not saved from an engine, so that it has no number of steps; "
            f"optimizer=False loads its parameters. {ending}"
        )
    try:
        Progress.of(info)
    except ArgumentError as error:
        raise ArgumentError(f"{what}: {error}. {ending}") from error
