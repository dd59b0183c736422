"""The stand-in for CuPy: what its arrays can do, and what they refuse as CuPy's do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import fake_cuda


@pytest.fixture
def cupy() -> Iterator[Any]:
    with fake_cuda.installed(1):
        import cupy

        yield cupy


class TestRefusals:
    """What CuPy refuses, in its words."""

    @pytest.mark.parametrize(
        "call",
        [
            lambda cupy, a, n: a + n,
            lambda cupy, a, n: n + a,
            lambda cupy, a, n: np.add(a, n),
            lambda cupy, a, n: cupy.multiply(a, [1.0]),
            lambda cupy, a, n: np.concatenate([a, n]),
            lambda cupy, a, n: a @ n,
            lambda cupy, a, n: np.add(a, a, out=n),
        ],
    )
    def test_operands_are_arrays_of_the_device_or_scalars(self, cupy: Any, call: Any) -> None:
        with pytest.raises(TypeError):
            call(cupy, cupy.ones((3, 3)), np.ones((3, 3)))

    def test_no_array_becomes_numpys_unasked(self, cupy: Any) -> None:
        with pytest.raises(TypeError, match=r"Please use `.get\(\)`"):
            np.asarray(cupy.ones(3))
        with pytest.raises(ValueError, match=r"non-scalar numpy\.ndarray cannot be used"):
            cupy.ones(3)[...] = np.ones(3)
        with pytest.raises(ValueError, match=r"non-scalar numpy\.ndarray cannot be used"):
            np.copyto(cupy.ones(3), np.ones(3))

    def test_what_is_not_there(self, cupy: Any) -> None:
        x = cupy.ones(3)
        assert not hasattr(x.flags, "writeable")
        assert not hasattr(cupy, "vecdot")
        assert not hasattr(cupy.cuda.Event, "query")
        with pytest.raises(TypeError, match="__array_ufunc__"):
            np.vecdot(x, x)
        with pytest.raises(NotImplementedError, match="is not supported yet"):
            np.maximum.reduce(x)
        with pytest.raises(TypeError, match="where"):
            np.add(x, x, where=True)
        with pytest.raises(TypeError, match="out"):
            cupy.einsum("i->", x, out=x)
        with pytest.raises(ValueError, match="ambiguous"):
            bool(x)
        with pytest.raises(ValueError, match="Out shape"):
            cupy.add(x, x, out=cupy.ones(1))
        with pytest.raises(TypeError, match="unhashable"):
            hash(x)


class TestFunctions:
    def test_functions_of_numpy_come_here(self, cupy: Any) -> None:
        x = cupy.arange(6, dtype=np.float32)
        y = np.add(x, 1, out=cupy.empty_like(x))
        assert isinstance(y, cupy.ndarray)
        assert np.concatenate([x, y]).tolist() == [*range(6), *range(1, 7)]
        np.copyto(y, x)
        assert np.array_equal(x, y)
        assert np.ndim(x) == 1
        assert np.split(x, 2)[1].data.ptr == x.data.ptr + 12
        np.add.at(y, cupy.asarray([0, 0, 1]), 1)
        assert y.tolist() == [2, 2, 2, 3, 4, 5]

    def test_dtypes_are_those_of_numpy(self, cupy: Any) -> None:
        x = cupy.ones(3, ml_dtypes.bfloat16)
        assert (x * 2).dtype == ml_dtypes.bfloat16
        assert (x * 2.0).dtype == np.float32  # as CuPy has it, too
        assert (cupy.ones(3, np.float16) * 2.0).dtype == np.float16
        assert (x * np.float32(2)).dtype == np.float32
        assert (x @ x).dtype == ml_dtypes.bfloat16
        assert cupy.ones(3, np.int8).sum().dtype == np.int64
        # Half precision is added in single: a sum that stops at 256 otherwise.
        assert float(cupy.ones(1000, ml_dtypes.bfloat16).sum()) == 1000.0

    def test_indexing(self, cupy: Any) -> None:
        host = np.arange(24).reshape(4, 6)
        x = cupy.asarray(host)
        rows = cupy.asarray([2, 0])
        assert x[rows].tolist() == host[[2, 0]].tolist()
        assert x[rows, 1].tolist() == host[[2, 0], 1].tolist()
        assert x[x > 20].tolist() == [21, 22, 23]
        assert x[1, 2].shape == ()
        assert int(x[1, 2]) == 8
        x[rows, cupy.asarray([5, 5])] = -1
        x[1, ::2] = x[3, ::2]
        host[[2, 0], 5] = -1
        host[1, ::2] = host[3, ::2]
        assert x.tolist() == host.tolist()
        assert x[:, None].shape == (4, 1, 6)
        assert x[...].data.ptr == x.data.ptr

    def test_results_are_those_of_numpy(self, cupy: Any) -> None:
        host = np.random.default_rng(0).standard_normal((4, 6))
        x = cupy.asarray(host)
        for function in (
            lambda xp, a: xp.sum(a, axis=1, keepdims=True),
            lambda xp, a: xp.where(a > 0, a, 0.0),
            lambda xp, a: xp.einsum("ij,kj->ik", a, a),
            lambda xp, a: xp.stack([a, a], axis=1),
            lambda xp, a: xp.argmax(a, axis=0),
            lambda xp, a: xp.triu(a @ a.T, 1),
            lambda xp, a: xp.take(a, xp.asarray([3, 1]), axis=0),
            lambda xp, a: xp.maximum(a, a[::-1]).reshape(-1).cumsum(),
            lambda xp, a: xp.linalg.norm(a),
            lambda xp, a: a.T.ravel(),
            lambda xp, a: xp.flatnonzero(a > 0),
            lambda xp, a: xp.isfinite(xp.log(a)).all(),
        ):
            with np.errstate(invalid="ignore"):
                expected = function(np, host)
            found = function(cupy, x)
            assert isinstance(found, cupy.ndarray)
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found.get(), expected)
