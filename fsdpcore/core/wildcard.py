"""``ANY``: in place of a rank, or of a tag, where a receive takes what comes first."""

from __future__ import annotations

import enum
from typing import Final


class Wildcard(enum.Enum):
    """The type of ``ANY``."""

    ANY = "ANY"

    def __repr__(self) -> str:
        return "fc.ANY"


ANY: Final = Wildcard.ANY
"""Any rank, or any tag: ``backend.recv(out, fc.ANY, tag=fc.ANY)``."""

ANY_NUMBER = -1
"""What stands for it among ranks and tags, which are not negative."""
