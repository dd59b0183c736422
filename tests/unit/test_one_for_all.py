"""One rank played for all, arrays without values, and the command that makes steps of both."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.virtual_time import NETWORK, launch, network_file
from typer.testing import CliRunner

import fsdpcore as fc
from fsdpcore.bench.harness.memory import peak_rss, reset_peak
from fsdpcore.collectives.selection.choose import cheapest, choose
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.comm.transport import transport_of
from fsdpcore.commands.main import app
from fsdpcore.core import text
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.reductions import Reduction
from fsdpcore.core.text import count, duration, size
from fsdpcore.simulation.abstract import AbstractArray, abstract


@pytest.fixture
def network(tmp_path: Path) -> str:
    return network_file(tmp_path)


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
    played = launch(_train, 8, network=network, args=args)
    (one,) = launch(_train, 8, network=network, args=args, played="one", arrays="abstract")
    seconds, peak, sent = played[0]
    assert one[1:] == (peak, sent)
    assert one[0] == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_one_rank_chooses_as_all_do(tmp_path: Path, collective: str) -> None:
    """Also where the ranks of a host share its link, and a ring would not keep the order."""
    text = NETWORK.replace("size = 1", "size = 4").replace('rate = "inf"', 'rate = "1GB/s"')
    path = network_file(tmp_path, text)

    def main(backend: fc.Backend) -> list[str]:
        backend.barrier()
        chosen = [cheapest(collective, 10**n, backend) for n in range(2, 9)]
        return [*chosen, choose(collective, "auto", 10**8, backend, np.dtype("f4"), "sum").name]

    everyone = launch(main, 16, network=path)
    assert everyone == [everyone[0]] * 16
    assert launch(main, 16, network=path, played="one") == everyone[:1]


@pytest.mark.parametrize("p", [2, 5, 8])
def test_a_barrier_of_one_rank_takes_as_long_as_of_all(network: str, p: int) -> None:
    def main(backend: fc.Backend) -> float:
        backend.barrier()
        began = backend.clock.now()
        backend.barrier()
        return backend.clock.now() - began

    everyone = max(launch(main, p, network=network))
    assert launch(main, p, network=network, played="one") == [pytest.approx(everyone, rel=0.01)]


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
    everyone = max(launch(main, 64, network=path, arrays="abstract"))
    monkeypatch.setattr("fsdpcore.transports.simulated.lone._MOST", 0)
    (alone,) = launch(main, 64, network=path, arrays="abstract", played="one")
    assert alone == pytest.approx(everyone, rel=0.2)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_formulas_know_how_many_of_a_host_send_over_its_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """All four at once, or one of them where neighbours send to each other."""

    def main(backend: fc.Backend) -> float:
        part, whole = backend.empty(1_000_000), backend.empty(32_000_000)
        backend.barrier()
        backend.clock.sleep(1 - backend.clock.now())
        fc.all_gather(part, backend, out=whole, algorithm=algorithm)
        return backend.clock.now() - 1

    path = network_file(tmp_path, NETWORK.replace("size = 1", "size = 4"))
    everyone = max(launch(main, 32, network=path, arrays="abstract"))
    monkeypatch.setattr("fsdpcore.transports.simulated.lone._MOST", 0)
    (alone,) = launch(main, 32, network=path, arrays="abstract", played="one")
    assert alone == pytest.approx(everyone, rel=0.2)


def test_formulas_know_what_links_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups of every 8th rank, as those that are simulated do."""

    def main(backend: fc.Backend) -> dict[str, int]:
        group = backend.sub(range(backend.rank, 64, 8))
        array = backend.empty(4_000_000)
        fc.all_reduce(array, group, out=array, algorithm="ring")
        uses = transport_of(backend).alike.drain()
        return {link: n for use in uses for link, n in use.carried.items()}

    path = str(Path(__file__).parents[2] / "examples" / "networks" / "gpu_cluster.toml")
    options = {"network": path, "arrays": "abstract", "played": "one"}
    (found,) = launch(main, 64, **options)
    assert len(found) > 64
    monkeypatch.setattr("fsdpcore.transports.simulated.lone._MOST", 0)
    assert launch(main, 64, **options) == [found]


@pytest.mark.parametrize("worse", ["rate = '1MB/s'", "latency = 0.05"])
def test_formulas_know_the_slowest_link_and_its_trips(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worse: str
) -> None:
    """A large message goes to and fro, and the bytes after it."""
    exception = f"[[link]]\nmember = 'host 3'\n{worse}\n"
    path = network_file(tmp_path, NETWORK.replace("[compute]", exception + "[compute]"))

    def main(backend: fc.Backend) -> float:
        backend.barrier()
        backend.clock.sleep(1 - backend.clock.now())
        out = backend.empty(100_000)
        fc.all_gather(backend.empty(25_000), backend, out=out, algorithm="direct")
        return backend.clock.now() - 1

    everyone = max(launch(main, 4, network=path, arrays="abstract"))
    monkeypatch.setattr("fsdpcore.transports.simulated.lone._MOST", 0)
    (alone,) = launch(main, 4, network=path, arrays="abstract", played="one")
    assert alone == pytest.approx(everyone, rel=0.05)


