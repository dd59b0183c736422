"""What a rank's process takes: the kernel's numbers, read."""

from __future__ import annotations

import mmap
import os
import sys
import time

import numpy as np
import pytest

from fsdpcore.bench.harness import memory
from fsdpcore.bench.harness.memory import MIB, Memory, PssSampler, highest_rss, pss_per_rank

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")


def test_a_peak_is_at_least_what_was_written():
    written = np.ones(64 * MIB, np.uint8)
    assert memory.peak_rss() >= written.nbytes


@linux
def test_a_new_peak_forgets_what_was_freed():
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system has no resettable peak")
    np.ones(256 * MIB, np.uint8)
    before = memory.peak_rss()
    memory.reset_peak()
    assert memory.peak_rss() < before - 128 * MIB


@linux
def test_the_highest_proportional_set_is_seen_though_it_is_gone_at_the_end():
    before = memory.pss()
    with PssSampler() as sampler:
        # Not from malloc, which may have pages left that are this process's already.
        written = np.frombuffer(mmap.mmap(-1, 128 * MIB), np.uint8)
        deadline = time.monotonic() + 60
        while sampler.highest < before + 100 * MIB and time.monotonic() < deadline:
            written[:] = 2  # until it has looked
        del written
    assert sampler.highest >= before + 100 * MIB


def test_where_the_system_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_PROC", tmp_path / "none")
    assert memory.pss() == 0
    assert memory.peak_rss() > MIB  # from getrusage
    memory.reset_peak()


def test_a_measurement_survives_the_way_to_the_bench():
    here = Memory(os.getpid(), 123 * MIB, 45)
    assert Memory.read(here.as_answer()) == here


def test_ranks_that_are_threads_of_one_process_count_it_once():
    threads = [Memory(7, 300, 200)] * 4
    assert (highest_rss(threads), pss_per_rank(threads)) == (300, 50)
    processes = [Memory(7, 300, 200), Memory(8, 310, 100)]
    assert (highest_rss(processes), pss_per_rank(processes)) == (310, 150)
