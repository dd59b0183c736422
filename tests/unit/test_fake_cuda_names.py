"""The stand-in for CuPy has nothing that CuPy has not, beside the real one where that is installed.

That needs no GPU: names, signatures and constants can be looked at without one.
"""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.fake_cuda import (
    arrays,
    device,
    errors,
    install,
    memory,
    nccl,
    runtime,
    streams,
)
from support.fake_cuda.namespace import names
from support.fake_cuda.nccl_moves import DTYPES
from support.fake_cuda.ufuncs import ufunc

cupy = pytest.importorskip("cupy", reason="CuPy is not installed: nothing to compare with")
real_nccl = pytest.importorskip("cupy.cuda.nccl")

_FLEXIBLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def real(name: str) -> Any:
    found = cupy
    for part in name.split("."):
        found = getattr(found, part)
    return found


def taken(function: Any) -> list[str] | None:
    """The names of the parameters, or None if that is unknown or left open."""
    text = (getattr(function, "__doc__", None) or "").split("\n")[0]
    if (found := re.fullmatch(r"[\w.]+\((.*)\)( ->.*)?", text)) is not None:
        parts = [part.split("=")[0].split(":")[0].split()[-1] for part in _split(found[1])]
        return [part for part in parts if part not in ("self", "cls", "*", "/")]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind in _FLEXIBLE for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.name != "self"]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def own(function: Any) -> list[str] | None:
    """The parameters of a function of the stand-in, which has no signature in its docstring."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind in _FLEXIBLE for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.name != "self"]


CLASSES = [
    (arrays.ndarray, "ndarray"),
    (arrays.Flags, None),
    (ufunc, "ufunc"),
    (device.Device, "cuda.Device"),
    (memory.BaseMemory, "cuda.BaseMemory"),
    (memory.MemoryPointer, "cuda.MemoryPointer"),
    (memory.MemoryPool, "cuda.MemoryPool"),
    (memory.PinnedMemoryPool, "cuda.PinnedMemoryPool"),
    (memory.UnownedMemory, "cuda.UnownedMemory"),
    (streams.Event, "cuda.Event"),
    (streams.ExternalStream, "cuda.ExternalStream"),
    (streams.Stream, "cuda.Stream"),
    (nccl.NcclCommunicator, "cuda.nccl.NcclCommunicator"),
    (nccl.NcclConfig, "cuda.nccl.NcclConfig"),
]


@pytest.mark.parametrize(("kind", "name"), CLASSES, ids=[kind.__name__ for kind, _ in CLASSES])
def test_classes_have_no_other_names_and_take_no_other_arguments(kind: type, name: str) -> None:
    found = type(cupy.empty.__class__) if name is None else real(name)
    if name is None:
        from cupy._core.flags import Flags as found
    assert public(kind) - public(found) == set()
    for method in public(kind):
        ours, theirs = getattr(kind, method), getattr(found, method)
        if callable(ours) and callable(theirs) and own(ours) is not None:
            expected = taken(theirs)
            assert expected is None or own(ours) == expected, method


def test_functions_have_no_other_names() -> None:
    missing = []
    for name in names():
        try:
            real(name)
        except AttributeError:
            missing.append(name)
    assert missing == []


def test_functions_take_no_other_arguments() -> None:
    wrong = {}
    for name, ours in names().items():
        if inspect.isfunction(ours):
            expected = taken(real(name))
            if own(ours) is not None and expected is not None and own(ours) != expected:
                wrong[name] = (own(ours), expected)
    assert wrong == {}


@pytest.mark.parametrize("part", ["cuda", "cuda.memory", "cuda.stream", "cuda.compiler", "linalg"])
def test_modules_have_no_other_names(part: str) -> None:
    made = install._modules("there")[f"cupy.{part}"]
    ours = {name for name in vars(made) if not name.startswith("_")}
    assert {name for name in ours if not hasattr(real(part), name)} == set()


def test_the_runtime_has_no_other_names_and_the_same_constants() -> None:
    for name, value in runtime.CONSTANTS.items():
        assert getattr(cupy.cuda.runtime, name) == value, name
    for name in runtime.FUNCTIONS:
        assert hasattr(cupy.cuda.runtime, name), name


def test_nccl_has_the_same_constants_and_versions() -> None:
    constants = {n: getattr(real_nccl, n) for n in dir(real_nccl) if n.startswith("NCCL_")}
    assert constants == nccl.CONSTANTS
    assert sorted(DTYPES) == sorted({v for n, v in constants.items() if _is_dtype(n)})
    assert (real_nccl.get_version(), real_nccl.get_build_version()) >= (22100, 22100)
    assert type(real_nccl.get_unique_id()) is bytes
    assert len(real_nccl.get_unique_id()) == nccl.ID_BYTES


def _is_dtype(name: str) -> bool:
    return name.removeprefix("NCCL_") not in ("SUM", "PROD", "MAX", "MIN", "AVG")


def test_nccl_has_the_same_methods() -> None:
    ours = public(nccl.NcclCommunicator)
    assert ours == public(real_nccl.NcclCommunicator)


def test_errors_say_the_same() -> None:
    for status in range(7):
        assert str(errors.NcclError(status)) == str(real_nccl.NcclError(status))
    for status in (1, 2, 35, 100, 101, 400, 600, 700, 719):
        ours = errors.CUDARuntimeError(status)
        theirs = cupy.cuda.runtime.CUDARuntimeError(status)
        assert (str(ours), ours.status) == (str(theirs), theirs.status)


@pytest.mark.parametrize("name", ["ElementwiseKernel", "ReductionKernel", "RawKernel", "RawModule"])
def test_kernels_are_made_with_the_same_arguments(name: str) -> None:
    ours = inspect.signature(names()[name]).parameters
    text = re.search(rf"{name}\((.*)\)", getattr(cupy, name).__doc__.split("\n")[0])
    assert text is not None
    theirs = [re.split("[=:]", part)[0].split()[-1] for part in _split(text[1])]
    assert [p for p in ours if p != "kwargs"] == [
        p for p in theirs if p not in ("*", "**kwargs", ")")
    ]


_OPERANDS: list[Any] = [
    *(np.dtype(kind) for kind in (bool, np.int8, np.int32, np.int64, np.uint8, np.uint64)),
    *(np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)),
    int,
    float,
]


def _score(kind: Any) -> int:
    scores = ((bool, np.bool_), 0), ((int, np.integer), 1), ((float, np.inexact), 2)
    return next((score for kinds, score in scores if issubclass(kind, kinds)), 3)


def _theirs(function: Any, operands: tuple[Any, ...]) -> Any:
    """The dtype of the first result as CuPy finds it; weak scalars are given as their types."""
    types = tuple(np.dtype(kind) for kind in operands)
    arrays = [_score(kind.type) for kind in operands if isinstance(kind, np.dtype)]
    scalars = [_score(kind) for kind in operands if isinstance(kind, type)]
    weak = [kind if isinstance(kind, type) else False for kind in operands]
    if scalars and max(arrays) < max(scalars):
        weak = [False] * len(operands)
    found = function._ops._guess_routine_from_in_types(types, tuple(weak))
    return None if found is None or found.error_func else np.dtype(found.out_types[0])


def _ours(function: Any, operands: tuple[Any, ...]) -> Any:
    shown = [np.empty(0, kind) if isinstance(kind, np.dtype) else kind(1) for kind in operands]
    try:
        with np.errstate(all="ignore"):
            found = function._numpy(*shown)
    except TypeError:
        return None
    return (found[0] if function.nout > 1 else found).dtype


def _cases(nin: int) -> list[tuple[Any, ...]]:
    cases = itertools.product(_OPERANDS, repeat=nin)
    return [case for case in cases if any(isinstance(kind, np.dtype) for kind in case)]


@pytest.mark.parametrize("name", sorted(n for n, found in names().items() if type(found) is ufunc))
def test_functions_by_element_give_the_same_dtypes(name: str) -> None:
    ours, theirs = names()[name], real(name)
    assert (ours.nin, ours.nout) == (theirs.nin, theirs.nout)
    found = {case: (_ours(ours, case), _theirs(theirs, case)) for case in _cases(ours.nin)}
    # It may refuse what CuPy takes (the sign of a bool), but not the other way round.
    wrong = {case: two for case, two in found.items() if two[0] not in (None, two[1])}
    assert wrong == {}
