"""``Fingerprint``: what a rank calls, as far as all ranks must call alike; see ``agreement``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Fingerprint:
    """What one rank called; all fields must agree, ``shape[0]`` only unless ``ragged``.

    Attributes:
        operation: name of the collective.
        dtype, shape: of the rank's input; of the root's, where only the root has one.
        op: the reduction, as ``Reduction.told``, or empty.
        root: the root rank, or -1.
        algorithm: as asked for, so that ranks cannot choose differently.
        counts: of a ragged collective, where all ranks know all of them.
        label: what the call is for; named in errors.
        ragged: the ranks may differ in the size of axis 0.
        policy: how ``algorithm="auto"`` is decided, in words that differ where the choices may.
    """

    operation: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = -1
    algorithm: str = "auto"
    counts: tuple[int, ...] = ()
    label: str = ""
    ragged: bool = False
    policy: str = ""

    @cached_property
    def digest(self) -> int:
        """64 bits that are equal where the calls fit together."""
        shape = self.shape[1:] if self.ragged else self.shape
        name = self.dtype.name if self.dtype is not None else ""
        agreed = (
            self.operation,
            name,
            shape,
            len(self.shape),
            self.op,
            self.root,
            self.algorithm,
            self.counts,
            self.label,
            self.policy,
        )
        digest = hashlib.blake2b(repr(agreed).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @property
    def rows(self) -> int:
        """The size of axis 0; 1 for a 0-d array."""
        return self.shape[0] if self.shape else 1

    def __str__(self) -> str:
        parts = [self.op] if self.op else []
        if self.dtype is not None:
            parts.append(f"{self.dtype.name} of shape {self.shape}")
        if self.root >= 0:
            parts.append(f"root {self.root}")
        if self.counts:
            parts.append(f"counts {list(self.counts)}")
        if self.algorithm != "auto":
            parts.append(f"algorithm {self.algorithm}")
        if self.label:
            parts.append(f"for {self.label}")
        return f"{self.operation}({', '.join(parts)})"
