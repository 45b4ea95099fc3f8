"""A safetensors checkpoint seen as the GGUF file that convert_hf_to_gguf.py would write of it.

Only headers and JSON files are read to make it; rows of a tensor are read when they are asked for
(`hf_rows`). Every tensor of the checkpoint is used, or dropped with a reason, or named in an error.
Matrices keep their dtype; llama.cpp wants vectors, norms and routers in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import structure
from qtool.checkpoint import Checkpoint
from qtool.decoder_names import name_alone, sees
from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.formats.gguf_values import Value, string, u32
from qtool.gguf.architectures import Architecture, architecture_of
from qtool.gguf.architectures.limits import usual_yarn
from qtool.gguf.architectures.modules import EMBEDDINGS, HEADS, Module
from qtool.gguf.architectures.prediction import MTP, name_in_table, predicting_blocks
from qtool.gguf.architectures.shapes import expected_shape
from qtool.gguf.cuts import Cut
from qtool.gguf.expert_rows import BLOCKS, MXFP4, SCALES, biases, packed_rows
from qtool.gguf.general import general_metadata
from qtool.gguf.hf_config import Config, count
from qtool.gguf.hf_rows import hf_rows, same_bytes
from qtool.gguf.kinds import stored_shape
from qtool.gguf.rope_tensors import rope_tensors
from qtool.gguf.row_maps import RowMap
from qtool.gguf.source import QUANTIZATION_VERSION, GgufSource, SourceTensor
from qtool.gguf.tokenizers import tokenizer_metadata
from qtool.gguf_types import F32
from qtool.plan.beside import refuse_adapter, said
from qtool.transforms.rotated import Rotated

# What convert_hf_to_gguf.py widens beside vectors.
ALWAYS_FLOAT32 = (
    "_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight", ".ssm_conv1d.weight",
    ".indexer.proj.weight", ".shortconv.conv.weight", "position_embd.weight",
)  # fmt: skip
NOTHING_READS = "nothing reads it: this block takes keys and values of an earlier one"
_COMPUTED = (
    ".rotary_emb.inv_freq",
    ".attention.bias",
    ".attention.masked_bias",
    ".attn.bias",
    ".attn.masked_bias",
)


def hf_source(checkpoint: Checkpoint) -> GgufSource:
    """What is to be written; refused before any tensor is read where it cannot be done."""
    where = str(checkpoint.path)
    refuse_adapter(checkpoint)
    architecture = architecture_of(checkpoint.config, where)
    config = architecture.completed(checkpoint.config)
    if architecture.predicts == MTP:
        config[MTP] = predicting_blocks(checkpoint.tensors)
    _refuse(architecture, checkpoint, config)
    found = _Found(checkpoint, config, mtp=architecture.predicts == MTP)
    tensors = _tensors(architecture, found)
    dropped = found.dropped + [
        (found.names[name], _reason(name, architecture, found))
        for name in found.names
        if name not in found.used
    ]
    metadata = _metadata(architecture, checkpoint, config, tensors)
    warnings = tuple(text for check in architecture.warn if (text := check(config)) is not None)
    warnings = (*said(checkpoint), *warnings)
    return GgufSource(checkpoint.path, metadata, tuple(tensors), tuple(dropped), warnings)


def _refuse(architecture: Architecture, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """UnsupportedError where llama.cpp would compute something else than the checkpoint."""
    where = str(checkpoint.path)
    codes = structure.packed(checkpoint.tensors)
    said_so = config.get("quantization_config") and not _keeps_mxfp4(architecture, config)
    if said_so or codes is not None:
        raise UnsupportedError(
            f"{where}: this checkpoint is quantized{f' ({codes})' if codes else ''}; convert the "
            "one that it was made from or, where there is none, what `qtool convert MODEL --to hf` "
            f"makes of it{'' if said_so else ', which needs its quantization_config'}"
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
            f"{config['architectures'][0]} has none; one of the two is of another model"
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


@dataclass
class _Found:
    """The checkpoint's tensors by the names that a checkpoint of text alone has."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    mtp: bool = False  # it has a place for blocks that checkpoints call so
    names: dict[str, str] = field(default_factory=dict)  # such a name -> the name here
    used: set[str] = field(default_factory=set)
    dropped: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.checkpoint.tensors:
            plain = name_alone(name)
            if self.mtp:
                plain = name_in_table(plain, self.config)
            if sees(plain):
                reason = "sees images or hears: llama.cpp keeps that part in a file of its own"
                self.dropped.append((name, reason))
            elif plain in self.names:
                other = self.names[plain]
                raise FormatError(f"{self.checkpoint.path}: both {other} and {name} are {plain}")
            else:
                self.names[plain] = name

    def tensor(
        self, module: Module, block: int, gguf_name: str, suffix: str
    ) -> SourceTensor | None:
        """The weight or bias of a module in a block, None where the checkpoint has none."""

        def place(name: str, part: int = 0) -> str:
            return name.replace("{b}", str(block)).replace("{i}", str(part))

        rows, end = module.rows, dict(module.ends)[suffix]
        ends = (end,) if suffix == ".bias" else (BLOCKS, SCALES)
        for name in (module.name, *module.also) if module.packed else ():
            if all(place(name) + one in self.names for one in ends):
                return self._of_experts(module, [place(name) + one for one in ends], gguf_name)
        names = [n for n in (module.name, *module.also) if place(n) + end in self.names][:1]
        parts = [place(name) + end for name in names]
        stacked = not parts and module.each is not None
        cut = module.cut
        if not parts and module.each is not None:
            cut = None  # of those in one tensor
            name, counted = module.each
            if place(name) + end in self.names:
                parts = [place(name, i) + end for i in range(self._count(counted))]
        if not parts and module.fused is not None and suffix == ".weight":
            stacked = False
            name, rows = module.fused
            parts = [n for n in (place(name), place(name) + end) if n in self.names][:1]
            cut = (
                module.cut
                if parts and not self._is_straight(module, block, parts[0], rows)
                else None
            )
        if not parts:
            return None
        if missing := [part for part in parts if part not in self.names]:
            raise FormatError(f"{self.checkpoint.path}: lacks {missing[0]}; fetch it again")
        self.used.update(parts)
        infos = [self.checkpoint.tensors[self.names[part]] for part in parts]
        if module.turned and suffix == ".weight" and len(infos[0].shape) == 2:
            cut = Cut(1, infos[0].shape[0], turned=True)
        reader = hf_rows(
            [(partial(self.checkpoint.stretch, info.name), info) for info in infos],
            stacked=stacked,
            float32=suffix != ".weight" or (gguf_name + suffix).endswith(ALWAYS_FLOAT32),
            rows=rows,
            groups=1 if rows is None else count(self.config, rows.groups),
            add=module.add if suffix == ".weight" else 0,
            values=module.values,
            columns=module.columns,
            squeezed=module.squeezed,
            cut=cut,
            folded=(expected_shape(module, self.config, suffix, block) if module.folded else None),
        )
        origin = tuple(info.name for info in infos)
        self._check(module, suffix, origin, reader.shape, block)
        return SourceTensor(
            gguf_name + suffix, reader.shape, reader.type, reader.read, origin,
            order=reader.order, columns=reader.columns, cut=reader.cut,
        )  # fmt: skip

    def _of_experts(self, module: Module, parts: list[str], gguf_name: str) -> SourceTensor:
        """Biases of experts, or their matrices in MXFP4."""
        self.used.update(parts)
        infos = [self.checkpoint.tensors[self.names[part]] for part in parts]
        read = [(partial(self.checkpoint.stretch, info.name), info) for info in infos]
        origin = tuple(info.name for info in infos)
        if len(read) == 1:
            bias = biases(read[0], module.rows)
            self._check(module, ".bias", origin, bias.shape)
            return SourceTensor(gguf_name + ".bias", bias.shape, F32, bias.read, origin)
        packed = packed_rows(read[0], read[1], module.rows)
        self._check(module, ".weight", origin, packed.shape)
        return SourceTensor(gguf_name + ".weight", packed.shape, MXFP4, packed.read, origin)

    def _is_straight(self, module: Module, block: int, name: str, rows: RowMap | None) -> bool:
        """Whether fused experts lie as in memory; transformers goes by their shape, too."""
        expected = expected_shape(module, self.config, block=block)
        if expected is None:
            return False
        whole = (expected[0], expected[1] * (rows.share if rows else 1), expected[2])
        return self.checkpoint.tensors[self.names[name]].shape == whole

    def left_out(self, block: int) -> bool:
        """Whether this is a block that predicts further tokens, of which there is no tensor."""
        if block < self.config["num_hidden_layers"]:
            return False
        return not any(name.startswith(f"model.layers.{block}.") for name in self.names)

    def beyond(self, name: str) -> bool:
        """Whether a tensor is of a block that predicts further tokens, behind those that run."""
        first, ahead = self.config["num_hidden_layers"], self.config.get("num_nextn_predict_layers")
        blocks = range(first, first + ahead) if isinstance(ahead, int) else ()
        return any(name.startswith(f"model.layers.{block}.") for block in blocks)

    @cached_property
    def own_head(self) -> bool:
        """Whether there is a head that differs from the embedding, whatever config.json says.

        transformers ties the two only where they are the same, and so it is here.
        """
        head, embedding = (
            next((self.names[n + ".weight"] for n in wanted if n + ".weight" in self.names), None)
            for wanted in (HEADS, EMBEDDINGS)
        )
        if head is None or embedding is None:
            return False
        if isinstance(self.checkpoint, Rotated) and self.checkpoint.head is not None:
            return True  # once it is rotated, if not yet
        one, other = (
            (partial(self.checkpoint.stretch, name), self.checkpoint.tensors[name])
            for name in (head, embedding)
        )
        return not same_bytes(one, other)

    def _check(
        self,
        module: Module,
        suffix: str,
        origin: tuple[str, ...],
        shape: tuple[int, ...],
        block: int = 0,
    ) -> None:
        """FormatError where a tensor is not as large as config.json says."""
        expected = expected_shape(module, self.config, suffix, block)
        if expected is None or stored_shape(shape) == stored_shape(expected):
            return
        what = origin[0] if len(origin) == 1 else f"the stack of {origin[0]} and those after it"
        raise FormatError(
            f"{self.checkpoint.path}: {what} has the shape {list(shape)}, and by the settings of "
            f"config.json it should be {list(expected)}; one of the two is of another model"
        )

    def _count(self, setting: str) -> int:
        number = count(self.config, setting)
        if number > len(self.names):
            raise SourceError(
                f"{self.checkpoint.path}: config.json says {setting} {number}, and there are only "
                f"{len(self.names)} tensors"
            )
        return number


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
            return f"blk.{block}.{module.called}" if "{b}" in module.name else module.called
        return mapping[module.name.replace("{b}", str(block))]

    return {
        (module.name, block): named(module, block)
        for module in architecture.modules
        for block in range(blocks if "{b}" in module.name else 1)
        if module.in_block(config, block)
    }


