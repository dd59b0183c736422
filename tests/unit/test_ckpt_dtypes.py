"""Every dtype that a checkpoint takes has a code of safetensors and a name that leads back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fsdpcore.checkpoint.format.dtypes import BITS, CODES, named_dtype, stored_as
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError

OTHERS = {
    "complex128": ("F64", (2,)),
    "int4": ("U8", ()),
    "uint4": ("U8", ()),
    "float8_e3m4": ("U8", ()),
    "float8_e4m3": ("U8", ()),
    "float8_e4m3b11fnuz": ("U8", ()),
    "float6_e2m3fn": ("U8", ()),
    "float4_e2m1fn": ("U8", ()),
}


@pytest.mark.parametrize("code", CODES)
def test_a_dtype_of_safetensors_is_stored_as_itself(code):
    dtype = CODES[code]
    assert stored_as(dtype) == (code, ())
    assert named_dtype(dtype.name) == dtype
    assert BITS[code] == dtype.itemsize * 8


@pytest.mark.parametrize("name", OTHERS)
def test_another_dtype_is_stored_in_parts_of_the_same_size(name):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    code, more = stored_as(dtype)
    assert (code, more) == OTHERS[name]
    assert named_dtype(name) == dtype
    assert CODES[code].itemsize * (more or (1,))[0] == dtype.itemsize


def test_the_byte_order_does_not_matter():
    assert stored_as(">f4") == stored_as("<f4") == ("F32", ())
    assert stored_as(">c16") == ("F64", (2,))
    assert named_dtype("float32").isnative


@pytest.mark.parametrize("dtype", [object, "U3", "S2", "M8[s]", "V4", np.longdouble, [("a", "f4")]])
def test_what_cannot_be_stored_is_refused(dtype):
    with pytest.raises(ArgumentError, match=r"cannot be stored in a checkpoint; .* float32"):
        stored_as(dtype)


@pytest.mark.parametrize("name", ["float33", "", "object", "<f4", "f4", "str32", None, 4, ["bool"]])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(CorruptCheckpointError, match=r"dtype .* is not known"):
        named_dtype(name)
    with pytest.raises(ArgumentError, match=r"dtype .* is not known"):
        named_dtype(name, ArgumentError)
