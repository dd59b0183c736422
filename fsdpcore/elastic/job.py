"""``Job``: what a program that may lose and gain ranks asks, tells and keeps."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from fsdpcore.checkpoint.load.load import load
from fsdpcore.checkpoint.plan.contents import check_root
from fsdpcore.checkpoint.plan.kinds import PerRank
from fsdpcore.checkpoint.storage.opening import DISK_TIMEOUT, StoragePath
from fsdpcore.collectives import all_gather
from fsdpcore.collectives.objects import all_gather_object
from fsdpcore.comm.backend import Backend
from fsdpcore.core.digests import DIGEST_BYTES
from fsdpcore.core.errors import CheckpointNotFoundError, MismatchError, StateError
from fsdpcore.elastic.pace import Pace
from fsdpcore.elastic.recovery import recover
from fsdpcore.elastic.seat import Seat
from fsdpcore.elastic.versions import NONE, Draft, State, Versions
from fsdpcore.fsdp.engine import FSDP, check_idle

_LOG = logging.getLogger("fsdpcore")
_NOT_ALIKE = bytes(DIGEST_BYTES)


def _taken_over(given: Any, loaded: Any) -> Any:
    """Return a state with what was loaded, told apart by rank as it was: dicts are the same."""
    if isinstance(given, PerRank):
        return given if loaded is given.value else PerRank(loaded, default=given.default)
    if isinstance(given, dict) and isinstance(loaded, dict):
        for key, value in loaded.items():
            given[key] = _taken_over(given.get(key), value)
        return given
    if type(given) is type(loaded) and type(given) in (list, tuple) and len(given) == len(loaded):
        return type(given)(map(_taken_over, given, loaded))
    return loaded


def _engines(state: State) -> list[FSDP]:
    values = state.values() if isinstance(state, Mapping) else [state]
    return [value for value in values if isinstance(value, FSDP)]


class HandedOver(BaseException):
    """Unwinds the program at a commit at which all ranks have handed over."""


class Job:
    """A job, as the program of one rank sees it in one generation; ``run`` makes it.

    Attributes:
        backend: all ranks of this generation.
        rank, world_size: of the backend.
        generation: its number, from 1. Where no agent has started the ranks, there is only one.
        reason: why it has begun, in words: "the job begins", "rank 2 on 10.0.0.3 has ended".
            Empty where no agent has started the ranks.
        commits: how many commits the state is behind that this rank has: 0, or what ``restore`` has
            loaded, and one more with each ``commit``.
        state: what ``restore`` has returned, and ``commit`` keeps.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        generation: int = 1,
        reason: str = "",
        seat: Seat | None = None,
        versions: Versions | None = None,
        every: int = 1,
        checkpoints: StoragePath | None = None,
    ) -> None:
        self.backend = backend
        self.generation, self.reason = generation, reason
        self.commits = 0
        self.state: Any = None
        self._seat, self._every, self._checkpoints = seat, every, checkpoints
        self._versions = versions
        self._restored = False
        self._kept = 0  # commits, when a version was made or loaded
        self._pace = Pace()
        self._noted = 0
        self._begin_step()

    @property
    def rank(self) -> int:
        """Of this rank, in this generation."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """How many ranks this generation has."""
        return self.backend.world_size

    @property
    def elastic(self) -> bool:
        """Whether ranks may come and go: an agent has started them (``fsdpcore run --elastic``)."""
        return self._seat is not None

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Of each rank the seconds that it computed before the last commit; empty before one."""
        return self._pace.seconds

    @property
    def slowest(self) -> int | None:
        """The rank that computed longest before the last commit; None before one."""
        return self._pace.slowest

    def restore(self, state: State) -> Any:
        """Bring a state to the newest commit; a collective, which blocks. Called once.

        It comes from the memory of the ranks, where each part is on two hosts. If a part is lost,
        the newest checkpoint on the disk is taken, whose step is the number of commits. If there is
        none, the state stays as it is, and ``commits`` is 0: so make all of it within the function
        that ``run`` decorates, since what is outside may have come further.

        Args:
            state: what ``checkpoint.load`` takes as its target, and ``checkpoint.save`` as a state:
                an engine, or a mapping. It is kept, and read at each commit. Its keys are the same
                on all ranks, and its structure and shapes in all generations.

        Returns:
            The state, which ``commit`` reads from now on. In a dict, those values are new ones that
            cannot be changed in place (numbers, text, tuples); a ``PerRank`` has its own in
            ``value``.

        Raises:
            StateError: it was called before.
            MismatchError: ranks have different keys in the state.
            The errors of ``checkpoint.load``, but that there may be no checkpoint.

        Example::

            state = job.restore({"model": engine, "data": stream, "best": 0.0})
            for step in range(job.commits, steps):
                ...
                state["best"] = max(state["best"], accuracy)
                job.commit()
        """
        if self._restored:
            raise StateError("restore() was called before; call it once, with all of the state")
        check_root(state)
        self._restored = True
        self.state = state
        first = self.elastic and self.generation == 1 and self.rank == 0
        if first and any(engine.virtual_ranks is None for engine in _engines(state)):
            _LOG.warning("FSDP without virtual_ranks: the bits change with the number of ranks")
        found = None
        if self._seat is not None:
            found = recover(self._seat.vault, self.backend, state)
        if found is not None and self._versions is not None:
            whole, loaded = found
            self.commits, self.state = whole.version.commit, _taken_over(state, loaded.state)
            self._versions.spread(whole)
        else:
            self._begin(self._load())
        self._kept = self.commits
        self._begin_step()
        return self.state

    def _begin(self, loaded: bool) -> None:
        """Begin with what no rank had in its memory, and have it in those of two hosts."""
        if self.generation > 1 and self.rank == 0:
            where = f"from the checkpoint of commit {self.commits}" if loaded else "from the start"
            _LOG.warning(
                "generation %d: a part of the state is in no rank's memory any more; the program "
                "goes on %s",
                self.generation,
                where,
            )
        if self._versions is not None and self.world_size > 1:
            self._check_names()
            self._versions.make(self._versions.draft(self.state, self.commits))
            self._versions.wait()
            self.backend.barrier(DISK_TIMEOUT)

    def _check_names(self) -> None:
        """Refuse a state that ranks could not take over from each other."""
        names = sorted(map(str, self.state)) if isinstance(self.state, Mapping) else []
        told = all_gather_object(names, self.backend, label="restore, names")
        if odd := sorted(set[str]().union(*told) - set[str](names).intersection(*told)):
            raise MismatchError(
                f"restore: not all ranks have {odd[0]!r} in the state; its keys are the same on all"
            )

    def _load(self) -> bool:
        """Load the newest checkpoint on the disk; False if there is none."""
        if self._checkpoints is None:
            return False
        try:
            loaded = load(self._checkpoints, self.state, self.backend)
        except CheckpointNotFoundError:
            return False
        self.commits, self.state = loaded.step, _taken_over(self.state, loaded.state)
        return True

    def commit(self) -> None:
        """End a step: what was computed so far is kept; a collective.

        Called by all ranks, outside of a step of the engine. It costs one small ``all_gather``. A
        version of the state is made every so many commits (``run(every=...)``), once the one before
        has been copied to another host: for that it blocks as long as copying this rank's part
        within its memory takes. The copies travel in the background.

        Where ranks are to come or to leave, all hand over here: the function ends, and is called
        again with the ranks that there are then.

        Raises:
            ArgumentError, MismatchError: the state makes no sense, or ranks differ in it.
            StateError: ``restore`` was not called, or a step of an engine in the state is open.
            CommunicationError: a rank is gone.
        """
        if not self._restored:
            raise StateError("commit() keeps the state that restore() was given; call that first")
        for engine in _engines(self.state):
            check_idle(engine, "commit()")
        seconds = self._computed()
        self.commits += 1
        seat, versions = self._seat, self._versions
        wanted = bool(seat is not None and seat.changed)
        leaves = bool(seat is not None and seat.leaves)
        complete = NONE if versions is None else versions.complete()
        draft = self._draft(complete)
        alike = _NOT_ALIKE if draft is None else draft.alike or _NOT_ALIKE
        row = [round(seconds * 1e9), complete, wanted, leaves, *np.frombuffer(alike, np.int64)]
        rows = all_gather(np.array([row], np.int64), self.backend, label="commit")
        self._pace.note((rows[:, 0] * 1e-9).tolist(), warn=self.rank == 0)
        if versions is not None:
            complete = int(rows[:, 1].min())
            versions.settle(complete)
            if seat is not None and rows[:, 2].any():
                self._hand_over(seat, versions, complete, np.flatnonzero(rows[:, 3]).tolist())
            if draft is not None and complete == versions.made:
                same = alike != _NOT_ALIKE and (rows[:, 4:] == rows[0, 4:]).all()
                versions.make(draft, alike=bool(same))
                self._kept = self.commits
        self._begin_step()

    def _draft(self, complete: int) -> Draft | None:
        """Describe a version, if it is time for one, and the one before is complete here."""
        versions, due = self._versions, self.commits - self._kept >= self._every
        if versions is None or not due or self.world_size == 1 or complete != versions.made:
            return None
        return versions.draft(self.state, self.commits)

    def _begin_step(self) -> None:
        recorder, clock = self.backend.root.recorder, self.backend.clock
        self._since = clock.nanoseconds()
        _, self._noted = recorder.waited_since(self._since, self._noted)

    def _computed(self) -> float:
        """The seconds of this step in which this rank has not waited for others."""
        root = self.backend.root
        waited, self._noted = root.recorder.waited_since(self._since, self._noted)
        return max(0.0, (root.clock.nanoseconds() - self._since) * 1e-9 - waited)

    def _hand_over(
        self, seat: Seat, versions: Versions, complete: int, leaving: Collection[int]
    ) -> None:
        """See to it that those who stay have all of the state, and unwind the program."""
        if complete != versions.made:
            # Some have to wait for long. Making the next version has less patience with them, and
            # needs the memory of the one before this.
            versions.wait()
            self.backend.barrier(DISK_TIMEOUT)
            versions.settle(versions.made)
        versions.make(versions.draft(self.state, self.commits), leaving)
        versions.wait()
        self.backend.barrier(DISK_TIMEOUT)
        seat.release()
        leaves = self.rank in leaving  # whatever it was asked since: others have gone by this
        seat.tell("paused", number=self.generation, commit=self.commits, leaves=leaves)
        raise HandedOver

    def leave(self, reason: str = "it was asked to") -> None:
        """Have this rank leave at the next commit, in order; from any thread, or a signal handler.

        Its process ends well once the others have its part of the state. Without an agent there is
        nobody to go on, and it does nothing but say so in the log.

        Args:
            reason: in words, for the log and the other ranks.
        """
        if self._seat is None:
            _LOG.warning("rank %d was to leave (%s): not elastic", self.rank, reason)
        else:
            self._seat.leave(reason)
