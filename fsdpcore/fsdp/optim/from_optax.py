"""Gradient transformations of optax, and all that has their ``init`` and ``update``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.jax_host import check_width, import_jax, on_host
from fsdpcore.core.skeleton import Skeleton
from fsdpcore.fsdp.optim.base import Optimizer
from fsdpcore.fsdp.optim.foreign import Foreign
from fsdpcore.fsdp.optim.probe import HALF, Rule
from fsdpcore.fsdp.optim.schedules import Schedule


class Transformation(Protocol):
    """What optax calls a gradient transformation, as far as it is needed."""

    @property
    def init(self) -> Callable[[Any], Any]:
        """``init(params) -> state``."""

    @property
    def update(self) -> Callable[..., Any]:
        """``update(grads, state, params) -> (updates, state)``."""


@dataclass(frozen=True, eq=False)
class Optax(Foreign):
    """A transformation of optax over shards; ``optimizer=optax.adamw(...)`` makes one.

    It must be elementwise, which is tried out when this is made. Clipping by the norm is the
    engine's, ``step.update(clip=1.0)``; for some parameters another transformation, in place of
    masks, is ``optimizer={"*.bias": optax.sgd(...), "*": optax.adamw(...)}``. The learning rate is
    the transformation's, with its schedules; ``step.update(lr=...)`` is refused.

    State arrays have optax's names, such as ``mu`` and ``nu``, and are float32 or float64 as the
    parameters are, also where optax was told another dtype, to which they are rounded. Counts and
    other numbers follow from ``engine.steps``. JAX computes it, compiled, on the host; parameters
    of float64 need its 64 bits. It may round the same element in another way elsewhere in an array,
    so that the number of ranks may matter to the last bits.

    Args:
        transformation: an object with ``init(params)`` and ``update(grads, state, params)``, such
            as ``optax.adamw(1e-3)`` or ``optax.chain(...)``.

    Raises:
        ConfigError: it has no such methods, or is not elementwise; it says what differed.
        MissingDependencyError: JAX is not installed.

    Example::

        engine = fc.FSDP(params, backend, optimizer=fc.optim.Optax(optax.adamw(3e-4)))
    """

    takes_lr: ClassVar[bool] = False

    transformation: Any
    lr: float | Schedule = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_transformation(self.transformation):
            raise ConfigError(
                "Optax takes an object with init and update, such as optax.adamw(1e-3), got "
                f"{self.transformation!r:.80}"
            )
        self._settle(_OptaxRule(self.transformation), "the optax transformation")

    def __reduce__(self) -> tuple[Any, ...]:
        return Optax, (self.transformation,)

    def __repr__(self) -> str:
        return f"Optax(state={list(self.state_names)}, updates=[{self._probed.updates}])"


def is_transformation(value: object) -> bool:
    """Whether it looks like one of optax."""
    return (
        not isinstance(value, (type, Optimizer))
        and callable(getattr(value, "init", None))
        and callable(getattr(value, "update", None))
        and not isinstance(value, dict)
    )


class _OptaxRule(Rule):
    def __init__(self, transformation: Any) -> None:
        self._jax = import_jax()
        self._transformation = transformation
        self._step = self._jax.jit(_Step(transformation))
        self._skeleton: Skeleton | None = None
        self._dtypes: list[Any] = []  # of leaves, None for that of the parameter
        self._like_param: list[bool] = []

    def paths(self) -> Sequence[tuple[Any, ...]]:
        assert self._skeleton is not None
        return self._skeleton.paths

    def advance(
        self, param: Array, grad: Array, leaves: Sequence[Any] | None, lr: float
    ) -> tuple[Array | None, Sequence[Any]]:
        jax = self._jax
        check_width(jax, param.dtype)
        with on_host(jax):
            # Few shapes are compiled: what is shorter than a power of two is filled up with zeros.
            room = param.shape
            if param.ndim == 1:
                room = (max(HALF, 1 << (param.size - 1).bit_length()),)
            own, given = _filled(param, room), _filled(grad, room)
            if leaves is None:
                state = self._begun(jax.numpy.asarray(own.copy()))
            else:
                state = [self._typed(at, leaf, room) for at, leaf in enumerate(leaves)]
            found = self._step(own, given, state, jax.tree_util.Partial(self._skeleton))
            change, *rest = map(np.asarray, jax.block_until_ready(found))
        # JAX may return an array that it was given, which is about to be written.
        shown = [param, *(leaf for leaf in leaves or () if isinstance(leaf, np.ndarray))]
        rest = [_apart(leaf, shown) for leaf in rest]
        if room == param.shape:
            return change, rest
        cut = zip(rest, self._like_param, strict=True)
        return change[: param.size], [leaf[: param.size] if like else leaf for leaf, like in cut]

    def _begun(self, param: Any) -> list[Any]:
        skeleton = Skeleton(self._transformation.init(param), _is_number)
        state = [self._jax.numpy.asarray(leaf) for leaf in skeleton.leaves]
        skeleton.forget()
        if self._skeleton is None:
            self._dtypes = [None if leaf.dtype == param.dtype else leaf.dtype for leaf in state]
            self._like_param = [leaf.shape == param.shape for leaf in state]
            self._skeleton = skeleton
        return state

    def _typed(self, at: int, leaf: Any, room: tuple[int, ...]) -> Any:
        """Return a leaf of the state in the dtype that the transformation gave it."""
        leaf = np.asarray(leaf)
        if len(room) == 1 and self._like_param[at]:
            leaf = _filled(leaf, room)
        return leaf if self._dtypes[at] is None else leaf.astype(self._dtypes[at])


class _Step:
    """A step with an array. Two are equal if they are of the same transformation.

    So all ranks that are threads share what is compiled.
    """

    def __init__(self, transformation: Any) -> None:
        self._transformation = transformation

    def __call__(self, param: Any, grad: Any, leaves: Any, build: Any) -> Any:
        state = build.func(leaves)
        updates, state = self._transformation.update(grad, state, param)
        return updates, *build.func.find(state, "the state")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Step) and other._transformation is self._transformation

    def __hash__(self) -> int:
        return id(self._transformation)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float)) or (
        hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    )


def _apart(found: Array, shown: Sequence[Array]) -> Array:
    return found.copy() if any(np.may_share_memory(found, each) for each in shown) else found


def _filled(array: Array, room: tuple[int, ...]) -> Array:
    """Return an array with zeros behind it, up to a size."""
    if array.shape == room:
        return array
    found = np.zeros(room, array.dtype)
    found[: array.size] = array
    return found
