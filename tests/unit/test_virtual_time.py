"""Ranks in virtual time: what their clock does, what messages take, and one rank played for all."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fsdpcore as fc
from fsdpcore.bench.harness.memory import peak_rss, reset_peak
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.comm.transport import transport_of
from fsdpcore.commands.main import app
from fsdpcore.core.errors import ConfigError, StateError
from fsdpcore.simulation.abstract import AbstractArray, abstract
from fsdpcore.simulation.fibers import VirtualClock

NETWORK = """
[[level]]
name = "host"
size = 1
rate = "inf"
latency = 0
[[level]]
name = "switch"
size = 0
rate = "100MB/s"
latency = "1ms"
[compute]
message = "10us"
reduce = "inf"
eager = 1000
"""
RATE, LATENCY, MESSAGE = 100e6, 1e-3, 10e-6


@pytest.fixture
def network(tmp_path: Path) -> str:
    path = tmp_path / "network.toml"
    path.write_text(NETWORK)
    return str(path)


def _launch(main: Any, world_size: int, **options: Any) -> list[Any]:
    return fc.launch(main, world_size=world_size, transport="sim", clock="virtual", **options)


def test_hours_pass_at_once() -> None:
    def main(backend: fc.Backend) -> float:
        backend.clock.sleep(3600.0 * (backend.rank + 1))
        backend.barrier(timeout=1e5)
        return backend.clock.now()

    began = time.monotonic()
    assert all(7200 <= now < 7201 for now in _launch(main, 2))
    assert time.monotonic() - began < 60


def test_a_deadline_is_of_virtual_time() -> None:
    def main(backend: fc.Backend) -> float:
        if backend.rank == 1:
            backend.clock.sleep(1000)
            return 0.0
        with pytest.raises(fc.CommTimeoutError, match="timed out after 30 s"):
            backend.recv(np.empty(1), 1, timeout=30)
        return backend.clock.now()

    assert _launch(main, 2)[0] == pytest.approx(30, abs=0.1)


def test_waiting_for_what_cannot_happen() -> None:
    def main(backend: fc.Backend) -> None:
        backend.clock.queue().get()

    with pytest.raises(StateError, match=r"nothing can happen any more.* rank-0 waits"):
        _launch(main, 2)


def test_a_thread_of_ones_own_is_refused() -> None:
    found: list[BaseException] = []

    def main(backend: fc.Backend) -> None:
        def wait() -> None:
            try:
                backend.clock.sleep(1)
            except StateError as error:
                found.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()

    _launch(main, 1)
    assert "no rank of it" in str(found[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clock": "sundial"}, "clock must be 'wall' or 'virtual'"),
        ({"network": "default"}, "network= is for ranks in virtual time"),
        ({"clock": "virtual", "network": "missing.toml"}, "missing.toml cannot be read"),
        ({"clock": "virtual", "played": "some"}, "played must be 'all' or 'one'"),
        ({"compute": "measured"}, "compute= is for ranks in virtual time"),
        ({"clock": "virtual", "network": "default", "hosts": 2}, "hosts= is what the file"),
        (
            {"clock": "virtual", "played": "one", "compute": "measured"},
            "compute=measured needs all ranks",
        ),
    ],
)
def test_wrong_options(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fc.launch(print, world_size=2, transport="sim", **options)


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [
        (800, LATENCY + 800 / RATE),
        # Its envelope, the answer, and the bytes.
        (8_000_000, 3 * LATENCY + 8_000_000 / RATE),
    ],
)
def test_what_a_message_takes(network: str, nbytes: int, seconds: float) -> None:
    def main(backend: fc.Backend) -> float:
        array = np.arange(nbytes, dtype=np.uint8)
        if backend.rank == 0:
            backend.send(array, 1)
        elif backend.rank == 1:
            assert (backend.recv(np.empty_like(array), 0) == array).all()
        return backend.clock.now()

    assert _launch(main, 2, network=network)[1] == pytest.approx(seconds + 2 * MESSAGE, rel=1e-9)


@pytest.mark.parametrize("ahead", [400_000, 1_000_000])
def test_what_is_sent_before_it_is_asked_for(tmp_path: Path, ahead: int) -> None:
    """Half of a message, or all of it, flows while it is offered and asked for."""
    path = tmp_path / "network.toml"
    path.write_text(NETWORK + f"ahead = {ahead}\n")

    def main(backend: fc.Backend) -> float:
        array = np.arange(800_000, dtype=np.uint8)
        if backend.rank == 0:
            backend.send(array, 1)
        else:
            assert (backend.recv(np.empty_like(array), 0) == array).all()
        return backend.clock.now()

    took = _launch(main, 2, network=str(path))[1]
    assert took == pytest.approx(LATENCY + 800_000 / RATE + 2 * MESSAGE, rel=1e-6)


@pytest.mark.parametrize("shm", ["auto", "off"])
def test_ranks_of_a_host_share_memory(tmp_path: Path, shm: str) -> None:
    """Two hosts of two ranks: what ranks of a host read in memory crosses no link of theirs."""
    path = tmp_path / "network.toml"
    text = NETWORK.replace("size = 1", "size = 2").replace('rate = "inf"', 'rate = "1GB/s"')
    path.write_text(text + 'memory = "2GB/s"\n')

    def main(backend: fc.Backend) -> tuple[float, int]:
        array = np.full(1_000_000, backend.rank, np.float32)
        inside = backend.sub([0, 1] if backend.rank < 2 else [2, 3])
        inside.barrier()
        began = backend.clock.now()
        fc.all_reduce(array, inside, out=array)
        took = backend.clock.now() - began
        assert (array == (1 if backend.rank < 2 else 5)).all()
        return took, transport_of(backend)._wire.flows.bytes_by_link.get(0, 0)  # type: ignore[attr-defined]

    took, carried = _launch(main, 4, network=str(path), shm=shm)[0]
    if shm == "auto":
        # Its input and its output, of 4 MB each, and three steps.
        assert took == pytest.approx(8e6 / 2e9 + 3 * MESSAGE, rel=0.02)
        assert carried < 1000
    else:
        assert took > 4e6 / 1e9
        assert carried >= 4_000_000


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_computing_takes_as_long_as_it_did(tmp_path: Path) -> None:
    """Of ranks that compute at the same time, and of those that wait for one that does."""
    path = tmp_path / "network.toml"
    path.write_text(NETWORK + "speed = 0.5\n")

    def main(backend: fc.Backend) -> list[float]:
        times = []
        _compute(0.02)
        times.append(backend.clock.now())
        backend.barrier()
        times.append(backend.clock.now())
        if backend.rank == 0:
            _compute(0.02)
            backend.send(np.zeros(1), 1)
        else:
            backend.recv(np.zeros(1), 0)
        times.append(backend.clock.now())
        return times

    def three(backend: fc.Backend) -> list[float]:
        return main(backend.sub([0, 1])) if backend.rank < 2 else [_busy(backend)]

    def _busy(backend: fc.Backend) -> float:
        _compute(0.1)
        return backend.clock.now()

    first, second, apart = _launch(three, 3, network=str(path), compute="measured")
    for times in (first, second):
        computed, met, came = times
        assert 0.04 <= computed < 0.06
        assert computed + LATENCY <= met < 0.07
        assert met + 0.04 <= came + 3 * LATENCY
        assert came < met + 0.06
    assert second[2] >= first[1] + 0.04 + LATENCY
    assert 0.2 <= apart[0] < 0.23


def test_fibers_that_compute_wait_for_each_other() -> None:
    clock, ends = VirtualClock(computing=1.0), {}
    lock, queue = clock.lock(), clock.queue()

    def holds() -> None:
        with lock:
            clock.sleep(0.01)

    def comes_later() -> None:
        _compute(0.02)
        with lock:  # free again by then
            ends["lock"] = clock.now()
        _compute(0.02)
        queue.put(None)

    def gets() -> None:
        queue.get()
        ends["queue"] = clock.now()
        _compute(0.02)

    def joins() -> None:
        tasks[2].join()
        ends["join"] = clock.now()

    tasks = [clock.start(body, body.__name__) for body in (holds, comes_later, gets, joins)]
    clock.run(tasks)
    assert 0.02 <= ends["lock"] < 0.03
    assert ends["lock"] + 0.02 <= ends["queue"] < 0.06
    assert ends["queue"] + 0.02 <= ends["join"] < 0.09


def test_measured_ranks_send_where_nothing_takes_long(tmp_path: Path) -> None:
    """What fibers start is not ahead of what is under way."""
    path = tmp_path / "network.toml"
    path.write_text(NETWORK.replace('latency = "1ms"', "latency = 0"))

    def main(backend: fc.Backend) -> None:
        array, out = np.zeros(3200, np.uint8), np.empty(3200, np.uint8)
        for _ in range(50):
            fc.all_to_all(array, backend, out=out, algorithm="direct")

    _launch(main, 4, network=str(path), compute="measured")


def test_streams_share_a_link(network: str) -> None:
    """Three ranks send to one, whose link all of it goes over."""

    def main(backend: fc.Backend) -> float:
        if backend.rank:
            backend.send(np.zeros(10**6, np.uint8), 0)
        else:
            fc.wait_all([backend.irecv(np.empty(10**6, np.uint8), rank) for rank in (1, 2, 3)])
        return backend.clock.now()

    expected = 3 * LATENCY + 3e6 / RATE
    assert _launch(main, 4, network=network)[0] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("p", [5, 16])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_messages_and_bytes_are_those_of_the_formulas(
    network: str, collective: str, p: int
) -> None:
    """On the busiest rank; bytes as multiples of what the formula calls n."""

    def main(backend: fc.Backend, algorithm: str) -> tuple[int, int]:
        root: Any = backend.root
        backend.barrier()
        backend.clock.sleep(1)
        posts = root.posted = [0, 0]
        post = root.post_send

        def counted(data: Any, *args: Any) -> Any:
            posts[0] += 1
            posts[1] += data.size
            return post(data, *args)

        root.post_send = counted
        call = getattr(fc, collective)
        call(np.zeros(n // p if collective == "all_gather" else n), backend, algorithm=algorithm)
        root.post_send = post
        return posts[0], posts[1]

    n = 80 * p
    for name, algorithm in ALGORITHMS[collective].items():
        if name in ("star", "hierarchical"):  # their formulas count the centre's both ways
            continue
        sent = _launch(main, p, network=network, args=(name,))
        terms = algorithm.cost(p)
        assert max(messages for messages, _ in sent) <= terms.alpha, name
        assert max(nbytes for _, nbytes in sent) <= terms.beta * n * 8 * (1 + 1e-9), name
        if p == 16:
            assert max(messages for messages, _ in sent) == terms.alpha, name
            assert max(nbytes for _, nbytes in sent) == pytest.approx(terms.beta * n * 8), name


def _train(backend: fc.Backend, strategy: str, group: int | None) -> tuple[float, int, int]:
    units = [fc.Unit(f"layer {i}", {"w": fc.Spec((40_000,), np.float32)}) for i in range(4)]
    engine = fc.FSDP(
        units,
        backend,
        strategy=fc.Strategy(strategy, shard_group_size=group),
        optimizer=fc.optim.SGD(lr=0.1),
    )
    for _ in range(2):
        with engine.step() as step:
            for unit in units:
                with step.forward(unit):
                    backend.clock.sleep(1e-3)
            for unit in reversed(units):
                with step.backward(unit) as backward:
                    backward.grads.empty("w")[...] = 1.0
                    backend.clock.sleep(2e-3)
            step.update()
    measured = engine.report().measured
    assert measured.step_seconds is not None
    return measured.step_seconds, measured.peak_bytes, measured.bytes_sent


@pytest.mark.parametrize(
    ("strategy", "group"),
    [("full_shard", None), ("shard_grad_op", None), ("hybrid_shard", 2), ("no_shard", None)],
)
def test_one_rank_played_is_as_all(network: str, strategy: str, group: int | None) -> None:
    args = (strategy, group)
    played = _launch(_train, 8, network=network, args=args)
    (one,) = _launch(_train, 8, network=network, args=args, played="one", arrays="abstract")
    seconds, peak, sent = played[0]
    assert one[1:] == (peak, sent)
    assert one[0] == pytest.approx(seconds, rel=0.02)


def _results(backend: fc.Backend) -> list[Any]:
    """What rank 0 gets of every collective, where all ranks give the same."""
    x = np.arange(12.0).reshape(6, 2)
    found = [
        fc.all_gather(x, backend),
        fc.reduce_scatter(x, backend),
        fc.all_to_all(x, backend),
        fc.broadcast(x, backend),
        fc.reduce(x, backend),
        fc.gather(x, backend),
        fc.scan(x, backend),
        fc.exscan(x, backend),
        fc.all_gather_v(x, backend),
        fc.reduce_scatter_v(x, backend, [3, 2, 1]),
    ]
    found += [fc.all_reduce(x, backend, op=op) for op in ("sum", "mean", "max", "prod")]
    return found if backend.rank == 0 else []


def test_formulas_know_who_shares_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of every 8th rank: eight of them go over the link of each host at the same time."""

    def main(backend: fc.Backend) -> float:
        group = backend.sub(range(backend.rank % 8, 64, 8))
        array = backend.empty(4_000_000)
        group.barrier()
        backend.clock.sleep(1 - backend.clock.now())
        fc.all_reduce(array, group, out=array, algorithm="ring")
        return backend.clock.now() - 1

    path = str(Path(__file__).parents[2] / "examples" / "networks" / "gpu_cluster.toml")
    everyone = max(_launch(main, 64, network=path, arrays="abstract"))
    monkeypatch.setattr("fsdpcore.transports.simulated.lone._MOST", 0)
    (alone,) = _launch(main, 64, network=path, arrays="abstract", played="one")
    assert alone == pytest.approx(everyone, rel=0.2)


