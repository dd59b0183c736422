"""What a training step is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from fsdp_bench.cases import PEER, WITHOUT, Training

import fsdpcore as fc
from fsdpcore.bench.harness.measurements import OURS

# Ours with parameters, gradients and optimizer state in pinned memory of the host; and what
# computes the same without an engine.
OFFLOAD, PLAIN = "offload", "compute only"
CONTESTANTS = (OURS, WITHOUT, OFFLOAD, PLAIN, PEER)
PRECISIONS: dict[str, fc.Precision] = {
    "fp32": fc.Precision(),
    "bf16": fc.Precision(ml_dtypes.bfloat16, np.float32),
}


@dataclass(frozen=True)
class GpuTraining(Training):
    """A step of the GPT on a GPU.

    Attributes:
        precision: a key of ``PRECISIONS``.
        share_gpu: all ranks are on one GPU.
    """

    precision: str = "fp32"
    share_gpu: bool = False

    @property
    def tokens(self) -> int:
        """Of all ranks in a step."""
        return self.batch * self.context


# Just to see whether it runs; the sizes of the example, with little to do for a GPU; larger ones.
TINY: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 4}
SMALL: dict[str, Any] = {}
LARGE: dict[str, Any] = {"layers": 8, "width": 1024, "heads": 16, "context": 256, "batch": 16}
