"""The tensors of a safetensors checkpoint as llama.cpp's modules have them.

Matrices keep their dtype; llama.cpp wants vectors, norms and routers in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.decoder_names import name_alone, of_tower
from qtool.checkpoints.hf_config import count
from qtool.errors import OTHER_MODEL, FormatError, SourceError, UnsupportedError
from qtool.formats import safetensors_file as st
from qtool.formats.gguf_values import Kind, Value, array
from qtool.gguf.architectures.modules import EMBEDDINGS, HEADS, Module, spelled
from qtool.gguf.architectures.mtp import name_in_table
from qtool.gguf.architectures.shapes import expected_shape
from qtool.gguf.from_hf.cuts import Cut
from qtool.gguf.from_hf.expert_rows import BLOCKS, MXFP4, SCALES, biases, packed_rows
from qtool.gguf.from_hf.hf_rows import TYPES, hf_rows, padded, same_bytes, whole_rows
from qtool.gguf.from_hf.row_maps import RowMap
from qtool.gguf.source import ReadRows, SourceTensor
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.gguf_types import F32, I32
from qtool.transforms.rotated import Rotated

# What convert_hf_to_gguf.py widens beside vectors.
ALWAYS_FLOAT32 = (
    "_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight", ".ssm_conv1d.weight",
    "hc_attn_fn.weight", "hc_ffn_fn.weight", "output_hc_fn.weight",
    ".indexer_compressor_gate.weight", ".indexer_compressor_ape.weight",
    ".attn_compressor_ape.weight",
    ".ssm_conv1d_q.weight", ".ssm_conv1d_k.weight", ".ssm_conv1d_v.weight",
    ".indexer.proj.weight", ".shortconv.conv.weight", "position_embd.weight",
    ".altup_correct_coef.weight", ".altup_predict_coef.weight",
)  # fmt: skip


@dataclass
class Found:
    """The checkpoint's tensors by the names that a checkpoint of text alone has."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    mtp: bool = False  # it has a place for blocks that checkpoints call so
    bare: bool = False  # names as the table has them lack "model."
    names: dict[str, str] = field(default_factory=dict)  # such a name -> the name here
    used: set[str] = field(default_factory=set)
    dropped: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.checkpoint.tensors:
            plain = name_alone(name)
            if self.bare:
                plain = plain.removeprefix("model.").removeprefix("backbone.")
            if self.mtp:
                plain = name_in_table(plain, self.config)
            if of_tower(plain):
                reason = (
                    "vision or audio: llama.cpp keeps that part in a file of its own, which "
                    "its convert_hf_to_gguf.py --mmproj makes"
                )
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
        for name in module.stored if module.packed else ():
            if all(place(name) + one in self.names for one in ends):
                return self._of_experts(module, [place(name) + one for one in ends], gguf_name)
        names = [n for n in module.stored if place(n) + end in self.names][:1]
        read: ReadRows
        parts = [place(name) + end for name in names]
        stacked = not parts and module.each is not None and not module.joined
        cut = module.cut
        if not parts and module.each is not None:
            cut = None  # of those in one tensor
            rows = None if module.within else rows  # of that tensor, too
            pattern, counted = module.each
            spellings = spelled(pattern)
            if place(spellings[0]) + end in self.names:
                numbers = range(self._count(counted))
                parts = [place(name, i) + end for i in numbers for name in spellings]
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
        if module.whole:
            read = whole_rows(partial(self.checkpoint.stretch, infos[0].name), infos[0])
            self._check(module, suffix, (infos[0].name,), infos[0].shape, block)
            return SourceTensor(gguf_name + suffix, infos[0].shape, I32, read, (infos[0].name,))
        if module.transposed and suffix == ".weight" and len(infos[0].shape) == 2:
            cut = Cut(1, infos[0].shape[0], transposed=True)
        reader = hf_rows(
            [(partial(self.checkpoint.stretch, info.name), info) for info in infos],
            stacked=stacked,
            float32=suffix != ".weight" or (gguf_name + suffix).endswith(ALWAYS_FLOAT32),
            rows=rows,
            groups=1 if rows is None else count(self.config, rows.groups),
            add=module.add if suffix == ".weight" else 0,
            values=module.values,
            columns=module.columns,
            factors=module.factors if suffix == ".weight" else (),
            squeezed=module.squeezed,
            joined=module.joined,
            file_of=self.checkpoint.file_of,
            cut=cut,
            folded=(
                expected_shape(module, self.config, suffix, block)
                if module.folded or stacked
                else None
            ),
        )
        origin = tuple(info.name for info in infos)
        shape = reader.shape
        read = reader.read
        expected = expected_shape(module, self.config, suffix, block) if module.padded else None
        if expected is not None and shape[0] < expected[0]:
            shape, read = (expected[0], *shape[1:]), padded(reader, expected[0])
        self._check(module, suffix, origin, shape, block)
        return SourceTensor(
            gguf_name + suffix, shape, reader.type, read, origin,
            order=reader.order, columns=reader.columns, cut=reader.cut,
            growth=reader.growth,
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

    def numbers(self, name: str) -> Value:
        """What each block has in a tensor of one number."""
        found = []
        for block in range(count(self.config, "num_hidden_layers")):
            plain = name.replace("{b}", str(block))
            info = self.checkpoint.tensors.get(self.names.get(plain, ""))
            if info is None or prod(info.shape) != 1 or info.dtype not in TYPES:
                held = "nothing" if info is None else f"{info.dtype} {list(info.shape)}"
                raise FormatError(
                    f"{self.checkpoint.path}: {plain} is {held}, expected one number; fetch the "
                    "checkpoint again"
                )
            raw = self.checkpoint.stretch(info.name, 0, info.nbytes)
            found.append(float(st.to_float32(raw, info.dtype, (1,))[0]))
            self.used.add(plain)
        return array(Kind.FLOAT32, found)

    def follows(self, name: str, expected: list[int]) -> None:
        """Drop integers that follow from the settings; UnsupportedError where they are others."""
        if name not in self.names:
            return
        info = self.checkpoint.tensors[self.names[name]]
        raw = self.checkpoint.stretch(info.name, 0, info.nbytes)
        if info.dtype != "I64" or raw.view(np.int64).tolist() != expected:
            raise UnsupportedError(
                f"{self.checkpoint.path}: {info.name} holds other numbers than follow from "
                f"config.json, which GGUF files are made by; {OTHER_MODEL}"
            )
        self.used.add(name)
        self.dropped.append((info.name, "follows from config.json, and is said in metadata"))

    def left_out(self, block: int) -> bool:
        """Whether this is a block of multi-token prediction, of which there is no tensor."""
        if block < self.config["num_hidden_layers"]:
            return False
        return not any(name.startswith(f"model.layers.{block}.") for name in self.names)

    def beyond(self, name: str) -> bool:
        """Whether a tensor is of a block of multi-token prediction, behind those that run."""
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
            f"config.json it should be {list(expected)}; {OTHER_MODEL}"
        )

    def _count(self, setting: str) -> int:
        number = count(self.config, setting)
        if number > len(self.names):
            raise SourceError(
                f"{self.checkpoint.path}: config.json says {setting} {number}, and there are only "
                f"{len(self.names)} tensors"
            )
        return number