def test_one_rank_does_not_stand_for_those_that_share_memory(tmp_path: Path) -> None:
    path = tmp_path / "network.toml"
    path.write_text(NETWORK + 'memory = "2GB/s"\n')
    with pytest.raises(ConfigError, match="needs all of them"):
        _launch(print, 4, network=str(path), played="one")


def test_no_sleep_goes_back() -> None:
    def main(backend: fc.Backend) -> None:
        with pytest.raises(ValueError, match="non-negative"):
            backend.clock.sleep(-1)

    _launch(main, 1)


def test_one_rank_gets_what_it_would_among_others() -> None:
    for one, among in zip(
        _launch(_results, 3, played="one")[0], _launch(_results, 3)[0], strict=True
    ):
        assert one.shape == among.shape
        assert one.tobytes() == among.tobytes()


def test_one_rank_sends_no_messages() -> None:
    with pytest.raises(fc.RankFailedError, match="played=all"):
        _launch(lambda backend: backend.send(np.ones(1), 1), 2, played="one")


def test_looking_again_and_again_takes_time() -> None:
    def main(backend: fc.Backend) -> None:
        if backend.rank:
            backend.clock.sleep(0.001)
            backend.send(np.ones(3), 0)
            return
        work = backend.irecv(np.empty(3), 1)
        while True:
            try:
                work.wait(timeout=0)
                break
            except fc.CommTimeoutError:
                continue

    _launch(main, 2)


