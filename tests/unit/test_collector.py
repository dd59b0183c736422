"""The collector of garbage is off where it is told to be, and afterwards as it was."""

from __future__ import annotations

import gc
import threading

import pytest

from fsdpcore.core import collector
from fsdpcore.core.collector import collector_paused


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    # A thread that another test has left may be within a pause of its own.
    monkeypatch.setattr(collector, "_pause", collector._Pause())
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_afterwards_as_it_was_also_behind_an_error(on):
    (gc.enable if on else gc.disable)()
    with pytest.raises(KeyError), collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() is on


def test_the_last_of_several_threads_turns_it_on():
    gc.enable()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with collector_paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()  # the other thread's pause goes on
    leave.set()
    thread.join()
    assert gc.isenabled()
