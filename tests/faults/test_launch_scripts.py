"""Scripts that call ``launch`` or ``init``: the guard, and ranks that other launchers start."""

from __future__ import annotations

import os
import pickle
import re
import sys

import pytest
from support.jobs import Job, finished, python

from fsdpcore.core import compiling
from fsdpcore.launch import session

HEAD = """
import sys
import numpy as np
import fsdpcore as fc
"""


pytestmark = pytest.mark.side_by_side(4)


# The main module.


def test_a_missing_guard_is_said_once(script):
    source = """
def main(backend):
    return backend.rank

fc.launch(main, world_size=2, transport="zmq")
"""
    done = finished(python(script(HEAD + source)))
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert re.search(r"RankFailedError: rank \d failed: StateError: launch\(\)", last)
    assert """'if __name__ == "__main__":'""" in last
    assert done.err.count("if __name__") == 2, "in the error, and in its cause"


def test_a_main_module_that_ends_on_import_is_said(script):
    source = """
def main(backend):
    return backend.rank

if __name__ == "__main__":
    fc.launch(main, world_size=2, transport="zmq")
sys.exit(0)
"""
    done = finished(python(script(HEAD + source)))
    assert done.code == 1
    assert "sys.exit(0)" in done.err.splitlines()[-1]


def test_what_the_main_module_defines_goes_both_ways(script):
    source = """
class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right

def main(backend, pair):
    return Pair(pair.right, backend.rank), sys.argv[1:]

if __name__ == "__main__":
    results = fc.launch(main, world_size=2, transport="zmq", args=[Pair(1, "x")])
    print([(type(p) is Pair, p.left, p.right, argv) for p, argv in results])
"""
    done = finished(python(script(HEAD + source), "--some", "argument"))
    assert (done.code, done.err) == (0, "")
    argv = ["--some", "argument"]
    assert done.out == f"{[(True, 'x', rank, argv) for rank in range(2)]}\n"


SESSION = """
import functools, sys, fsdpcore as fc

class Pair:
    pass

before = Pair

class Pair:
    made = 0

    def __init__(self, left, right):
        self.left, self.right = left, right

    def told(self):
        return word()

def word():
    return "before"

@functools.lru_cache(maxsize=9, typed=True)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

fib.note = "attribute"

class Outer:
    class Pair:
        pass

    class Inner:
        pass

def program(extra):
    def main(backend, pair):
        Pair.made += 1
        assert type(pair) is Pair and pair.told() == "before"
        told = fc.all_gather_object(Pair(fib(20), backend.rank), backend, pickle=True)
        assert [(type(p), p.left, p.right) for p in told] == [(Pair, 6765, 0), (Pair, 6765, 1)]
        assert (fib.cache_info()[1:], fib.note) == ((21, 9, 9), "attribute")
        assert fib.cache_parameters()["typed"]
        told = fc.all_gather_object([Pair(1, 2), Outer(), Outer.Inner()], backend, pickle=True)
        assert {tuple(map(type, each)) for each in told} == {(Pair, Outer, Outer.Inner)}
        assert before is not Pair
        return Pair(pair.left, extra + backend.rank), Pair, lambda: extra + Pair.made
    return main

results = fc.launch(program(5), world_size=2, transport="zmq", args=[Pair("x", 0)])

def word():
    return "after"

for pair, kind, function in results:
    print(type(pair) is kind is Pair, Pair.made, pair.left, pair.right, pair.told(), function())

def fails(backend):
    raise ValueError("the rank is unwell")

fc.launch(fails, transport="zmq")
"""


@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_functions_and_classes_of_a_session_go_both_ways(script, how):
    """By value, since ranks cannot import it; the session keeps its own classes as they are."""
    command = python("-c", SESSION)
    if how == "stdin":
        command = ["sh", "-c", f"{sys.executable} < {script(SESSION)}"]
    done = finished(command)
    assert done.code == 1
    assert done.out == "".join(f"True 0 x {5 + rank} after 5\n" for rank in range(2))
    line = SESSION.partition("raise")[0].count("\n") + 1
    assert re.search(rf'File "<(string|stdin)>", line {line}, in fails', done.err)
    assert done.err.endswith("RankFailedError: rank 0 failed: ValueError: the rank is unwell\n")


def test_a_cached_function_in_anothers_name_is_refused():
    """Of it only that one can be seen, not what it calls."""
    source = """
import functools, fsdpcore as fc

def single(x):
    return x

@functools.wraps(single)
@functools.cache
def doubled(x):
    return 2 * x

print(fc.launch(lambda backend: doubled(3), transport="zmq"))
"""
    done = finished(python("-c", source))
    assert (done.code, done.out) == (1, "")
    assert "something of that cannot be pickled" in done.err


def test_what_ranks_can_import_goes_by_its_name():
    assert pickle.loads(session.dumps(compiling.available)) is compiling.available


# init().


def test_init_without_a_launcher_is_a_job_of_one_rank():
    source = """
import fsdpcore as fc
for transport in ("sim", "zmq"):
    backend = fc.init(transport)
    print(backend.world_size, fc.all_reduce([3], backend).tolist())
"""
    done = finished(python("-W", "error", "-c", source))
    assert (done.code, done.out, done.err) == (0, "1 [3]\n" * 2, "")


# Other launchers.

PROGRAM = """
def main(backend):
    total = fc.all_reduce(np.full(4, backend.rank + 1), backend)
    return backend.rank, backend.world_size, total.tolist()

if __name__ == "__main__":
    print(fc.launch(main), flush=True)
"""


def launch_all(path, environs):
    """Start one process per rank, as a launcher would, and let them end."""
    jobs = [Job(python(path), environ) for environ in environs]
    try:
        return [job.finish() for job in jobs]
    finally:
        for job in jobs:
            job.kill()


