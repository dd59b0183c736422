"""A parameter that does not exist yet: its shape, dtype and initialiser.

With a ``Spec`` in place of an array each rank materialises its own shard only, so a model larger
than a rank's memory can be declared. Cut by slices, ``Spec((1000, 64))[:, 16:32]``, it is a box of
a parameter, as a tensor-parallel rank has it, with the values that the whole would have there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.checks import as_dtype, as_shape
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.fsdp.units.initializers import Initializer, zeros


@dataclass(frozen=True, init=False)
class Spec:
    """Deferred initialisation of one parameter, in place of an array in a ``Unit``.

    Nothing is allocated until the engine is made, and then each rank makes its shard only. The
    values depend on the engine's seed and the parameter's name, not on the number of ranks. ::

        fc.Unit("embed", {"w": fc.Spec((50_000, 1024), init=fc.initializers.normal(std=0.02))})

    Args:
        shape: an integer or a sequence of them; ``()`` is 0-d, extents may be 0.
        dtype: anything that NumPy takes as a numeric dtype.
        init: what fills it, such as ``initializers.zeros`` or ``initializers.normal(std=0.02)``.

    Attributes:
        shape, dtype, init: as a tuple of integers, an ``np.dtype`` and the object.
        box: where in a whole parameter it lies, if it was cut out of one by slices; ``shape`` is
            what is left then. None for a whole one.

    Raises:
        ArgumentError: one of them is wrong, or ``init`` cannot fill that dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    init: Initializer
    box: ArrayBox | None

    # Written out because the arguments' types are wider than the fields'.
    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = np.float32,
        init: Initializer = zeros,
    ) -> None:
        object.__setattr__(self, "shape", as_shape(shape, "a Spec"))
        object.__setattr__(self, "dtype", as_dtype(dtype, "a Spec"))
        if not isinstance(init, Initializer):
            raise ArgumentError(
                "init of a Spec must be an initialiser such as initializers.zeros or "
                f"initializers.normal(std=0.02), got {init!r}"
                + ("; call it first" if callable(init) else "")
            )
        init.check_dtype(self.dtype)
        object.__setattr__(self, "init", init)
        object.__setattr__(self, "box", None)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Spec:
        """Return a box of this parameter, by slices of step 1 as of an array; others stay whole.

        Raises ArgumentError for anything else.
        """
        slices = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(each, slice) and each.step in (None, 1) for each in slices):
            raise ArgumentError(f"a Spec is cut by slices without a step, got {index!r}")
        if len(slices) > len(self.shape):
            raise ArgumentError(f"{len(slices)} slices for a Spec of shape {self.shape}")
        slices += (slice(None),) * (len(self.shape) - len(slices))
        bounds = [each.indices(extent) for each, extent in zip(slices, self.shape, strict=True)]
        shape = tuple(max(0, stop - start) for start, stop, _ in bounds)
        outer = self.box or ArrayBox(self.shape, (0,) * len(self.shape), self.shape)
        start = tuple(first + bound[0] for first, bound in zip(outer.start, bounds, strict=True))
        part = Spec(shape, self.dtype, self.init)
        object.__setattr__(part, "box", ArrayBox(outer.whole, start, shape))
        return part

    @property
    def size(self) -> int:
        """Number of elements: 1 for a 0-d parameter, 0 if any extent is 0."""
        return math.prod(self.shape)
