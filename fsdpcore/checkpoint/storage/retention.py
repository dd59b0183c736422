"""Which checkpoints are kept when new ones come, and how the others go away."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from fsdpcore.checkpoint.storage.ranking import Best, best_first
from fsdpcore.checkpoint.storage.removal import Removal, removable, remove_steps
from fsdpcore.checkpoint.storage.steps import StepName, committed, directories, read_step
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.checks import as_choice, as_int, as_name
from fsdpcore.core.errors import ArgumentError, CheckpointError
from fsdpcore.core.text import listed, nearest


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep: all that any of its rules names, and always the newest.

    Attributes:
        last: keep so many of the newest.
        best: keep so many of those with the best value of ``metric``; of equal ones the newer.
        metric: name of a metric that was saved with the checkpoints. Each save has to have
            it. A checkpoint without it, or whose value is not a number, is not among the best.
        mode: "min" if a smaller value is better, "max" if a larger one is.
        every: keep each step that is a multiple of this.

    Raises:
        ArgumentError: no rule at all, or one that makes no sense.

    Example::

        keep = fc.checkpoint.Retention(last=3, best=2, metric="loss", every=1000)
    """

    last: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: str = "min"
    every: int | None = None

    def __post_init__(self) -> None:
        rules = {"last": self.last, "best": self.best, "every": self.every}
        for what, value in rules.items():
            if value is not None:
                object.__setattr__(self, what, as_int(value, f"{what} of a Retention", minimum=1))
        if all(value is None for value in rules.values()):
            raise ArgumentError(
                "a Retention needs a rule: last=, best= with metric=, or every=; "
                "to keep all checkpoints, pass none"
            )
        if (self.best is None) != (self.metric is None):
            raise ArgumentError("best and metric of a Retention go together: how many, and by what")
        if self.metric is not None:
            as_name(self.metric, "metric of a Retention")
            if self.metric.startswith("-"):
                raise ArgumentError(
                    f"metric of a Retention is {self.metric!r:.80}; where larger is better, give "
                    f"the name {self.metric[1:]!r:.80} and mode='max'"
                )
        as_choice(self.mode, ("min", "max"), "mode of a Retention")

    def check_metrics(self, names: Collection[str]) -> None:
        """Raise ArgumentError unless a save has the metric that checkpoints are ranked by.

        Args:
            names: of the metrics of the save.
        """
        if self.metric is not None and self.metric not in names:
            there = listed(sorted(names)) or "none"
            raise ArgumentError(
                f"the Retention keeps the best by {self.metric!r:.80}, but the metrics of "
                f"this save are {there}{nearest(self.metric, names)}; give save() "
                "metrics= with that name"
            )

    def keeps(self, checkpoints: Iterable[tuple[int, Mapping[str, float]]]) -> set[int]:
        """Return the steps to keep of those that are given; pure.

        Args:
            checkpoints: pairs of a step and its metrics, by name; in any order.
        """
        known = sorted(checkpoints, key=lambda each: each[0], reverse=True)
        order = [step for step, _ in known]
        kept = set(order[: self.last or 1])
        if self.every is not None:
            kept.update(step for step in order if step % self.every == 0)
        if self.best is not None and self.metric is not None:
            by = Best(self.metric, largest=self.mode == "max")
            kept.update(best_first(known, by)[: self.best])
        return kept


def prune(storage: Storage, retention: Retention, protect: Collection[StepName] = ()) -> Removal:
    """Remove the committed checkpoints that need not be kept, the oldest first; blocks.

    It can be stopped anywhere: each checkpoint is there or not, and what is left of one is removed
    at the next save. Besides the newest by its marker, the newest that is valid in all but the
    contents of its files is kept too. One that somebody reads is left for the next time, and so is
    everything without a valid marker.

    Args:
        storage: where.
        retention: what to keep.
        protect: what to keep besides; known to be valid, such as what was just committed.

    Raises:
        OSError: the folder could not be read; nothing was removed.
    """
    known = committed(storage)
    kept = retention.keeps((name.step, marker.metrics) for name, marker in known.items())
    unkept = [name for name in known if name.step not in kept and name not in protect]
    newest = {name.step: name for name in reversed(known)}
    superseded = [
        name
        for name in directories(storage)
        if name.step in newest and name < newest[name.step] and name not in protect
    ]
    doomed = {*unkept, *removable(storage, superseded)}
    if doomed:
        doomed.discard(_newest_valid(storage, protect))
    return remove_steps(storage, sorted(doomed))


def _newest_valid(storage: Storage, valid: Collection[StepName]) -> StepName | None:
    for name in directories(storage):
        if name in valid:
            return name
        with suppress(CheckpointError, OSError):
            read_step(storage, name)
            return name
    return None
