"""``Report``: a plan beside what was measured in a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdpcore.core import text
from fsdpcore.core.checks import as_finite, as_instance
from fsdpcore.fsdp.plan.plan import Plan, placed
from fsdpcore.fsdp.step.step_times import StepTimes


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one rank, as it was; None for what nobody measured.

    Attributes:
        peak_bytes: as ``Plan.peak_bytes``.
        bytes_sent: as ``Plan.bytes_sent``.
        step_seconds: of the step.
        exposed_seconds: in which the rank waited for communication.
        gathers: number of all_gathers, as ``Plan.gathers``.
        reductions: of units' gradients, as ``Plan.reductions``.

    Raises:
        ArgumentError: a number that is negative, or not finite.
    """

    peak_bytes: int | None = None
    bytes_sent: int | None = None
    step_seconds: float | None = None
    exposed_seconds: float | None = None
    gathers: int | None = None
    reductions: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                as_finite(value, f"{field.name} of MeasuredStep", minimum=0)


class ReportRow(NamedTuple):
    """One line of a report; ``ratio`` is measured / predicted, None where there is none."""

    name: str
    predicted: float | None
    measured: float | None
    ratio: float | None


@dataclass(frozen=True)
class Report:
    """Compares a plan with what was measured.

    Args:
        plan: of the step.
        measured: in the step.
        times: where its seconds went, by unit and pass; None where nobody measured it.
    """

    plan: Plan
    measured: MeasuredStep
    times: StepTimes | None = None

    def __post_init__(self) -> None:
        as_instance(self.plan, Plan, "plan of a Report", "a Plan")
        as_instance(self.measured, MeasuredStep, "measured of a Report", "a MeasuredStep")

    @property
    def rows(self) -> tuple[ReportRow, ...]:
        """All that can be compared, in the order of ``MeasuredStep``."""
        return tuple(
            _row(field.name, getattr(self.plan, field.name), getattr(self.measured, field.name))
            for field in dataclasses.fields(self.measured)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the rows by name, and the times of each unit under "times", for JSON."""
        found: dict[str, Any] = {
            row.name: {
                "predicted": row.predicted,
                "measured": row.measured,
                "ratio": row.ratio,
            }
            for row in self.rows
        }
        if self.times is not None:
            found["times"] = [row._asdict() for row in self.times.rows]
        return found

    def __str__(self) -> str:
        rows = [
            (
                row.name.replace("_", " ").removesuffix(" bytes").removesuffix(" seconds"),
                _words(row.name, row.predicted),
                _words(row.name, row.measured),
                "-" if row.ratio is None else f"{row.ratio:.3f}",
            )
            for row in self.rows
        ]
        header = ("", "predicted", "measured", "ratio")
        compared = f"{placed(self.plan)}\n\n{text.columns(header, rows)}"
        return compared if self.times is None else f"{compared}\n\n{self.times}"


def _row(name: str, predicted: float | None, measured: float | None) -> ReportRow:
    ratio = None
    if predicted is not None and measured is not None:
        if predicted:
            ratio = measured / predicted
        elif not measured:
            ratio = 1.0  # nothing was predicted, and nothing came
    return ReportRow(name, predicted, measured, ratio)


def _words(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if "bytes" in name:
        return text.size(value)
    return text.duration(value) if name.endswith("seconds") else str(value)
