"""The files of the checkpoint that a GGUF file becomes: where weights lie, and what is beside."""

import json
from typing import Any

from qtool.errors import QtoolError, UnsupportedError
from qtool.formats.safetensors_file import Layout, plan_shards
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.model import HfModel
from qtool.gguf.tokenizer.files import tokenizer_files
from qtool.gguf_types import BY_NAME

ONE_FILE = 1 << 62  # bytes of a shard
_GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id")


def in_one_file(model: HfModel) -> Layout:
    """Where the tensors lie in the checkpoint that a recipe for safetensors reads."""
    return plan_shards([spec for tensor in model.tensors for spec in tensor.specs], ONE_FILE)


def quantized_again(source: GgufSource, requantize: bool) -> str | None:
    """What is said of a source that is quantized; UnsupportedError unless that is asked for."""
    quantized = [tensor for tensor in source.tensors if tensor.type.name in BY_NAME]
    if not quantized:
        return None
    if not requantize:
        raise UnsupportedError(
            f"{source.path}: {quantized[0].name} is quantized already, as "
            f"{quantized[0].type.name}; quantizing it again loses more than quantizing the "
            "original: use the F16, BF16 or F32 file, or give --requantize"
        )
    kinds = ", ".join(sorted({tensor.type.name for tensor in quantized}))
    return (
        f"the source is quantized already ({kinds}): quantizing it again loses more than "
        "quantizing the original does"
    )


def side_files(source: GgufSource, model: HfModel) -> dict[str, bytes]:
    """config.json and the tokenizer, by file name."""
    try:
        tokenizer = tokenizer_files(source.metadata)
    except QtoolError as error:  # it knows the keys alone
        raise type(error)(f"{source.path}: {error}") from None
    generation = {key: value for key in _GENERATION if (value := model.config[key]) is not None}
    return {
        "config.json": as_json(model.config),
        "generation_config.json": as_json(generation),
        **tokenizer,
    }


def origin(source: GgufSource) -> dict[str, Any]:
    """What a certificate says of the file."""
    types = sorted({tensor.type.name for tensor in source.tensors if tensor.type.weights > 1})
    return {"format": "gguf", "layout": ", ".join(types), "digest": None, "group_size": None,
            "scale_dtype": None}  # fmt: skip


def made_from(source: GgufSource) -> dict[str, Any]:
    """The same for what is later made of the checkpoint."""
    name = source.metadata.get("general.name")
    return {
        "format": "gguf",
        "architecture": source.architecture,
        "name": None if name is None else str(name.value),
        "types": sorted({tensor.type.name for tensor in source.tensors}),
    }


def as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
