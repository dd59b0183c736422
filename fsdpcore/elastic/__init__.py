"""Jobs whose ranks come and go."""

from fsdpcore.core.errors import ElasticError
from fsdpcore.elastic.job import Job
from fsdpcore.elastic.run import run

__all__ = ["ElasticError", "Job", "run"]


def __dir__() -> list[str]:
    return __all__
