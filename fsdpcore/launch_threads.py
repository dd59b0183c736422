"""Ranks as threads of this process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from fsdpcore.config import Config
from fsdpcore.errors import PeerFailedError, RankFailedError
from fsdpcore.transport import Transport

# What the other ranks get to notice that one has failed.
STOP_SECONDS = 1.5


class _Rank:
    """One rank's thread and what became of it."""

    def __init__(
        self,
        backend: Transport,
        fn: Callable[..., Any],
        args: Sequence[Any],
        ended: queue.SimpleQueue[_Rank],
    ) -> None:
        self.backend = backend
        self.result: Any = None
        self.error: BaseException | None = None
        self._fn = fn
        self._args = args
        self._ended = ended
        self.thread = threading.Thread(target=self._run, name=f"rank-{backend.rank}", daemon=True)

    def _run(self) -> None:
        try:
            with self.backend:
                self.result = self._fn(self.backend, *self._args)
        except SystemExit as error:
            self.error = error if error.code else None
        except BaseException as error:  # raised again by launch, on the caller's thread
            self.error = error
        finally:
            self._ended.put(self)


def run_threads(
    fn: Callable[..., Any], args: Sequence[Any], world_size: int, config: Config
) -> list[Any]:
    """Run ``fn`` on ``world_size`` threads; see ``launch``."""
    ended: queue.SimpleQueue[_Rank] = queue.SimpleQueue()
    backends = config.transport_class.threads(world_size, config)
    ranks = [_Rank(backend, fn, args, ended) for backend in backends]
    for rank in ranks:
        rank.thread.start()
    failed: list[_Rank] = []
    try:
        for _ in ranks:
            rank = ended.get()
            if rank.error is not None:
                failed.append(rank)
                break
    except BaseException as error:
        for rank in ranks:
            rank.backend.abort(f"the launching thread was interrupted: {type(error).__name__}")
        _join(ranks)
        raise
    stuck = _join(ranks)
    if not failed:
        return [rank.result for rank in ranks]
    raise _failure(ranks, failed[0], stuck)


def _join(ranks: list[_Rank]) -> list[int]:
    """Give all threads a moment to end; return the ranks that did not."""
    end = time.monotonic() + STOP_SECONDS
    for rank in ranks:
        rank.thread.join(max(0.0, end - time.monotonic()))
    return [rank.backend.rank for rank in ranks if rank.thread.is_alive()]


def _failure(ranks: list[_Rank], first: _Rank, stuck: list[int]) -> RankFailedError:
    """The error to raise: about the rank that failed by itself, not one that it took along."""
    own = [r for r in ranks if r.error is not None and not isinstance(r.error, PeerFailedError)]
    culprit = first if first in own or not own else own[0]
    error = culprit.error
    message = f"rank {culprit.backend.rank} failed: {type(error).__name__}: {error}"
    if stuck:
        message += f" (the threads of ranks {stuck} are busy and did not stop)"
    failure = RankFailedError(message, culprit.backend.rank)
    failure.__cause__ = error
    return failure
