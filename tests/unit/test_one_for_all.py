"""One rank played for all, arrays without values, and the command that makes steps of both."""

from __future__ import annotations

import json
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
from fsdpcore.commands.main import app
from fsdpcore.core.errors import ConfigError
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
    launch(main, p, arrays="abstract", shm="off")
    assert peak_rss() - before < 4 * count * p


def _simulated(*words: str) -> str:
    options = ["--ranks", "16", "--params", "1e8", "--layers", "2", "--tokens", "1000", *words]
    result = CliRunner().invoke(app, ["simulate", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_simulate_command_says_what_is_fastest() -> None:
    reset_peak()
    before = peak_rss()
    output = _simulated("--sweep", "--memory", "1GB")
    assert peak_rss() - before < 3e8, "a rank of no_shard holds 1.6 GB, and none of it is made"
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


def test_simulate_command_says_which_link_carries_most() -> None:
    (step,) = json.loads(_simulated("--json"))
    most = sum(max(use["carried"].values()) * use["calls"] for use in step["collectives"])
    assert f"most host 1 -> cluster: {most / 1e9:.2f} GB" in _simulated()
