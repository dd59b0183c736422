"""Optimizers of other libraries as elementwise optimizers over shards."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import UnsupportedError
from fsdpcore.fsdp.optim.base import Optimizer, Scratch, State
from fsdpcore.fsdp.optim.probe import Probed, Rule, probe

_KEPT = 4


@dataclass(frozen=True, eq=False)
class Foreign(Optimizer):
    """An optimizer that another library computes, one array at a time.

    Its state has arrays like the parameter, which are sharded with it and saved in checkpoints, and
    a few numbers, such as the count of steps, that depend on nothing else than the number of steps.
    These are not kept: they are counted, or found by taking the steps again with a small array.
    When it is made, it is tried on arrays (``probe``): what is not elementwise is refused.
    """

    _rule: Rule = field(init=False, repr=False)
    _probed: Probed = field(init=False, repr=False)
    _numbers: dict[int, list[Any]] = field(init=False, repr=False)
    _lock: Any = field(init=False, repr=False)

    def _settle(self, rule: Rule, name: str) -> None:
        """Try it out; ``name`` is for messages."""
        object.__setattr__(self, "_rule", rule)
        object.__setattr__(self, "_numbers", {})
        object.__setattr__(self, "_lock", threading.Lock())
        object.__setattr__(self, "_probed", probe(rule, name, self.learning_rate))

    @property
    def state_names(self) -> tuple[str, ...]:
        """Those of the library; with more of the path where one alone is not unique."""
        return self._probed.arrays

    def initial_state(self, name: str) -> float:
        """Return 0: the state begins with what the library makes of the parameter, in step 1."""
        return 0.0

    def update_block(
        self, param: Array, grad: Array, state: State, scratch: Scratch, *, step: int, lr: float
    ) -> None:
        if not on_host(param):
            raise UnsupportedError(
                f"{type(self).__name__} computes on the host, and the parameters are on a GPU; use "
                "one of fc.optim there, such as fc.optim.AdamW"
            )
        rule, probed = self._rule, self._probed
        if grad is not scratch[0]:
            np.copyto(scratch[0], grad)  # libraries may write to it
        leaves: Sequence[Any] | None = None
        if step > 1:
            numbers = self._numbers_after(step - 1)
            leaves = probed.joined([state[name] for name in probed.arrays], numbers)
        change, new = rule.advance(param, scratch[0], leaves, lr)
        if change is not None:
            np.add(param, change, out=param)
        probed.take(new, [state[name] for name in probed.arrays])

    def _numbers_after(self, steps: int) -> list[Any]:
        """Return what is no array in the state after so many steps."""
        probed = self._probed
        if probed.counted:
            return probed.counts(steps)
        with self._lock:  # ranks may be threads that share it
            known = max((step for step in self._numbers if step <= steps), default=0)
            if known < steps:
                self._replay(known, steps)
            return self._numbers[steps]

    def _replay(self, known: int, steps: int) -> None:
        """Take the steps that lead to ``steps`` with an array of zeros, and note the last ones."""
        rule, probed = self._rule, self._probed
        leaves: Sequence[Any] | None = None
        if known:
            arrays = [np.zeros(probed.size, np.float32) for _ in probed.arrays]
            leaves = probed.joined(arrays, self._numbers[known])
        for step in range(known + 1, steps + 1):
            param, grad = (np.zeros(probed.size, np.float32) for _ in range(2))
            _, leaves = rule.advance(param, grad, leaves, self.learning_rate(step))
            if step > steps - _KEPT:
                self._numbers[step] = probed.numbers(leaves)
        for step in sorted(self._numbers)[:-_KEPT]:
            del self._numbers[step]
