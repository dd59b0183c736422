"""What happens where a sharded layer's forward or backward pass is called."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, Literal

from fsdpcore.adapters.fully_shard.attributes import attributes
from fsdpcore.adapters.fully_shard.gradients import GradientOf
from fsdpcore.adapters.fully_shard.units import LayerUnit, Parameter
from fsdpcore.adapters.trees import detached_from, overlaps
from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import rounds_into
from fsdpcore.core.errors import StateError
from fsdpcore.fsdp.engine import FSDP, open_step
from fsdpcore.fsdp.units.sharded_unit import ParamState
from fsdpcore.fsdp.units.views import Gradients

Use = Literal["", "forward", "backward", "gathered"]


class LayerPasses:
    """Calls passes of layers with their parameters in place.

    Args:
        gradient_of: tells where gradients are; None if the units know.

    Attributes:
        engine: has the parameters; set before the first call.
        use: what parameters are in place for now.
    """

    engine: FSDP

    def __init__(self, gradient_of: GradientOf | None) -> None:
        self.use: Use = ""
        self._gradient_of = gradient_of

    def forward(self, each: LayerUnit, call: Callable[[], Any]) -> Any:
        """Call a layer's forward pass with its parameters gathered."""
        if self._is_there(each):
            self._check_nested(each, "forward")
            return call()
        step = open_step(self.engine)
        opened = step.forward(each.unit) if step is not None else self._unsharded(each)
        with opened as params, self.shown(each, params, "forward"):
            return detached_from(call(), params.values())

    @contextmanager
    def _unsharded(self, each: LayerUnit) -> Iterator[Mapping[str, Array]]:
        """Gather a unit, and the owners of its ties, outside of steps."""
        owners = [self.engine[tie.unit] for tie in each.unit.ties.values()]
        units = list(dict.fromkeys([each.unit, *owners]))
        sharded = [unit for unit in units if unit.state is not ParamState.UNSHARDED]
        try:
            for unit in units:
                unit.unshard()
            yield each.unit.params
        finally:
            for unit in sharded:
                unit.reshard()

    def backward(self, each: LayerUnit, call: Callable[[], Any]) -> Any:
        """Call a layer's backward pass likewise, and hand its gradients to the engine."""
        if self._is_there(each) and self.use == "backward":
            return call()  # the pass of a layer around this one, which takes all gradients
        self._check_nested(each, "backward")
        step = open_step(self.engine)
        if step is None:
            raise StateError(f"backward of {each.name!r} outside of a step: use sharded.step()")
        with step.backward(each.unit) as (params, grads), self.shown(each, params, "backward"):
            try:
                offered = self._offer(each, grads)
                result = detached_from(call(), (*params.values(), *offered.values()))
                self._take(each, grads, offered)
            finally:
                for gradient in each.gradients.values():
                    gradient.reset()
        return result

    def _is_there(self, each: LayerUnit) -> bool:
        return all(parameter.shown is not None for parameter in each.parameters.values())

    def _check_nested(self, each: LayerUnit, phase: str) -> None:
        """Raise StateError for passes that the engine would not hear of."""
        in_step = open_step(self.engine) is not None
        if self.use == "gathered" and (in_step or phase == "backward"):
            raise StateError(f"{phase} of {each.name!r} of a step inside of gathered()")
        if self.use == "forward" and phase == "backward":
            raise StateError(f"backward of {each.name!r} inside of a forward pass")

    @contextmanager
    def shown(self, each: LayerUnit, params: Mapping[str, Array], use: Use) -> Iterator[None]:
        """Have a unit's parameters in their places."""
        before, self.use = self.use, use
        showing: dict[str, Parameter] = {}
        try:
            for name, parameter in each.parameters.items():
                if parameter.shown is None:
                    parameter.show(params[name])
                    showing[name] = parameter
            yield
            if use != "gathered":
                for parameter in showing.values():
                    _check_untouched(parameter, use)
                self._check_not_kept(each, params, use)
        finally:
            self.use = before
            for parameter in showing.values():
                parameter.hide()

    def _check_not_kept(self, each: LayerUnit, params: Mapping[str, Array], use: Use) -> None:
        """Raise StateError if a layer has kept parameters, whose memory is about to be freed."""
        memory = {id(array.base) for array in params.values() if array.base is not None}
        for owner, slots in each.owners:
            for attribute, value in attributes(owner, slots):
                if (id(owner), attribute) in each.taken:
                    continue
                views = [array for array in _arrays(value) if id(array.base) in memory]
                kept = [name for name in params if views and overlaps(params[name], views)]
                if kept:
                    raise StateError(
                        f"{use} of {each.name!r} has kept parameter {kept[0]!r}, or a view of it, "
                        f"in attribute {attribute!r}: its memory is freed now. Read it where it is "
                        "used, in backward too, or keep a copy"
                    )

    # Gradients.

    def _offer(self, each: LayerUnit, grads: Gradients) -> dict[str, Array]:
        """Have zeros where the layer had arrays for its gradients in the beginning."""
        offered = {}
        for name, gradient in each.gradients.items():
            if gradient.written:
                array = grads[name] if name in grads else gradient.zeros(self.engine.xp)
                gradient.offer(array)
                offered[name] = array
        return offered

    def _take(self, each: LayerUnit, grads: Gradients, offered: Mapping[str, Array]) -> None:
        """Give the engine the gradients that the layer has left."""
        for name in each.parameters:
            if name not in grads:
                continue  # frozen
            if self._gradient_of is not None:
                value = self._gradient_of(each.layer, name)
                if value is None:
                    continue
            else:
                value = each.gradients[name].take()
                if value is None:
                    raise _no_gradient(each, name)
            if value is not offered.get(name):
                view = grads.empty(name)
                array = self.engine.device.given(value, f"the gradient of {each.name}.{name}")
                if array.dtype != view.dtype and rounds_into(array.dtype, view.dtype):
                    array = array.astype(view.dtype)
                grads[name] = array


def _check_untouched(parameter: Parameter, use: Use) -> None:
    if parameter.place.get() is not parameter.shown:
        raise StateError(f"{use} has replaced an array: {parameter.fixed}")


def _no_gradient(each: LayerUnit, name: str) -> StateError:
    place = each.gradients[name].place
    keys = "".join(f"[{key!r}]" for key in place.keys)
    return StateError(
        f"backward of {each.name!r} has left no gradient of {name!r} in "
        f"{type(place.owner).__mro__[1].__name__}.{place.attribute}{keys}; grads= says where they "
        f"are. If {name!r} is not trained, name it in frozen=, if it is no parameter, in ignored="
    )


def _arrays(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield arrays in an attribute, also in containers and functions down to some depth."""
    if array_module(value) is not None:
        yield value
    elif depth:
        for item in _inside(value):
            yield from _arrays(item, depth - 1)


def _inside(value: Any) -> Iterable[Any]:
    """Return what a value holds.

    Mappings but dicts are left alone: what they give may be made, or read, when it is asked for.
    """
    if isinstance(value, (tuple, list, deque)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, SimpleNamespace):
        return vars(value).values()
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, FunctionType):
        return (*(value.__closure__ or ()), *(value.__defaults__ or ()))
    if isinstance(value, CellType):
        try:
            return (value.cell_contents,)
        except ValueError:  # nothing was assigned to it
            return ()
    return ()
