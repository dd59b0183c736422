"""Whether there is a GPU to measure on; ``-m gpu_bench.usable`` says why not, and exits with 3."""

from __future__ import annotations

import sys

from fsdpcore.comm import registry
from fsdpcore.core.errors import MissingDependencyError

NOT_USABLE = 3  # no code with which Python exits by itself


def why_not() -> str:
    """What keeps the ``nccl`` transport from running here; empty if nothing does."""
    try:
        registry.load("nccl").versions()
    except MissingDependencyError as error:
        return str(error)
    return ""


def in_words(reason: str) -> str:
    """What a program says that measures on GPUs and has found none."""
    return f"there is no usable GPU: {reason} (--without-gpu goes on, to see that it all runs)"


if __name__ == "__main__":
    if found := why_not():
        print(in_words(found))
    sys.exit(NOT_USABLE if found else 0)
