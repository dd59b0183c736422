"""Mistakes that users make: each says what was wrong and what to do, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fsdpcore as fc
from fsdpcore.collectives.consensus import agree
from fsdpcore.core.errors import in_one_line

ONES = np.ones((3, 4), np.float32)


class Tensor:
    """An array of another library, which shares its memory only without its history."""

    def __init__(self, values: Any, history: bool = True) -> None:
        self._values, self._history = values, history

    def detach(self) -> Tensor:
        return Tensor(self._values, history=False)

    def __array__(self, *args: Any, **options: Any) -> Any:
        if self._history:
            raise RuntimeError("requires grad")
        return self._values


def _engine(backend: fc.Backend, **options: Any) -> fc.FSDP:
    units = [fc.Unit(name, {"w": ONES}) for name in ("embed", "head")]
    return fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=1.0), **options)


def _pass(backend: fc.Backend, give: Callable[[Any], None], unit: str = "head") -> None:
    with _engine(backend).step() as step:
        with step.forward(unit):
            pass
        with step.backward("head") as given:
            give(given)


def _closed(backend: fc.Backend) -> None:
    engine = _engine(backend)
    engine.close()
    engine.close()
    with engine.step():
        pass


def _not_entered(backend: fc.Backend) -> None:
    with _engine(backend).step() as step:
        step.forward("head")
        with step.backward("head"):
            pass


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda b: fc.all_reduce(None, b), "the array must be an array of numbers, got None"),
        (lambda b: fc.all_reduce(object(), b), "array of numbers, got an object of type object"),
        (lambda b: fc.all_reduce([[1, 2], [3]], b), "NumPy cannot make an array of what was pass"),
        (lambda b: b.send(None, 0), "the array must be an array of numbers, got None"),
        (lambda b: fc.all_reduce(ONES, b, op="avg"), r"'avg' \(did you mean 'mean'\?\); known are"),
        (lambda b: fc.all_reduce(ONES, b, op=np.add), r"and what ReduceOp\.create makes"),
        (lambda b: b.empty(3, 4), r"4 is no dtype .* several axes is one argument, \(3, 4\)"),
        (lambda b: _engine(b, strategy="fullshard"), r"'fullshard' \(did you mean 'full_shard'"),
        (lambda b: _pass(b, print, unit="heat"), "has no unit 'heat'; it has embed, head"),
        (
            lambda b: _pass(b, lambda given: given.grads.update(w=None)),
            r"the gradient of head\.w is None, and must be an array",
        ),
        (
            lambda b: _pass(b, lambda given: given.grads.update(w=ONES.tolist())),
            r"got a list, of which NumPy makes \(3, 4\) and float64; .* np\.asarray\(.*np\.float32",
        ),
        (
            lambda b: fc.Unit("head", {"w": ONES, "b": [1.0, 2.0]}),
            r"b: float64; b was given as a list: give np\.asarray\(b, np\.float32\)",
        ),
        (
            lambda b: fc.Unit("head", {"w": [1, 2]}),
            r"dtype int64.*; w was given as a list: give np\.asarray\(w, np\.float32\)",
        ),
        (
            lambda b: _pass(b, lambda given: given.__setitem__("w", ONES)),
            r"with step\.backward\(unit\) as \(params, grads\), then grads\['w'\] =",
        ),
        (_not_entered, r"go through 'with step\.forward\(unit\)' first"),
        (_closed, "a step of an engine that was closed; make a new one"),
    ],
)
def test_what_is_said(mistake: Callable[[fc.Backend], Any], words: str) -> None:
    def main(backend: fc.Backend) -> None:
        with pytest.raises((fc.ArgumentError, fc.StateError), match=words):
            mistake(backend)
        assert fc.all_reduce(1, backend) == 2

    fc.launch(main, world_size=2, transport="sim")


def test_arrays_of_other_libraries_travel_without_their_history() -> None:
    def main(backend: fc.Backend) -> None:
        assert (fc.all_reduce(Tensor(ONES), backend) == 2 * ONES).all()
        got = np.empty_like(ONES)
        work = backend.isend(Tensor(ONES), 1 - backend.rank)
        backend.recv(got, 1 - backend.rank)
        work.wait()
        assert (got == ONES).all()

    fc.launch(main, world_size=2, transport="sim")


def test_an_error_in_one_line_has_the_list_that_it_announces() -> None:
    error = ValueError("two things:\n  one\n  two\nand more, later\n  of it")
    assert in_one_line(error).endswith("two things: one; two")


def test_ranks_that_an_error_names_already_are_not_named_twice() -> None:
    def body(backend: fc.Backend) -> None:
        error = None if backend.rank == 2 else fc.ArgumentError("it is wrong (on rank 1)")
        with pytest.raises(fc.ArgumentError, match=r"it is wrong \(on rank 1\)$"):
            agree(backend, "a test", error)

    fc.launch(body, world_size=3, transport="sim")
