"""Jobs whose ranks come and go."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from fsdpcore.core.errors import ElasticError

if TYPE_CHECKING:
    from fsdpcore.elastic.job import Job
    from fsdpcore.elastic.local import ElasticThreads, launch
    from fsdpcore.elastic.program import run

__all__ = ["ElasticError", "ElasticThreads", "Job", "launch", "run"]

# What an agent has no use for, and what takes as long to import as all the rest.
_LATER = {"ElasticThreads": "local", "Job": "job", "launch": "local", "run": "program"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(_import_module(f"{__name__}.{_LATER[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return __all__
