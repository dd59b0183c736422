"""Where the threads of an elastic job meet."""

from __future__ import annotations

import pytest

import fsdpcore as fc
from fsdpcore.comm.place import RankPlace
from fsdpcore.elastic.threads import Gatherings
from fsdpcore.launch.config import resolve


def test_nothing_is_kept_of_a_meeting_that_is_over() -> None:
    gatherings = Gatherings(resolve({"transport": "sim"}, {}))
    gatherings.meet(RankPlace(0, 1, 0, 1, "met", "", given_up=lambda: "")).close()
    with pytest.raises(fc.RendezvousError):
        gatherings.meet(RankPlace(0, 2, 0, 2, "not met", "", given_up=lambda: "it is over"))
    assert not gatherings._gatherings
