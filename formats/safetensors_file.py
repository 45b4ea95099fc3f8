"""safetensors files: the parts of `dtypes`, `safetensors_header`, `safetensors_layout` and
`safetensors_writer` that the rest of the program uses, under one name."""

from qtool.formats.dtypes import (
    DTYPE_BITS,
    DTYPE_BYTES,
    FLOAT_DTYPES,
    NUMPY_DTYPES,
    as_array,
    byte_size,
    from_float32,
    to_float32,
)
from qtool.formats.safetensors_header import (
    TensorInfo,
    TensorSpec,
    parse_json,
    read_header,
    read_json,
    read_range,
)
from qtool.formats.safetensors_layout import (
    INDEX_NAME,
    FileLayout,
    Layout,
    lay_out,
    plan_shards,
)
from qtool.formats.safetensors_writer import StreamWriter, checksum, parse_size

__all__ = [
    "DTYPE_BITS",
    "DTYPE_BYTES",
    "FLOAT_DTYPES",
    "INDEX_NAME",
    "NUMPY_DTYPES",
    "FileLayout",
    "Layout",
    "StreamWriter",
    "TensorInfo",
    "TensorSpec",
    "as_array",
    "byte_size",
    "checksum",
    "from_float32",
    "lay_out",
    "parse_json",
    "parse_size",
    "plan_shards",
    "read_header",
    "read_json",
    "read_range",
    "to_float32",
]
