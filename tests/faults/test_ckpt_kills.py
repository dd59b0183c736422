"""Saving processes that are killed for real: what is loaded is the save before, or that one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import support.ckpt_kill_loop
from support.cases import only_if_asked_for
from support.jobs import clean_environ, finished, python

LOOP = Path(support.ckpt_kill_loop.__file__)


def loop(folder: Path, kills: int, seed: int) -> str:
    environ = clean_environ(PYTHONPATH=os.fspath(LOOP.parents[1]), OPENBLAS_NUM_THREADS="1")
    done = finished(python(LOOP, folder, kills, seed), environ)
    assert (done.code, done.err) == (0, "")
    assert f"{kills} kills" in done.out
    return done.out


def test_a_few_kills(tmp_path):
    loop(tmp_path, 15, 1)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(5))
def test_many_kills(tmp_path, seed, request):
    only_if_asked_for(request)
    print(loop(tmp_path, 120, 100 + seed))
