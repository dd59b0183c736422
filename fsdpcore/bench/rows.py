"""What came of a case of a collective, and the record of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpcore.bench.cases import Case, algbw, busbw_factor
from fsdpcore.bench.harness import record
from fsdpcore.bench.harness.measurements import Measurement, Spread, beside_ours


@dataclass
class Row(Measurement):
    """One contestant on one case of a collective."""

    case: Case = field(kw_only=True)

    @property
    def algbw(self) -> float:
        """Size over time, in GB/s."""
        return algbw(self.case.size, self.seconds)

    @property
    def busbw(self) -> float:
        """``algbw`` times the operation's factor, in GB/s."""
        return self.algbw * busbw_factor(self.case.operation, self.case.world_size)


def content(cases: Sequence[Mapping[str, Row]]) -> dict[str, Any]:
    """What the record of a run holds of these cases, each with its rows by contestant."""
    return {
        "rows": [_row(row) for rows in cases for row in rows.values()],
        "comparisons": [item for rows in cases for item in _comparisons(rows)],
    }


def _row(row: Row) -> dict[str, Any]:
    found = record.row(row, "us", algbw_gbs=row.algbw, busbw_gbs=row.busbw)
    return {"contestant": row.contestant, **_case(row.case), **found}


def _case(case: Case) -> dict[str, Any]:
    return {
        "operation": case.operation,
        "size": case.size,
        "count": case.count,
        "type": case.dtype,
        "redop": case.op,
        "root": case.root,
        "ranks": case.world_size,
        "place": "in" if case.in_place else "out",
    }


def _comparisons(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    return [
        {
            "peer": name,
            **_case(rows[name].case),
            "ratio": compared.ratio._asdict(),
            "difference_us": Spread(*(1e6 * value for value in compared.difference))._asdict(),
            "best_difference_us": 1e6 * compared.best_difference,
            "overhead_percent": compared.overhead._asdict(),
        }
        for name, compared in beside_ours(rows).items()
    ]