@pytest.mark.parametrize("collective", ["all_reduce", "all_to_all"])
def test_one_rank_stands_for_groups_that_are_alike(network: str, collective: str) -> None:
    def main(backend: fc.Backend) -> None:
        group = backend.sub([0, 1, 5])
        getattr(fc, collective)(backend.empty(3), group)

    with pytest.raises(fc.RankFailedError, match="one of several that are alike"):
        launch(main, 8, network=network, played="one", arrays="abstract")


def test_one_rank_counts_on_no_bursts(tmp_path: Path) -> None:
    """It does not know how much of one is left when the next collective begins."""

    def main(backend: fc.Backend) -> float:
        for _ in range(3):
            fc.all_reduce(backend.empty(1_000_000), backend)
        return backend.clock.now()

    def seconds(old: str, new: str) -> float:
        path = network_file(tmp_path, NETWORK.replace(old, new))
        (found,) = launch(main, 4, network=path, arrays="abstract", played="one")
        return float(found)

    plain = seconds("", "")
    assert plain > 3 * 2 * 3 / 4 * 4e6 / 100e6
    assert seconds('latency = "1ms"', 'latency = "1ms"\nburst = "10MB"') == plain


def test_one_rank_does_not_stand_for_those_that_share_memory(tmp_path: Path) -> None:
    path = tmp_path / "network.toml"
    path.write_text(NETWORK + 'memory = "2GB/s"\n')
    with pytest.raises(ConfigError, match="needs all of them"):
        launch(print, 4, network=str(path), played="one")


def test_one_rank_gets_what_it_would_among_others() -> None:
    for one, among in zip(
        launch(_results, 3, played="one")[0], launch(_results, 3)[0], strict=True
    ):
        assert one.shape == among.shape
        assert one.tobytes() == among.tobytes()


def test_one_rank_sends_no_messages() -> None:
    with pytest.raises(fc.RankFailedError, match="played=all"):
        launch(lambda backend: backend.send(np.ones(1), 1), 2, played="one")


def test_abstract_arrays_take_no_memory() -> None:
    array = abstract(10**12, np.float32)
    array[5:] = 7
    array += array
    np.copyto(array, array)
    Reduction.of("sum", array.dtype).reduce([array] * 3, array)  # in blocks it would take an hour
    assert array.nbytes == 4 * 10**12
    assert isinstance((array * 2)[10:20].reshape(2, 5).view(np.uint8), AbstractArray)
    shapes = [((4, 3), (3, 5)), ((4, 3), (6, 3, 5)), ((7, 1, 4, 3), (6, 3, 5)), ((6, 4, 3), (3,))]
    for left, right in shapes:
        wanted = (np.empty(left) @ np.empty(right)).shape
        assert (abstract(left, np.float64) @ abstract(right, np.float64)).shape == wanted
    assert not abstract(10**9, np.float32).sum()


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, n: np.add(a, 1, dtype="f8"),
        lambda a, n: a.sum(axis=0, dtype="f8"),
        lambda a, n: n.sum(axis=0),
        lambda a, n: n.sum(),
        lambda a, n: a * np.float32(2),
        lambda a, n: a * np.float64(2),
        lambda a, n: a * True,
        lambda a, n: a + n,
        lambda a, n: np.concatenate([a, a], 1),
        lambda a, n: np.concatenate([a, a], axis=0),
        lambda a, n: np.isfinite(a).all(),
        lambda a, n: np.isnan(a).any(),
        lambda a, n: np.isfinite(a).all(axis=1, keepdims=True),
    ],
)
def test_abstract_arrays_are_as_zeros(compute: Callable[[Any, Any], Any]) -> None:
    kinds = np.dtype("f4"), np.dtype("i4")
    found = compute(*(abstract((2, 3), kind) for kind in kinds))
    expected = compute(*(np.zeros((2, 3), kind) for kind in kinds))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.shape or found == expected


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
    launch(main, p, arrays="abstract", shm="off")
    assert peak_rss() - before < 4 * count * p


def _simulated(*words: str, exit_code: int = 0) -> str:
    options = ["--ranks", "16", "--params", "1e8", "--layers", "2", "--tokens", "1000", *words]
    result = CliRunner().invoke(app, ["simulate", *options])
    assert result.exit_code == exit_code, result.output
    return result.output


