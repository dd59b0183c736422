"""The names in PyTorch's checkpoints that mean something here, and its dtypes in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from fsdpcore.checkpoint.interchange.dcp.pickles import Name

_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"

METADATA = Name(_METADATA, "Metadata")
TENSOR = Name(_METADATA, "TensorStorageMetadata")
BYTES = Name(_METADATA, "BytesStorageMetadata")
CHUNK = Name(_METADATA, "ChunkStorageMetadata")
INDEX = Name(_METADATA, "MetadataIndex")
STORAGE_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
SIZE = Name("torch", "Size")
PROPERTIES = (Name(_METADATA, "TensorProperties"), Name(_OLDER, "TensorProperties"))
REBUILD = Name("torch._utils", "_rebuild_tensor_v2")
REBUILD_UNTYPED = Name("torch._utils", "_rebuild_tensor_v3")
UNTYPED = Name("torch.storage", "UntypedStorage")

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        **{
            name: np.dtype(name)
            for name in (
                *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
                *("float16", "float32", "float64", "complex64", "complex128"),
            )
        },
        **{
            name: np.dtype(getattr(ml_dtypes, name))
            for name in (
                *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
                *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
            )
        },
    }
)
"""By their names in ``torch``."""

OTHER_DTYPES = frozenset(
    {
        *("complex32", "float4_e2m1fn_x2", "quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    }
)
"""Those that NumPy does not have."""

STORAGES: Mapping[Name, str] = MappingProxyType(
    {
        Name("torch", f"{kind}Storage"): dtype
        for kind, dtype in {
            "Bool": "bool",
            "Byte": "uint8",
            "Char": "int8",
            "Short": "int16",
            "Int": "int32",
            "Long": "int64",
            "Half": "float16",
            "BFloat16": "bfloat16",
            "Float": "float32",
            "Double": "float64",
            "ComplexFloat": "complex64",
            "ComplexDouble": "complex128",
        }.items()
    }
)
"""The dtype of each kind of typed storage."""

IN_METADATA = frozenset(
    {
        *(METADATA, TENSOR, BYTES, CHUNK, INDEX, STORAGE_INFO, SIZE, *PROPERTIES),
        *(Name("torch", name) for name in (*DTYPES, *OTHER_DTYPES)),
        Name(_METADATA, "_MEM_FORMAT_ENCODING"),
        Name(_OLDER, "MEM_FORMAT_ENCODING"),
        Name(_METADATA, "StorageMeta"),
        Name("torch.serialization", "_get_layout"),
        Name("collections", "OrderedDict"),
        *(
            Name(module, f"{kind}Path")
            for module in ("pathlib", "pathlib._local")
            for kind in ("Posix", "Windows")
        ),
    }
)
"""What the file ``.metadata`` may name."""

IN_TENSORS = frozenset(
    {
        *(REBUILD, REBUILD_UNTYPED, UNTYPED, *STORAGES),
        *(Name("torch", name) for name in DTYPES),
        Name("collections", "OrderedDict"),
    }
)
"""What the pickle of a tensor may name."""
