"""The state of one random generator, of whichever kind, as JSON, and back.

========================  ==============================  =====================================
kind                      of                              state
========================  ==============================  =====================================
``Generator``             ``numpy.random.Generator``      that of its bit generator, with lists
``RandomState``           ``numpy.random.RandomState``    likewise
``Random``                ``random.Random``               [version, list of integers, gauss]
``torch.Generator``       ``torch.Generator``             [kind of device, base64 of its bytes]
========================  ==============================  =====================================

PyTorch is never imported here: who has one of its generators has imported it.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from fsdpcore.core.errors import ArgumentError

# What generators raise for a state that is none of theirs.
_REFUSED = (TypeError, ValueError, KeyError, OverflowError, RuntimeError, IndexError)


def kind_of(value: object) -> str | None:
    """Return the kind of a generator; None for anything else."""
    if isinstance(value, np.random.Generator):
        return "Generator"
    if isinstance(value, np.random.RandomState):
        return "RandomState"
    if isinstance(value, random.Random):
        return "Random"
    torch: Any = sys.modules.get("torch")
    if isinstance(value, getattr(torch, "Generator", ())):
        return "torch.Generator"
    return None


def state_of(generator: Any) -> Any:
    """Return the state of a generator in plain values, which later draws do not change.

    Raises:
        ArgumentError: it has none, such as ``random.SystemRandom``.
    """
    kind = kind_of(generator)
    if kind == "Generator":
        return _plain(generator.bit_generator.state)
    if kind == "RandomState":
        return _plain(generator.get_state(legacy=False))
    if kind == "torch.Generator":
        data = generator.get_state().numpy().tobytes()
        return [generator.device.type, base64.b64encode(data).decode()]
    try:
        version, numbers, gauss = generator.getstate()
    except NotImplementedError:
        raise ArgumentError(
            f"a {type(generator).__name__} has no state that could be saved"
        ) from None
    return [version, list(numbers), gauss]


def _plain(value: Any) -> Any:
    """Return a value of nested dicts with arrays and NumPy's integers replaced."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def made(kind: str, state: Any) -> Any:
    """Return a new generator of a kind with a state that was saved.

    Raises:
        ArgumentError: no generator of this kind can have it.
    """
    try:
        if kind == "Generator":
            return np.random.Generator(_bits(state))
        if kind == "RandomState":
            legacy = np.random.RandomState(_bits_kind(state)())
            legacy.set_state(state)
            return legacy
        if kind == "Random":
            found = random.Random()  # noqa: S311 - no secret
            found.setstate(_of_python(state))
            return found
        if kind == "torch.Generator":
            torch: Any = sys.modules.get("torch")
            if torch is None:
                raise ArgumentError("a generator of PyTorch was saved; import torch before loading")
            tensors = torch.Generator(device=state[0])
            tensors.set_state(_of_torch(state))
            return tensors
    except _REFUSED as error:
        raise ArgumentError(f"the saved state of a {kind} is none: {error}") from error
    raise ArgumentError(f"there are no generators of kind {kind!r:.40}")


def check(generator: Any, kind: str, state: Any) -> None:
    """Raise ArgumentError unless ``set_state`` can be called with these."""
    own = kind_of(generator)
    if own != kind:
        raise ArgumentError(f"is a {own}, but what was saved is a {kind}")
    if kind in ("Generator", "RandomState"):
        bits = state_of(generator)["bit_generator"]
        saved = state.get("bit_generator") if isinstance(state, Mapping) else None
        if saved != bits:
            raise ArgumentError(f"is a {bits}, but what was saved is a {saved}")
    if kind == "torch.Generator" and generator.device.type != state[0]:
        raise ArgumentError(f"is on {generator.device}, but what was saved was on {state[0]}")
    made(kind, state)


def set_state(generator: Any, state: Any) -> None:
    """Have a generator go on from a state that ``check`` let pass."""
    kind = kind_of(generator)
    if kind == "Generator":
        generator.bit_generator.state = state
    elif kind == "RandomState":
        generator.set_state(state)
    elif kind == "torch.Generator":
        generator.set_state(_of_torch(state))
    else:
        generator.setstate(_of_python(state))


def jumped(kind: str, state: Any, jumps: int) -> Any:
    """Return the state of a generator that is ``jumps`` jumps ahead, for ranks that there were not.

    Raises:
        ArgumentError: such a generator cannot jump.
    """
    if not jumps:
        return state
    bits = _bits(state) if kind == "Generator" else None
    if bits is None or not hasattr(bits, "jumped"):
        name = state.get("bit_generator") if isinstance(state, Mapping) else kind
        raise ArgumentError(
            f"cannot be restored on more ranks than there were: a {name} cannot jump ahead"
        )
    return _plain(bits.jumped(jumps).state)


def _bits(state: Any) -> Any:
    bits = _bits_kind(state)()
    bits.state = state
    return bits


def _bits_kind(state: Any) -> Any:
    name = state.get("bit_generator") if isinstance(state, Mapping) else None
    kind = getattr(np.random, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
        raise ArgumentError(f"there are no generators of kind {name!r:.40}")
    return kind


def _of_python(state: Any) -> Any:
    version, numbers, gauss = state
    return version, tuple(numbers), gauss


def _of_torch(state: Any) -> Any:
    torch: Any = sys.modules["torch"]
    data = base64.b64decode(state[1], validate=True)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
