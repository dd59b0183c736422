"""Data for training: a stream of batches with a position, whose order no number of ranks changes.

==================================  ================================================================
``stream``                          batches of a dataset, dealt to leaves; where they stand
``sources``                         what rows are read from: arrays and other sequences
``permutation``                     the shuffled order, computed row by row
==================================  ================================================================
"""

from fsdpcore.data.stream import Batch, Stream

__all__ = ["Batch", "Stream"]


def __dir__() -> list[str]:
    return __all__
