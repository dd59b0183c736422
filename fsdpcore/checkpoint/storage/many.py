"""The same done with many files, several at a time: each takes a round trip to a server, maybe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_FEW = 32
"""So many are done one after the other: threads would take longer."""

_THREADS = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def for_many(action: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Return what ``action`` returns for each item, in their order; blocks.

    Raises:
        Exception: what it raised for the first item that it did for; it is not called for all then.
    """
    given = list(items)
    if len(given) <= _FEW:
        return [action(each) for each in given]
    pool = ThreadPoolExecutor(_THREADS, "fsdpcore-files")
    try:
        return list(pool.map(action, given))
    finally:
        pool.shutdown(cancel_futures=True)
