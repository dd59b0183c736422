"""Process ranks from the cells of a notebook, in a real kernel."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from support import jobs

nbformat = pytest.importorskip("nbformat", reason="the extra test has it, with nbclient")
nbclient = pytest.importorskip("nbclient")

EXAMPLE = Path(__file__).parents[2] / "examples/notebook.ipynb"

WAITS = """
import os, time
from pathlib import Path
Path("kernel").write_text(str(os.getpid()))

def waits(backend):
    print("I wait")
    Path(f"rank{backend.rank}").write_text(str(os.getpid()))
    time.sleep(600)

fc.launch(waits, world_size=2, transport="zmq")
"""

AGAIN = """
def again(backend):
    for number in range(200):
        print(number)
    return fc.all_reduce(np.int64(backend.rank + 1), backend)

print("begin")
totals = fc.launch(again, world_size=2, transport="zmq")
print("end", *totals)
"""

FAILS = """
def fails(backend):
    raise ValueError("the rank is unwell")  # in a cell

fc.launch(fails, transport="zmq")
"""


def interrupt(folder: Path) -> None:
    """Interrupt the kernel once both ranks wait."""
    files = [folder / name for name in ("kernel", "rank0", "rank1")]
    end = time.monotonic() + jobs.PATIENCE
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(int(files[0].read_text()), signal.SIGINT)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The example, and after it cells that end badly and well; with the folder that they ran in."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(EXAMPLE, as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in (WAITS, AGAIN, FAILS)]
    for cell in (notebook.cells[-3], notebook.cells[-1]):
        cell.metadata["tags"] = ["raises-exception"]
    client = nbclient.NotebookClient(
        notebook, timeout=jobs.PATIENCE, resources={"metadata": {"path": str(folder)}}
    )
    environ = jobs.clean_environ(PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    # With it, a kernel does not capture what is printed to its descriptors.
    environ.pop("PYTEST_CURRENT_TEST", None)
    watcher = threading.Thread(target=interrupt, args=(folder,), daemon=True)
    watcher.start()
    client.execute(env=environ)
    watcher.join()
    return [cell for cell in notebook.cells if cell.cell_type == "code"], folder


def printed(cell):
    """Everything that a cell has printed to standard output."""
    return "".join(out.text for out in cell.outputs if out.get("name") == "stdout")


def test_the_example_has_no_outputs():
    cells = nbformat.read(EXAMPLE, as_version=4).cells
    assert [cell.outputs for cell in cells if cell.cell_type == "code"] == [[]] * 4
    assert {cell.get("execution_count") for cell in cells} == {None}


def test_the_example_trains_and_shows_each_rank(run):
    cells, _ = run
    lines = printed(cells[2]).splitlines()
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        steps = [re.fullmatch(r"\[.\] step (\d+): loss (\d+\.\d+)", line) for line in own]
        assert [int(found[1]) for found in steps] == [10, 20, 30, 40]
        assert float(steps[-1][2]) < 0.2 * float(steps[0][2])
    assert len(lines) == 8
    losses = [float(line.split()[1]) for line in printed(cells[3]).splitlines()]
    assert len(losses) == 8
    assert losses[-1] < 0.1 * losses[0]


def test_an_interrupt_ends_the_ranks(run):
    cells, folder = run
    (error,) = [out for out in cells[4].outputs if out.output_type == "error"]
    assert error.ename == "KeyboardInterrupt"
    assert sorted(printed(cells[4]).splitlines()) == ["[0] I wait", "[1] I wait"]
    for rank in range(2):
        assert not Path(f"/proc/{(folder / f'rank{rank}').read_text()}").exists()


def test_the_next_cell_launches_again_and_has_all_lines_in_order(run):
    cells, _ = run
    first, *lines, last = printed(cells[5]).splitlines()
    assert (first, last) == ("begin", "end 3 3")
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] {number}" for number in range(200)]
    assert len(lines) == 400


def test_a_failure_shows_the_line_of_the_cell(run):
    cells, _ = run
    (error,) = [out for out in cells[6].outputs if out.output_type == "error"]
    assert error.ename == "RankFailedError"
    assert error.evalue == "rank 0 failed: ValueError: the rank is unwell"
    remote, *_ = "\n".join(error.traceback).split("direct cause")
    assert 'raise ValueError("the rank is unwell")  # in a cell' in remote
