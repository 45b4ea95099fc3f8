"""A safetensors checkpoint seen as the GGUF file that convert_hf_to_gguf.py would write of it.

Only headers and JSON files are read to make it; rows of a tensor are read when they are asked for
(`hf_tensors`, `hf_rows`). Every tensor of the checkpoint is used, or dropped with a reason, or
named in an error.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints import padding, structure
from qtool.checkpoints.beside import refuse_adapter, said
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.decoder_names import SAVE_WITH_HEAD
from qtool.checkpoints.hf_config import Config, count
from qtool.errors import OTHER_MODEL, FormatError, SourceError, UnsupportedError
from qtool.formats.gguf_values import Value, string, u32
from qtool.gguf.architectures import Architecture, architecture_of
from qtool.gguf.architectures.limits import usual_yarn
from qtool.gguf.architectures.modules import HEADS, Module
from qtool.gguf.architectures.mtp import MTP, mtp_blocks
from qtool.gguf.from_hf.general import general_metadata
from qtool.gguf.from_hf.hf_tensors import Found
from qtool.gguf.from_hf.rope_tensors import rope_tensors
from qtool.gguf.source import QUANTIZATION_VERSION, GgufSource, SourceTensor
from qtool.gguf.tokenizer.keys import tokenizer_metadata
from qtool.gguf_types import F32
from qtool.messages.remarks import NOTE

NOTHING_READS = "nothing reads it: this block takes keys and values of an earlier one"
_COMPUTED = (
    ".rotary_emb.inv_freq",
    ".rotary_pos_emb.inv_freq",
    ".attention.bias",
    ".attention.masked_bias",
    ".attn.bias",
    ".attn.masked_bias",
    ".slope_rate",
    ".query_decay",
    ".key_decay",
    ".diagonal_decay",
)


def hf_source(checkpoint: Checkpoint) -> GgufSource:
    """What is to be written; refused before any tensor is read where it cannot be done."""
    where = str(checkpoint.path)
    refuse_adapter(checkpoint)
    architecture = architecture_of(checkpoint.config, where)
    config = architecture.completed(checkpoint.config)
    if architecture.mtp == MTP:
        config[MTP] = mtp_blocks(checkpoint.tensors)
    _refuse(architecture, checkpoint, config)
    mtp = architecture.mtp == MTP
    found = Found(checkpoint, config, mtp=mtp, bare=architecture.bare)
    if architecture.ahead_needed and found.left_out(count(config, "num_hidden_layers")):
        config.pop(architecture.mtp, None)  # config.json counts what is not stored
    tensors = _tensors(architecture, found)
    learned = {key: found.numbers(name) for key, name in architecture.learned.items()}
    if architecture.constants is not None:
        for name, numbers in architecture.constants(config).items():
            found.follows(name, numbers)
    dropped = found.dropped + [
        (found.names[name], _reason(name, architecture, found))
        for name in found.names
        if name not in found.used
    ]
    metadata = _metadata(architecture, checkpoint, config, tensors) | learned
    warnings = tuple(text for check in architecture.warn if (text := check(config)) is not None)
    own = [stored for plain, stored in found.names.items() if plain in found.used]
    doubles = sum(checkpoint.tensors[name].dtype == "F64" for name in own)
    warnings = (*said(checkpoint), *padding.said(checkpoint), *warnings)
    if doubles:
        many = "1 tensor is F64 and is" if doubles == 1 else f"{doubles} tensors are F64 and are"
        warnings += (f"{NOTE}{many} read as F32, as convert_hf_to_gguf.py does",)
    return GgufSource(
        checkpoint.path, metadata, tuple(tensors), tuple(dropped), warnings,
        requantized=checkpoint.stored_as,
    )  # fmt: skip


def _refuse(architecture: Architecture, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """UnsupportedError where llama.cpp would compute something else than the checkpoint."""
    where = str(checkpoint.path)
    codes = structure.packed(checkpoint.tensors)
    said_so = config.get("quantization_config") and not _keeps_mxfp4(architecture, config)
    if said_so or codes is not None:
        raise UnsupportedError(
            f"{where}: this checkpoint is quantized{f' ({codes})' if codes else ''}; take the one "
            "that it was made from or, where there is none, "
            + ("give `qtool quantize` --requantize, or take " if said_so else "")
            + "what `qtool convert MODEL --to hf` makes of it"
            + ("" if said_so else ", which needs its quantization_config")
        )
    blocks = count(config, "num_hidden_layers")
    if blocks > len(checkpoint.tensors):
        raise SourceError(
            f"{where}: config.json says {blocks} blocks, and there are only "
            f"{len(checkpoint.tensors)} tensors"
        )
    counted = {module.each[1] for module in architecture.modules if module.each is not None}
    counted |= {module.rows.groups for module in architecture.modules if module.rows is not None}
    counted |= {"num_experts" for module in architecture.modules if "experts" in module.shape}
    if config.get("num_experts") and not {"num_experts", "moe_num_experts"} & counted:
        raise SourceError(
            f"{where}: config.json says num_experts {str(config['num_experts'])[:80]}, and "
            f"{config['architectures'][0]} has none; {OTHER_MODEL}"
        )
    checks = architecture.refuse if architecture.yarn else (usual_yarn, *architecture.refuse)
    problems = [text for check in checks if (text := check(config)) is not None]
    known = architecture.activations
    names = (
        "hidden_activation",
        "hidden_act",
        "mlp_hidden_act",
        "activation_function",
        "activation",
    )
    activation = next((config[name] for name in names if config.get(name)), known[0])
    if activation not in known:
        problems.append(f"the activation is {activation!r}, and it computes {known[0]}")
    kind = config["rope_parameters"]["full_attention"]["rope_type"]
    if kind not in architecture.rope:
        problems.append(f"it does not know rope scaling of the type {kind!r}")
    if problems:
        raise UnsupportedError(
            f"{where}: llama.cpp's {architecture.name} does not compute what this checkpoint asks "
            f"for: {'; '.join(problems)}"
        )


def _keeps_mxfp4(architecture: Architecture, config: Config) -> bool:
    """Whether experts are in MXFP4, as the model was trained, and llama.cpp has them so."""
    quantized = config["quantization_config"]
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
    return method == "mxfp4" and any(module.packed for module in architecture.modules)


def gguf_names(architecture: Architecture, config: Config) -> dict[tuple[str, int], str]:
    """(name of a module in the table, block) -> its GGUF name, both without suffix.

    Of the blocks that have the module by the settings, which are complete.
    """
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import TensorNameMap

    known = architecture.names or architecture.name
    number = {name: number for number, name in MODEL_ARCH_NAMES.items()}.get(known)
    if number is None:
        raise UnsupportedError(
            f"the gguf package that is installed does not know {known!r}; update it"
        )
    blocks = architecture.blocks(config)
    mapping = TensorNameMap(number, blocks)

    def named(module: Module, block: int) -> str:
        if module.called:
            at = block + (count(config, module.behind) if module.behind else 0)
            of_block = "{b}" in module.name and not module.of_model
            return f"blk.{at}.{module.called}" if of_block else module.called
        return mapping[module.name.replace("{b}", str(block))]

    return {
        (module.name, block): named(module, block)
        for module in architecture.modules
        for block in range(blocks if "{b}" in module.name else 1)
        if module.in_block(config, block)
    }


def _tensors(architecture: Architecture, found: Found) -> list[SourceTensor]:
    """All tensors in the order of the checkpoint, those computed from config.json first."""
    config, path = found.config, found.checkpoint.path
    modules = {module.name: module.fitted(config) for module in architecture.modules}
    tied = bool(config.get("tie_word_embeddings")) and not found.own_head
    tensors: list[SourceTensor] = []
    for (name, block), gguf_name in gguf_names(architecture, config).items():
        module = modules[name]
        if tied and name in HEADS:
            if architecture.needs_head:
                tensors.append(_head(tensors, gguf_name))
            continue
        if module.asked and not config.get(module.asked):
            continue
        parts = [found.tensor(module, block, gguf_name, end) for end, _ in module.ends]
        needed = (module.needed or name in HEADS) and not found.left_out(block)
        if parts[0] is None and (any(parts) or needed):
            lacking = (module.each or (name,))[0].replace("{b}", str(block)).replace("{i}", "0")
            lacking += module.ends[0][1]
            bare = lacking.partition(".")[2]
            way = "fetch it again, or check config.json"
            if bare in found.names:
                way = f"it has {bare}, as of a class without a head: {SAVE_WITH_HEAD}"
            raise FormatError(
                f"{path}: lacks {lacking}, which llama.cpp's {architecture.name} needs; {way}"
            )
        tensors += [tensor for tensor in parts if tensor is not None]
    position = {name: at for at, name in enumerate(found.checkpoint.tensors)}
    tensors.sort(key=lambda tensor: position[tensor.origin[0]])
    return [*_computed(architecture, config), *tensors]


def _head(tensors: list[SourceTensor], gguf_name: str) -> SourceTensor:
    """The embedding once more, where llama.cpp does not take it for the head by itself."""
    embedding = next(tensor for tensor in tensors if tensor.name == "token_embd.weight")
    return replace(embedding, name=gguf_name + ".weight")


def _computed(architecture: Architecture, config: Mapping[str, Any]) -> list[SourceTensor]:
    own = {} if architecture.computed is None else architecture.computed(config)
    return [
        SourceTensor(name, values.shape, F32, partial(_whole, values))
        for name, values in {**rope_tensors(config), **own}.items()
    ]


def _whole(values: NDArray[np.float32], first: int, last: int) -> NDArray[np.uint8]:
    return values.view(np.uint8).reshape(1, -1)[first:last]


def _reason(name: str, architecture: Architecture, found: Found) -> str:
    """Why a tensor that no module of the table uses is dropped; an error where it may not be."""
    where = found.checkpoint.path
    if name.endswith(_COMPUTED):
        return "llama.cpp computes it itself"
    if name.removesuffix(".weight") in architecture.unread(found.config):
        return NOTHING_READS
    if name.removesuffix(".weight") in HEADS:
        if found.own_head:
            raise UnsupportedError(
                f"{where}: {name} differs from the embedding, which llama.cpp's "
                f"{architecture.name} always takes for the head"
            )
        return "the head is the embedding, which is stored once"
    if name.removeprefix("model.").startswith(("mtp.", "mtp_")) or found.beyond(name):
        return f"multi-token prediction: files of llama.cpp's {architecture.name} lack it"
    raise FormatError(
        f"{where}: llama.cpp's {architecture.name} with {found.config['num_hidden_layers']} blocks "
        f"has no place for the tensor {name!r}; config.json belongs to another checkpoint, or "
        "the table in qtool/gguf/architectures/ lacks a line"
    )


def _metadata(
    architecture: Architecture,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    tensors: list[SourceTensor],
) -> dict[str, Value]:
    """All keys but general.file_type, which is known once types are chosen."""
    metadata = {"general.architecture": string(architecture.name)}
    metadata |= general_metadata(checkpoint.folder, checkpoint.config, tensors)
    for key in architecture.keys:
        if (value := key.value(config)) is not None:
            metadata[f"{architecture.name}.{key.name}"] = value
    metadata["general.quantization_version"] = u32(QUANTIZATION_VERSION)
    rows = next(tensor.rows for tensor in tensors if tensor.name == "token_embd.weight")
    return metadata | tokenizer_metadata(checkpoint.folder, architecture.name, rows, config)
