"""Jobs whose ranks come and go."""

from fsdpcore.core.errors import ElasticError
from fsdpcore.elastic.job import Job
from fsdpcore.elastic.local import ElasticThreads, launch
from fsdpcore.elastic.run import run

__all__ = ["ElasticError", "ElasticThreads", "Job", "launch", "run"]


def __dir__() -> list[str]:
    return __all__
