"""Is an optimizer of another library elementwise? It is tried on an array, and on its halves."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ConfigError

_SIDE = 128  # from where on Adafactor has the sums of rows and columns in place of a matrix
HALF = _SIDE * _SIDE // 2
"""Elements of each of the two parts."""

_FEW, _MOST = 12, 300  # steps that are taken
_SEEN = 3  # steps that must have changed something
_CLOSE = 1e-3  # relative; a norm over the whole changes more than rounding does
_STRAY = 0.01  # of the elements, in which rounding may have been blown up

_ADVICE = (
    "A norm over the whole array (clip_by_global_norm, a trust ratio), something that depends on "
    "shapes or names (a mask, Adafactor), or noise is the likely cause. Shards have neither the "
    "whole array nor its shape. Clip by step.update(clip=...) and leave the norm out; give "
    "parameters optimizers of their own by patterns, optimizer={'*.bias': ..., '*': ...}; or use "
    "one of fc.optim, such as fc.optim.Adafactor"
)

_NEEDS = (
    "It gets a shard, flat, and its gradient: masks and rules that depend on shapes, noise with "
    "random keys, and what needs the loss (value, value_fn) are not supported"
)


class Rule(ABC):
    """How an optimizer of another library takes a step with one array."""

    @abstractmethod
    def advance(
        self, param: Array, grad: Array, leaves: Sequence[Any] | None, lr: float
    ) -> tuple[Array | None, Sequence[Any]]:
        """Take a step.

        Args:
            param: of any shape, on the host.
            grad: likewise; may be written.
            leaves: of the state, always as many in the same order; None for the first step. Arrays
                in it may be written.
            lr: learning rate of this step, as of ``Optimizer.update_block``.

        Returns:
            What is to be added to ``param``, or None if it was written in place; and the new state.
        """

    @abstractmethod
    def paths(self) -> Sequence[tuple[Any, ...]]:
        """Return the keys that lead to each leaf; known after the first ``advance``."""


@dataclass(frozen=True)
class Probed:
    """What was found out about a state.

    Attributes:
        places: which leaves are arrays like the parameter.
        arrays: their names.
        templates: the leaves after the first step, without those arrays.
        counted: all others are counts of the steps.
        size: of the parts that it was tried on.
        updates: some changes, rounded to text: alike on all ranks that have the same optimizer.
    """

    places: tuple[int, ...]
    arrays: tuple[str, ...]
    templates: tuple[Any, ...]
    counted: bool
    size: int
    updates: str

    def joined(self, arrays: Sequence[Array], numbers: Sequence[Any]) -> list[Any]:
        """Return all leaves, in order."""
        left, right = iter(arrays), iter(numbers)
        return [
            next(left) if at in self.places else next(right) for at in range(len(self.templates))
        ]

    def numbers(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves that are no arrays like the parameter, apart from their memory."""
        return [copied(leaf) for at, leaf in enumerate(leaves) if at not in self.places]

    def counts(self, steps: int) -> list[Any]:
        """Return the same after so many steps, if they are counts."""
        return [leaf * 0 + steps for leaf in self.numbers(self.templates)]

    def take(self, leaves: Sequence[Any], arrays: Sequence[Array]) -> None:
        """Write new leaves to the arrays that keep them."""
        for at, own in zip(self.places, arrays, strict=True):
            new = np.asarray(leaves[at])
            if not _is_same(new, own):
                np.copyto(own, new, casting="unsafe")


def probe(rule: Rule, name: str, rate: Callable[[int], float]) -> Probed:
    """Try an optimizer on an array and on its halves, with usual and with huge gradients.

    It is done twice: with parameters that learn, and with parameters of zeros, in which the
    smallest change shows.

    Args:
        rule: the optimizer.
        name: of it, for messages.
        rate: the learning rate of each step, which counts from 1.

    Raises:
        ConfigError: it is not elementwise, or cannot be used at all; it says why.
    """
    trials = [_Trial(rule, name, zeroed) for zeroed in (False, True)]
    for trial in trials:
        for step in itertools.count(1):
            with np.errstate(all="ignore"):  # of huge gradients
                trial.take(step, rate(step))
            if step >= _FEW and trial.changes >= _SEEN:
                break
            if step == _MOST:
                raise ConfigError(
                    f"{name} has changed a parameter in {trial.changes} of {_MOST} steps only: "
                    "whether it works on shards cannot be found out; is its learning rate 0?"
                )
    one, other = trials
    for step, (numbers, others) in enumerate(zip(one.numbers, other.numbers, strict=False), 1):
        if not _all_equal(numbers, others):
            trials[0].refuse(step, "numbers in its state, which depend on gradients")
    return one.found(other.updates)


