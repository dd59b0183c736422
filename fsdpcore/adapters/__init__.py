"""How frameworks and models plug into the engine.

==============  ====================================================================================
``layers``      ``LayerStack``, ``Chain``: objects with ``forward`` and ``backward``
``function``    ``train_step``: a function that returns a loss and all gradients
``fully_shard``  objects that keep their parameters in attributes
``autograd``    functions that HIPS autograd differentiates
``jax``         functions that JAX differentiates, on the host
``arrays``      any of these, with arrays of another library
==============  ====================================================================================

The first three are in ``fsdpcore`` itself; the others are modules of this package.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpcore.adapters import arrays, autograd, jax

__all__ = ["arrays", "autograd", "jax"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return __all__