def test_abstract_arrays_take_no_memory() -> None:
    array = abstract(10**12, np.float32)
    array[5:] = 7
    array += array
    np.copyto(array, array)
    assert array.nbytes == 4 * 10**12
    assert isinstance((array * 2)[10:20].reshape(2, 5).view(np.uint8), AbstractArray)
    assert (abstract((4, 3), np.float64) @ abstract((3, 5), np.float64)).shape == (4, 5)
    assert not abstract(10**9, np.float32).sum()


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_no_algorithm_touches_abstract_arrays(collective: str) -> None:
    count, p = 10_000_000, 6

    def main(backend: fc.Backend) -> None:
        whole, part = backend.empty(count * p), backend.empty(count)
        source = part if collective == "all_gather" else whole
        out = part if collective == "reduce_scatter" else whole
        for name in ALGORITHMS[collective]:
            getattr(fc, collective)(source, backend, out=out, algorithm=name)

    reset_peak()
    before = peak_rss()
    _launch(main, p, arrays="abstract", shm="off")
    assert peak_rss() - before < 4 * count * p


def _simulated(*words: str) -> str:
    options = ["--ranks", "16", "--params", "1e8", "--layers", "2", "--tokens", "1000", *words]
    result = CliRunner().invoke(app, ["simulate", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_simulate_command_says_what_is_fastest() -> None:
    output = _simulated("--sweep", "--memory", "1GB")
    steps = json.loads(_simulated("--sweep", "--json"))
    fitting = [step for step in steps if step["peak_bytes"] <= 1e9]
    assert 0 < len(fitting) < len(steps)
    most = 1.002 * min(step["seconds"] for step in fitting)
    fast = [step for step in fitting if step["seconds"] <= most]
    best = min(fast, key=lambda step: (step["peak_bytes"], step["seconds"]))
    words = f"--strategy {best['strategy']} --prefetch {best['prefetch']}"
    assert f"fastest of those that fit 1.00 GB: {words}" in output


def test_simulate_command_computes_as_long_as_the_model_takes() -> None:
    """A forward pass, and a backward pass of twice the work; 400 TFLOPS."""
    (step,) = json.loads(_simulated("--json"))
    computing = 3 * 2 * 1e8 * 1000 / 4e14
    assert step["seconds"] - step["exposed"] == pytest.approx(computing)
    gathers = [use for use in step["collectives"] if use["nbytes"] > 10**8]
    calls = {use["collective"]: use["calls"] for use in gathers}
    assert calls == {"all_gather": 4, "reduce_scatter": 2}
    assert all(use["carried"] for use in gathers)
