from __future__ import annotations

from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from support import oracle
from support.arrays import LAYOUTS, array_of, check_same

import fsdpcore as fc
from fsdpcore.core.buffers import (
    BFLOAT16,
    DTYPES,
    bounds_of,
    byte_view,
    check_out,
    describe_signature,
    dtype_code,
    input_array,
    lined_up_zeros,
    pack_signature,
    row_size,
    split_sizes,
    unpack_signature,
)
from fsdpcore.core.errors import ArgumentError, ProtocolError

# What every version of the wire format must keep.
CODES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


def test_codes_of_dtypes_never_change() -> None:
    assert [dtype.name for dtype in DTYPES[: len(CODES)]] == CODES
    assert [dtype_code(dtype) for dtype in DTYPES] == list(range(len(DTYPES)))
    assert dtype_code(ml_dtypes.bfloat16) == 10


@pytest.mark.parametrize(
    "dtype", [object, ">f4", "U2", "V3", np.longdouble, "M8[s]", np.clongdouble]
)
def test_other_dtypes_are_refused(dtype: object) -> None:
    with pytest.raises(ArgumentError, match="cannot be communicated"):
        dtype_code(np.dtype(dtype))  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_signature_round_trip(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> None:
    signature = pack_signature(dtype, shape)
    assert unpack_signature(signature + b"behind it") == (dtype, shape)
    assert describe_signature(signature) == f"{dtype.name} of shape {shape}"


@pytest.mark.parametrize("damaged", [b"", b"\x00", b"\xff\x00", b"\x00\x02" + bytes(15)])
def test_damaged_signatures(damaged: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_signature(damaged)
    assert describe_signature(damaged) == "not an array"


def test_inputs_are_copied_only_if_they_must() -> None:
    for name, make in LAYOUTS.items():
        values = array_of(0, (3, 4))
        array = make(values)
        result = input_array(array)
        check_same(result, values, name)
        assert result.flags.c_contiguous
        assert np.shares_memory(result, array) == array.flags.c_contiguous, name


def test_inputs_keep_their_shape() -> None:
    assert input_array(3.0).shape == ()
    assert input_array(np.zeros((0, 2)).T).shape == (2, 0)
    assert input_array(np.zeros((4, 3)).T).shape == (3, 4)


@pytest.mark.parametrize("value", [[[1], [1, 2]], "text", None, object()])
def test_inputs_that_are_no_arrays(value: object) -> None:
    with pytest.raises(ArgumentError):
        input_array(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_bytes_of_an_array(dtype: np.dtype[np.generic]) -> None:
    array = array_of(0, (3, 2), dtype)
    view = byte_view(array)
    assert (view.dtype, view.ndim, view.tobytes()) == (np.dtype(np.uint8), 1, array.tobytes())
    assert np.shares_memory(view, array)
    assert byte_view(array_of(0, (), dtype)).size == dtype.itemsize
    assert byte_view(array_of(0, (0, 3), dtype)).size == 0


@pytest.mark.parametrize(
    ("out", "what"),
    [
        ([0.0, 0.0], "NumPy array"),
        (np.zeros(3), "shape"),
        (np.zeros((2, 1)), "shape"),
        (np.zeros(2, np.float32), "dtype"),
        (np.broadcast_to(np.float64(0), (2,)), "read-only"),
    ],
)
def test_outputs_that_do_not_fit(out: object, what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        check_out(out, (2,), np.dtype(np.float64))


def test_output_that_fits_is_returned() -> None:
    out = np.zeros(2)
    assert check_out(out, (2,), np.dtype(np.float64)) is out


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_sizes_are_those_of_array_split(parts: int) -> None:
    for total in range(20):
        expected = [piece.size for piece in np.array_split(np.zeros(total), parts)]
        assert split_sizes(total, parts) == expected


def test_bounds() -> None:
    assert bounds_of([]) == [0]
    assert bounds_of([2, 0, 3]) == [0, 2, 2, 5]
    assert bounds_of([2, 0, 3], 4) == [0, 8, 8, 20]


def test_row_size() -> None:
    assert [row_size(shape) for shape in [(5,), (5, 3), (5, 3, 0), ()]] == [1, 3, 0, 1]


class _OnGpu:
    """What CuPy's arrays have; those of PyTorch and JAX, too."""

    shape, dtype = (3,), np.dtype(np.float32)
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}

    def __array__(self) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


def test_an_array_of_a_gpu_is_refused_with_a_way_out() -> None:
    with pytest.raises(ArgumentError, match=r"on a GPU.*array\.get\(\)"):
        input_array(_OnGpu())
    with pytest.raises(ArgumentError, match=r"as the input is; got .*_OnGpu"):
        check_out(_OnGpu(), (3,), np.dtype(np.float32))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (100, 7)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, BFLOAT16, np.complex64])
def test_arrays_of_a_backend_begin_at_a_cache_line(shape, dtype):
    for array in fc.launch(lambda backend: backend.empty(shape, dtype), world_size=2):
        assert (array.shape, array.dtype) == (shape, dtype)
        assert not array.size or array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize("size", [0, 3, 1 << 20, (1 << 20) + 5])
def test_arrays_of_zeros(size):
    array = lined_up_zeros(size, np.dtype(np.float32))
    assert (array.shape, array.dtype, array.ctypes.data % 64 * bool(size)) == ((size,), "f4", 0)
    assert not array.any()
    array[:] = 1.0  # and nobody else's
    assert not lined_up_zeros(size, np.dtype(np.float32)).any()
