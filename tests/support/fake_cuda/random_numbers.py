"""A little of ``cupy.random``: NumPy's numbers, moved."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.fake_cuda.creation import array


class Generator:
    """Some methods of ``cupy.random.Generator``."""

    def __init__(self, seed: Any = None) -> None:
        self._numpy = np.random.default_rng(seed)

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return array(self._numpy.random(size, dtype))

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return array(self._numpy.standard_normal(size, dtype))

    def integers(self, low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64) -> Any:
        return array(self._numpy.integers(low, high, size, dtype))

    def uniform(
        self, low: Any = 0.0, high: Any = 1.0, size: Any = None, dtype: Any = np.float64
    ) -> Any:
        return array(self._numpy.uniform(low, high, size).astype(dtype))


NAMES = {"default_rng": Generator, "Generator": Generator}