class _Trial:
    """Some steps with an array and its halves.

    Attributes:
        changes: how many of them changed the parameter.
        numbers: of each step, what in the state is no array like the parameter.
        updates: changes of a few elements, as text.
    """

    def __init__(self, rule: Rule, name: str, zeroed: bool) -> None:
        self.changes = 0
        self.numbers: list[list[Any]] = []
        self.updates = ""
        self._rule, self._name, self._zeroed = rule, name, zeroed
        self._rng = np.random.default_rng(0)
        whole = self._rng.normal(size=(_SIDE, _SIDE)).astype(np.float32)
        self._params = [whole, *(half.copy() for half in np.split(whole.reshape(-1), 2))]
        self._states: list[Sequence[Any] | None] = [None] * 3
        self._places: tuple[int, ...] = ()
        self._counted = True
        self._templates: tuple[Any, ...] = ()

    def take(self, step: int, lr: float) -> None:
        """Take a step with all three, and compare them."""
        grad = _gradient(self._rng, step)
        if step == 1 and not self._zeroed:
            grad.fill(0.0)  # what is left are decays, which are small
        grads = [grad.copy(), *(half.copy() for half in np.split(grad.reshape(-1), 2))]
        if self._zeroed:
            for param in self._params:
                param.fill(0.0)
        before, changes = self._params[0].copy(), []
        for at, (param, part) in enumerate(zip(self._params, grads, strict=True)):
            try:
                change, self._states[at] = self._rule.advance(param, part, self._states[at], lr)
            except Exception as error:
                raise ConfigError(
                    f"{self._name} cannot be used: step {step} with an array of shape "
                    f"{param.shape} raised {type(error).__name__}: {error}. {_NEEDS}"
                ) from error
            changes.append(param if change is None else change)
            if change is not None:
                np.add(param, change, out=param)
        if step == 1:
            self._classify()
        self._compare(step, "the parameter", changes)
        for place in self._places:
            found = [self._leaves(at)[place] for at in range(3)]
            self._compare(step, f"its state {self._path(place)}", found)
        self._note(step)
        change = self._params[0] - before
        self.changes += bool(change.any())
        if step <= 3:
            self.updates += "".join(f" {change.reshape(-1)[at]:.3g}" for at in (1, HALF + 1))

    def _path(self, place: int) -> str:
        return ".".join(map(str, self._rule.paths()[place]))

    def _leaves(self, at: int) -> Sequence[Any]:
        found = self._states[at]
        assert found is not None
        return found

    def _classify(self) -> None:
        """Tell arrays like the parameter from the rest of the state."""
        whole, half, _ = ([np.shape(leaf) for leaf in self._leaves(at)] for at in range(3))
        if len(whole) != len(half):
            self.refuse(1, f"how much its state has: {len(whole)} and {len(half)} arrays")
        like = self._params[0].shape, self._params[1].shape
        shapes = list(enumerate(zip(whole, half, strict=True)))
        self._places = tuple(at for at, pair in shapes if pair == like)
        for at, (one, other) in shapes:
            if at not in self._places and one != other:
                self.refuse(1, f"the shape of its state {self._path(at)}: {one} and {other}")
        for at in self._places:
            dtype = np.asarray(self._leaves(0)[at]).dtype
            if dtype.kind in "iuc" and dtype.itemsize > 2:
                raise ConfigError(
                    f"{self._name} keeps {dtype} of each element in {self._path(at)}, but the "
                    "engine keeps float32 or float64; use another optimizer"
                )
        self._templates = tuple(
            None if at in self._places else copied(leaf) for at, leaf in enumerate(self._leaves(1))
        )

    def _compare(self, step: int, what: str, found: Sequence[Any]) -> None:
        whole, *halves = (np.asarray(each, np.float64).reshape(-1) for each in found)
        if _differ(whole, np.concatenate(halves)):
            self.refuse(step, what)

    def _note(self, step: int) -> None:
        """Note the numbers of this step, which are those of the whole and of both halves."""
        found = [
            [
                copied(leaf)
                for place, leaf in enumerate(self._leaves(at))
                if place not in self._places
            ]
            for at in range(3)
        ]
        if not (_all_equal(found[0], found[1]) and _all_equal(found[0], found[2])):
            self.refuse(step, "numbers in its state")
        self.numbers.append(found[0])
        others = [path for at, path in enumerate(self._rule.paths()) if at not in self._places]
        for path, number in zip(others, found[0], strict=True):
            whole = np.asarray(number).dtype.kind in "iu" or path[-1:] == ("step",)
            self._counted &= whole and np.shape(number) == () and bool(number == step)

    def found(self, updates: str) -> Probed:
        """Return what was found out."""
        names = _short([self._rule.paths()[at] for at in self._places])
        return Probed(self._places, names, self._templates, self._counted, HALF, updates.strip())

    def refuse(self, step: int, what: str) -> NoReturn:
        """Raise the error for an optimizer that is not elementwise."""
        raise ConfigError(
            f"{self._name} is not elementwise: step {step} differs in {what}, when an array of "
            f"shape {(_SIDE, _SIDE)} is updated whole and in two halves. {_ADVICE}"
        )


def _gradient(rng: np.random.Generator, step: int) -> Array:
    """Return the gradient of a step: the halves of other sizes, some elements huge later on."""
    grad = rng.normal(size=(_SIDE, _SIDE)).astype(np.float32)
    grad[_SIDE // 2 :] *= 30
    scale = {2: 1e-4, 4: 1e3, 6: 1e-8}.get(step, 1.0)
    grad *= np.float32(scale)
    if step == 5:
        grad[: _SIDE // 2] = 0
    if step in (8, 10):
        grad[-1, -3:] = 1e10 if step == 8 else 1e20
    return grad


def _differ(one: Array, other: Array) -> bool:
    close = np.abs(one - other) <= _CLOSE * np.maximum(np.abs(one), np.abs(other))
    close |= (one == other) | (np.isnan(one) & np.isnan(other))
    if (np.isfinite(one) != np.isfinite(other)).any():
        return True
    return bool(np.mean(~close) > _STRAY)


def _all_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(
        np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(one, other, strict=True)
    )


def _short(paths: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    """Return names of state arrays: the last key where that is unique, else all of them."""
    last = [str(path[-1]) if path else "state" for path in paths]
    return tuple(
        name if last.count(name) == 1 else "_".join(map(str, path))
        for name, path in zip(last, paths, strict=True)
    )


def copied(leaf: Any) -> Any:
    """Return a number of a state apart from its memory."""
    clone = getattr(leaf, "clone", None)  # of PyTorch
    return clone() if clone is not None else leaf


def _is_same(one: Array, other: Array) -> bool:
    """Whether two arrays of one size lie in the same place."""
    return one.ctypes.data == other.ctypes.data and one.dtype == other.dtype