def test_simulate_command_says_what_is_fastest() -> None:
    reset_peak()
    before = peak_rss()
    output = _simulated("--sweep", "--memory", "1GB", "--prefetch", "3")
    assert peak_rss() - before < 3e8, "a rank of no_shard holds 1.6 GB, and none of it is made"
    steps = json.loads(_simulated("--sweep", "--json", "--prefetch", "3"))
    assert {step["prefetch"] for step in steps} == {0, 1, 2, 3}
    fitting = [step for step in steps if step["peak_bytes"] <= 1e9]
    assert 0 < len(fitting) < len(steps)
    most = 1.002 * min(step["seconds"] for step in fitting)
    fast = [step for step in fitting if step["seconds"] <= most]
    best = min(fast, key=lambda step: (step["peak_bytes"], step["seconds"]))
    words = f"--strategy {best['strategy']} --prefetch {best['prefetch']}"
    assert f"fastest of those that fit 1.00 GB: {words}" in output


@pytest.mark.parametrize("words", [[], ["--json"], ["--sweep"]])
def test_simulate_command_says_that_nothing_fits(words: list[str]) -> None:
    _simulated("--memory", "1MB", *words, exit_code=1)


def test_simulate_command_says_what_its_links_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "told by a formula" not in _simulated()
    monkeypatch.setattr("fsdpcore.transports.simulated.lone._MOST", 10)
    assert "collectives told by a formula are not in it" in _simulated()


def test_simulate_command_computes_as_long_as_the_model_takes() -> None:
    """A forward pass, and a backward pass of twice the work; 400 TFLOPS."""
    (step,) = json.loads(_simulated("--json"))
    computing = 3 * 2 * 1e8 * 1000 / 4e14
    assert step["seconds"] - step["exposed"] == pytest.approx(computing)
    gathers = [use for use in step["collectives"] if use["nbytes"] > 10**8]
    calls = {use["collective"]: use["calls"] for use in gathers}
    assert calls == {"all_gather": 4, "reduce_scatter": 2}
    assert all(use["carried"] for use in gathers)


def test_simulate_command_counts_the_tokens_of_whole_steps() -> None:
    (step,) = json.loads(_simulated("--json"))
    lines = [re.split(r"\s{2,}", line.strip()) for line in _simulated().splitlines()]
    (header,) = [line for line in lines if line[0] == "strategy"]
    row = dict(zip(header, lines[lines.index(header) + 1], strict=False))
    assert row["step"] == duration(step["seconds"])
    assert row["exposed"] == duration(step["exposed"])
    assert row["tokens/s of a rank"] == count(1000 / step["seconds"])
    assert row["peak"] == size(step["peak_bytes"])
    assert row["sent"] == size(step["bytes_sent"])


def test_large_messages_of_one_rank_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "network.toml"
    path.write_text(NETWORK.replace("eager = 1000", "eager = 50_000"))

    def main(backend: fc.Backend) -> float:
        groups = [backend, backend.sub(range(8))]
        for group in groups:
            group.barrier()
        began, part = backend.clock.now(), np.zeros(20_000, np.uint8)
        fc.wait_all([fc.all_gather(part, g, algorithm="direct", async_op=True) for g in groups])
        return backend.clock.now() - began

    seconds = launch(main, 8, network=str(path))[0]
    (one,) = launch(main, 8, network=str(path), played="one", arrays="abstract")
    assert one == pytest.approx(seconds, rel=0.05)


def test_links_carry_what_the_collective_moves() -> None:
    """By a ring all links carry the same: what one rank sends."""
    (step,) = json.loads(_simulated("--json"))
    for use in step["collectives"]:
        if use["algorithm"] == "ring":
            assert set(use["carried"].values()) == {use["nbytes"] * 15 // 16}
    assert "ring" in {use["algorithm"] for use in step["collectives"]}


@pytest.mark.parametrize(
    ("rank", "host", "name"), [("1GB/s", "99GB/s", "rank"), ("99GB/s", "1GB/s", "host")]
)
def test_simulate_command_names_the_slowest_link(
    tmp_path: Path, rank: str, host: str, name: str
) -> None:
    """Also where a faster one carries more."""
    file = NETWORK.replace("size = 1", "size = 8").replace('"inf"', f'"{rank}"', 1)
    file = file.replace('"100MB/s"', f'"{host}"')
    words = ["--network", network_file(tmp_path, file), "--strategy", "no_shard"]
    (step,) = json.loads(_simulated("--json", *words))
    carried = Counter[str]()
    for use in step["collectives"]:
        carried.update({link: n * use["calls"] for link, n in use["carried"].items()})
    found, seconds = step["slowest_link"]
    assert seconds == pytest.approx(carried[found] / 1e9)
    assert found.startswith(name)
    assert f"the slowest link, {found}, carries {text.size(carried[found])}" in _simulated(*words)