def _tensors(architecture: Architecture, found: _Found) -> list[SourceTensor]:
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
            raise FormatError(
                f"{path}: lacks {lacking}{module.ends[0][1]}, which llama.cpp's "
                f"{architecture.name} needs; fetch it again, or check config.json"
            )
        tensors += [tensor for tensor in parts if tensor is not None]
    position = {name: at for at, name in enumerate(found.checkpoint.tensors)}
    tensors.sort(key=lambda tensor: position[tensor.origin[0]])
    return [*_computed(config), *tensors]


def _head(tensors: list[SourceTensor], gguf_name: str) -> SourceTensor:
    """The embedding once more, where llama.cpp does not take it for the head by itself."""
    embedding = next(tensor for tensor in tensors if tensor.name == "token_embd.weight")
    return replace(embedding, name=gguf_name + ".weight")


def _computed(config: Mapping[str, Any]) -> list[SourceTensor]:
    return [
        SourceTensor(name, values.shape, F32, partial(_whole, values))
        for name, values in rope_tensors(config).items()
    ]


def _whole(values: NDArray[np.float32], first: int, last: int) -> NDArray[np.uint8]:
    return values.view(np.uint8).reshape(1, -1)[first:last]


def _reason(name: str, architecture: Architecture, found: _Found) -> str:
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
        return f"predicts further tokens: files of llama.cpp's {architecture.name} lack it"
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