def torch_style(rank, size, port):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port - 1),  # which torchrun holds itself
        "TORCHELASTIC_RUN_ID": "7",
    }


def test_ranks_of_torchrun(script, free_port):
    path = script(HEAD + PROGRAM)
    port = free_port()
    done = launch_all(path, [torch_style(rank, 2, port) for rank in range(2)])
    for rank, each in enumerate(done):
        assert (each.code, each.err) == (0, "")
        assert each.out == f"[({rank}, 2, [3, 3, 3, 3])]\n"


def test_ranks_of_srun_need_no_address(script):
    # Host and port follow from the step: here 10000 and its number, which no other test listens at.
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "20000",
        "SLURM_STEP_ID": str(os.getpid() % 10_000),
    }
    environs = [{**step, "SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)} for k in range(2)]
    done = launch_all(script(HEAD + PROGRAM), environs)
    assert [(each.code, each.err) for each in done] == [(0, ""), (0, "")]
    assert [each.out for each in done] == [f"[({k}, 2, [3, 3, 3, 3])]\n" for k in range(2)]


def test_rank_and_world_size_by_hand_with_an_address(script, free_port):
    url = {"FSDPCORE_TRANSPORT": f"zmq://127.0.0.1:{free_port()}", "WORLD_SIZE": "2"}
    done = launch_all(script(HEAD + PROGRAM), [{**url, "RANK": str(rank)} for rank in range(2)])
    assert [(each.code, each.err) for each in done] == [(0, ""), (0, "")]
    assert [each.out for each in done] == [f"[({k}, 2, [3, 3, 3, 3])]\n" for k in range(2)]


def test_a_job_of_one_that_was_meant_for_more_says_so():
    source = "import fsdpcore as fc\nfc.launch(lambda backend: None)"
    done = finished(python("-c", source), {"WORLD_SIZE": "2"})
    assert done.code == 0
    (line,) = done.err.splitlines()
    assert "a job of a single rank, though WORLD_SIZE=2 is set" in line


def test_ranks_of_mpirun_meet_where_the_url_says(script, free_port):
    url = f"zmq://127.0.0.1:{free_port()}"

    def environ(rank):
        return {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "FSDPCORE_TRANSPORT": url,
        }

    done = launch_all(script(HEAD + PROGRAM), [environ(rank) for rank in range(2)])
    assert [each.out for each in done] == [f"[({rank}, 2, [3, 3, 3, 3])]\n" for rank in range(2)]


def test_an_address_in_the_url_beats_what_torchrun_sets(script, free_port):
    url = f"zmq://127.0.0.1:{free_port()}"
    elsewhere = {"MASTER_ADDR": "203.0.113.1", "FSDPCORE_TRANSPORT": url}
    environs = [{**torch_style(rank, 2, 29501), **elsewhere} for rank in range(2)]
    for each in launch_all(script(HEAD + PROGRAM), environs):
        assert (each.code, each.err) == (0, "")


def test_a_launcher_that_names_no_address_asks_for_one(script):
    environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    environ["FSDPCORE_TRANSPORT"] = "zmq"
    done = finished(python(script(HEAD + PROGRAM)), environ)
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert "zmq://HOST:PORT" in line


def test_a_rank_that_does_not_come_is_named_at_the_deadline(script, free_port):
    deadline, port = {"FSDPCORE_RENDEZVOUS_TIMEOUT": "5"}, free_port()
    environs = [{**torch_style(rank, 3, port), **deadline} for rank in (0, 2)]
    for rank, each in zip((0, 2), launch_all(script(HEAD + PROGRAM), environs), strict=True):
        assert each.code == 1
        (line,) = each.err.splitlines()
        assert line.startswith(f"rank {rank} failed: RendezvousError")
        assert "rank 1 of 3 did not come" in line
        assert f"127.0.0.1:{port}" in line
        assert "the port after MASTER_PORT" in line


def test_an_uncaught_exception_under_another_launcher_ends_all_ranks(script, free_port):
    source = """
backend = fc.init()
backend.barrier()
if backend.rank == 1:
    raise ValueError("rank one is unwell")
backend.barrier()
"""
    port = free_port()
    done = launch_all(script(HEAD + source), [torch_style(rank, 3, port) for rank in range(3)])
    assert [each.code for each in done] == [1, 1, 1]
    assert "Traceback" in done[1].err
    for rank in (0, 2):
        (line,) = done[rank].err.splitlines()
        words = f"rank {rank}: stopped, because rank 1 failed: ValueError: rank one is unwell"
        assert line.startswith(words)


def test_a_threads_transport_under_a_launcher_is_a_conflict(script):
    environ = {**torch_style(1, 2, 29501), "FSDPCORE_TRANSPORT": "sim"}
    done = finished(python(script(HEAD + PROGRAM)), environ)
    (line,) = done.err.splitlines()
    assert "rank 1 of 2 (torchrun)" in line
    assert "threads of one process" in line


def test_variables_that_make_no_sense(script):
    done = finished(python(script(HEAD + PROGRAM)), torch_style(5, 2, 29501))
    assert done.code == 1
    assert "RANK=5 is not a rank of WORLD_SIZE=2" in done.err.splitlines()[-1]


def test_a_class_of_a_session_goes_to_the_ranks_of_each_launch():
    source = """
import fsdpcore as fc

class Pair:
    pass

def main(backend, pair):
    return type(pair) is Pair

for _ in range(2):
    print(fc.launch(main, world_size=2, transport="zmq", args=[Pair()]))
"""
    done = finished(python("-c", source))
    assert (done.code, done.out) == (0, "[True, True]\n" * 2), done.err
