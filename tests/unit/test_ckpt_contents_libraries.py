"""Arrays, keys, generators and objects of JAX and PyTorch in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpcore as fc
from fsdpcore.checkpoint import PerRank, load, save


def on(ranks: int, main: Any) -> list[Any]:
    return fc.launch(main, world_size=ranks, transport="sim")


def test_jax(tmp_path: Path) -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    numpy = jax.numpy

    def state(value: int, rank: int) -> dict[str, Any]:
        params = {"w": numpy.full((2, 3), value, numpy.bfloat16), "b": numpy.arange(3.0) + value}
        return {
            "params": params,
            "adam": optax.adam(0.1).init(params),
            "key": jax.random.key(value),
            "keys": jax.random.split(jax.random.key(value, impl="rbg"), 2),
            "raw": jax.random.PRNGKey(value),
            "own": PerRank(jax.random.key(10 * value + rank)),
            "weak": numpy.asarray(0.5 * value),
        }

    def words(tree: Any) -> list[Any]:
        def plain(leaf: Any) -> Any:
            data = leaf
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = jax.random.key_data(leaf)
            data = np.asarray(data)
            return str(leaf.dtype), data.shape, data.tobytes(), getattr(leaf, "weak_type", None)

        found = [plain(leaf) for leaf in jax.tree_util.tree_leaves(tree)]
        return [str(jax.tree_util.tree_structure(tree)), found]

    def main(backend: fc.Backend) -> None:
        given = state(3, backend.rank)
        save(tmp_path, given, backend, step=1)
        target = state(1, backend.rank)
        found = load(tmp_path, target, backend).state
        expected = {**given, "own": given["own"].value}
        assert words(found) == words(expected)
        untouched = {**target, "own": target["own"].value}
        fresh = state(1, backend.rank)
        assert words(untouched) == words({**fresh, "own": fresh["own"].value})
        # Without a target, arrays and keys are JAX's again; what is registered is a dict.
        made = load(tmp_path, dict.fromkeys(given) | {"own": PerRank(None)}, backend).state
        assert isinstance(made["params"]["w"], jax.Array)
        assert words(made["params"]) == words(given["params"])
        assert words(made["keys"]) == words(given["keys"])
        assert words(made["own"]) == words(given["own"].value)
        with pytest.raises(
            fc.ArgumentError, match="a key of rbg, but what was saved is one of 'threefry2x32'"
        ):
            load(tmp_path, {**target, "key": jax.random.key(1, impl="rbg")}, backend)

    on(2, main)


def test_pytorch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Job:
        """A module, its optimizer, an average, and what draws the noise of this rank."""

        def __init__(self, seed: int, rank: int) -> None:
            torch.manual_seed(seed)
            self.module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
            self.adam = torch.optim.Adam(self.module.parameters(), lr=0.1 * seed)
            self.average = torch.full((2, 2), float(seed), dtype=torch.bfloat16)
            self.noise = torch.Generator().manual_seed(seed)
            self.own = torch.Generator().manual_seed(10 * seed + rank)

        def state(self) -> dict[str, Any]:
            state = {key: getattr(self, key) for key in ("module", "adam", "average", "noise")}
            return {**state, "own": PerRank(self.own)}

        def step(self) -> list[bytes]:
            x = torch.randn(5, 3, generator=self.noise)
            (self.module(x).square().sum() + self.average.float().sum()).backward()
            self.adam.step()
            self.adam.zero_grad()
            drawn = torch.rand(2, generator=self.own)
            tensors = [*self.module.state_dict().values(), drawn, self.average.float()]
            return [each.numpy().tobytes() for each in tensors]

    def main(backend: fc.Backend) -> None:
        with torch.random.fork_rng():
            first = Job(3, backend.rank)
            first.step()
            save(tmp_path, first.state(), backend, step=1)
            other = Job(5, backend.rank)
            loaded = load(tmp_path, other.state(), backend)
            assert all(loaded.state[key] is getattr(other, key) for key in ("module", "average"))
            assert [first.step() for _ in range(3)] == [other.step() for _ in range(3)]
            made = load(tmp_path, {"average": None}, backend, strict=False).state["average"]
            assert (made.dtype, made[0, 0].item()) == (torch.bfloat16, 3.0)

    on(1, main)  # PyTorch's own random state is the process's
