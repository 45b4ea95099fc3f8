"""An artifact opened for reading: any checkpoint folder or safetensors file, quantized or not.

The quantized matrices of a folder are the modules that have a tensor of codes (`qweight`,
`weight_packed`, a `weight` of bytes); everything else is a dense tensor. Opening reads headers and
JSON only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.checkpoint import Checkpoint
from qtool.errors import FormatError, QtoolError, SourceError, UnsupportedError
from qtool.formats import (
    FORMATS,
    ArtifactScheme,
    detect,
    gptq,
    mlx,
    mlx_experts,
    mlx_fused,
    mxfp4_experts,
)
from qtool.formats import safetensors_file as st
from qtool.formats.mlx import is_mlx
from qtool.formats.safetensors_header import TensorInfo
from qtool.formats.stored_codes import SCALE_DTYPES
from qtool.record import FILE_NAME, FILES, LAYERS, OUTLIERS
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


# Where a quantization_config may lie beside config.json, and the key it has there.
# Keys of config.json that say how tensors are quantized; the last is of mlx-lm.
_QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
_CONFIG_FILES = (
    ("quantize_config.json", None),
    ("quant_config.json", None),
    ("hf_quant_config.json", "quantization"),
)
# Tensors that belong to a packed matrix in formats that are not decoded here.
_AUXILIARY = (
    "scales",
    "biases",
    "global_scale",
    "qzeros",
    "scaled_zeros",
    "g_idx",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_global_scale",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "SCB",
    "weight_format",
    "s1_scales",
    "s1_szeros",
    "s2_scales",
    "s2_zeros",
    "k_scale",
    "v_scale",
)
_STACK = " stack"  # as the scheme of mxfp4_experts ends
_SCALES = ("scales", "weight_scale", "weight_scale_inv", "SCB")
_BITSANDBYTES = ("weight.absmax", "weight.quant_map", "weight.nested_", "weight.quant_state")


@dataclass(frozen=True)
class Entry:
    """One matrix or tensor of the model, with the tensors that store it."""

    name: str  # as in the unquantized checkpoint
    shape: tuple[int, ...]  # likewise
    dtype: str  # of the largest stored tensor
    scheme: Scheme | str | None  # None is dense; a word where the format is not decoded
    stored: tuple[str, ...]
    nbytes: int
    parameters: int

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def stacked(self) -> bool:
        """Whether it is experts in one tensor, which is read as numbers, not as codes."""
        return isinstance(self.scheme, str) and self.scheme.endswith(_STACK)

    @property
    def bits_per_weight(self) -> float:
        """Bits stored for each number."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class Artifact:
    """A checkpoint and what its config says about how it is quantized."""

    checkpoint: Checkpoint
    found: ArtifactScheme
    provenance: Mapping[str, Any] | None
    unreadable: str = ""  # why the qtool.json that is there says nothing

    @classmethod
    def open(cls, path: Path | str) -> Artifact:
        """Read headers and configs; FormatError where they contradict each other. A damaged record
        of how it was made is no error: weights are read without it."""
        return cls.of(Checkpoint.open(path))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Artifact:
        """The same of an opened checkpoint."""
        found = detect(quantization_config(checkpoint))
        if found.format in ("mlx", "dense"):  # mlx-lm's plain files, too
            checkpoint = experts_apart(checkpoint)
        packed = [name for name in checkpoint.tensors if name.endswith(".qweight")]
        if packed and found.format == "dense":
            found = _guess(checkpoint, packed[0].removesuffix(".qweight"))
        return cls(checkpoint, found, *record_in(checkpoint.folder))

    @property
    def decoded(self) -> bool:
        """Whether quantized matrices can be read here."""
        return self.found.scheme is not None and self.found.format in FORMATS

    def check_unchanged(self) -> None:
        """UnsupportedError for a file of mlx-lm whose numbers are no longer the checkpoint's."""
        why = mlx_experts.changed(self.checkpoint.tensors, self._kind)
        if self.found.format == "mlx" and why is not None:
            raise UnsupportedError(f"{self.checkpoint.path}: {why}")

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Everything in the artifact by its unquantized name, in the order of the files."""
        entries = dict(self._apart)
        for name, whole in self._wholes.items():
            parts = [entries.pop(part) for expert in whole.parts for part in expert]
            entries[name] = Entry(
                name, whole.shape, parts[0].dtype, f"{parts[0].scheme or parts[0].dtype}{_STACK}",
                tuple(stored for part in parts for stored in part.stored),
                sum(part.nbytes for part in parts), sum(part.parameters for part in parts),
            )  # fmt: skip
        return entries

    @cached_property
    def _wholes(self) -> Mapping[str, mlx_fused.Whole]:
        """MLX's experts that the checkpoint has in one tensor."""
        if self.found.format != "mlx":
            return {}
        shapes = {name: entry.shape for name, entry in self._apart.items()}
        return mlx_fused.wholes(shapes, self._kind)

    @cached_property
    def _apart(self) -> dict[str, Entry]:
        """Every matrix and tensor by itself."""
        tensors = self.checkpoint.tensors
        taken: set[str] = set()
        entries: dict[str, Entry] = {}
        found: list[Entry] = []
        for name, info in tensors.items():
            module = self._module(name, info)
            if module is not None:
                entry = self._packed(module, name)
            elif not self.decoded and self.found.format != "dense":
                entry = self._undecoded(name)
            elif self.found.format != "dense" and info.dtype.startswith("F8_E") and info.size > 1:
                entry = self._experts(name)
            else:
                entry = Entry(name, info.shape, info.dtype, None, (name,), info.nbytes, info.size)
            found.append(entry)
            taken.update(entry.stored[1:])
        for entry in found:
            if entry.stored[0] not in taken:
                if entry.name in entries:
                    raise FormatError(
                        f"{self.checkpoint.path}: {entry.name} is there both packed and dense"
                    )
                entries[entry.name] = entry
        return entries

    @property
    def _kind(self) -> str:
        return str(self.checkpoint.config.get("model_type") or "")

    def _part(self, name: str) -> NDArray[np.float32]:
        """A part of a whole: an expert's matrix or bias."""
        if name.endswith(".bias"):
            return self.checkpoint.float32(name)
        module = name.removesuffix(".weight")
        quant: GroupQuant = mlx.unpack(module, self.stored_tensor, self.found)
        return quant.dequantize()

    def _module(self, name: str, info: TensorInfo) -> str | None:
        """The module whose codes a tensor holds, or None."""
        if self.found.format == "dense":
            return None
        module, _, last = name.rpartition(".")
        if last == "qweight":
            return module
        codes = FORMATS[self.found.format].CODES if self.decoded else ()
        return module if last in codes and info.dtype not in st.FLOAT_DTYPES else None

    def _stored(self, module: str, codes: str) -> tuple[str, ...]:
        """The tensors of a packed module that are there."""
        names = (f"{module}.{last}" for last in _AUXILIARY)
        return (codes, *(name for name in names if name in self.checkpoint.tensors))

    def _look(self, name: str) -> TensorInfo | NDArray[Any] | None:
        """A header's entry; the two numbers of a weight_shape themselves."""
        info = self.checkpoint.tensors.get(name)
        small = info is not None and name.endswith(".weight_shape") and info.nbytes <= 64
        return self.stored_tensor(name) if small and self.checkpoint.readable else info

    def _packed(self, module: str, codes: str) -> Entry:
        tensors = self.checkpoint.tensors
        stored = self._stored(module, codes)
        weight = tensors[codes]
        scheme: Scheme | str = self.found.format
        if self.decoded:
            module_format = FORMATS[self.found.format]
            scheme, shape = module_format.scheme_in(module, self._look, self.found)
        else:
            shape = _unpacked(weight, quantization_config(self.checkpoint))
        nbytes = sum(tensors[name].nbytes for name in stored)
        return Entry(f"{module}.weight", shape, weight.dtype, scheme, stored, nbytes, prod(shape))

    def _undecoded(self, name: str) -> Entry:
        """A tensor of a format that is named here, not read; its aids are counted with it."""
        tensors = self.checkpoint.tensors
        info = tensors[name]
        if stack := mxfp4_experts.stack_of(name, tensors):
            return self._stack(name, *stack)
        module, _, last = name.rpartition(".")
        if last not in ("weight", "weight_packed") or info.dtype in st.FLOAT_DTYPES:
            return Entry(name, info.shape, info.dtype, None, (name,), info.nbytes, info.size)
        aids = tuple(f"{module}.{aid}" for aid in _AUXILIARY if f"{module}.{aid}" in tensors)
        if self.found.format == "bitsandbytes":
            marks = tuple(f"{module}.{mark}" for mark in _BITSANDBYTES)
            aids += tuple(n for n in tensors if n.startswith(marks))
        stored = (name, *aids)
        nbytes = sum(tensors[n].nbytes for n in stored)
        parameters = info.size * _codes_per_element(info.dtype, last, self._config_bits())
        shape = info.shape
        if self.found.format == "mlx" and info.dtype == "U32" and len(shape) == 2:
            shape = (shape[0], shape[1] * 32 // _mlx_bits(self.checkpoint, module))
            parameters = prod(shape)
        if last == "weight_packed" and len(shape) == 2:
            shape = (shape[0], parameters // shape[0] if shape[0] else 0)
        return Entry(
            f"{module}.weight", shape, info.dtype, self.found.format, stored, nbytes, parameters
        )

    def _stack(self, blocks: str, name: str, shape: tuple[int, ...]) -> Entry:
        """Experts in MXFP4, under the name that they have where they are plain."""
        stored = (blocks, name + mxfp4_experts.SCALES)
        nbytes = sum(self.checkpoint.tensors[one].nbytes for one in stored)
        return Entry(name, shape, "U8", mxfp4_experts.SCHEME, stored, nbytes, prod(shape))

    def _experts(self, name: str) -> Entry:
        """Small floats under another name than a linear layer's, such as experts in one tensor with
        a scale_inv beside it: named here, not read."""
        tensors = self.checkpoint.tensors
        info = tensors[name]
        ends = ("_scale_inv", "_scales_inv", "_scale")
        stored = (name, *(name + end for end in ends if name + end in tensors))
        nbytes = sum(tensors[n].nbytes for n in stored)
        return Entry(name, info.shape, info.dtype, self.found.format, stored, nbytes, info.size)

    def _config_bits(self) -> int:
        """The width that a compressed-tensors config gives its first group."""
        config = quantization_config(self.checkpoint)
        groups = config.get("config_groups")
        if isinstance(groups, dict):
            for group in groups.values():
                weights = group.get("weights") if isinstance(group, dict) else None
                if isinstance(weights, dict) and isinstance(weights.get("num_bits"), int):
                    return max(1, min(32, int(weights["num_bits"])))
        return 4

    def stored_tensor(self, name: str) -> NDArray[Any]:
        """A stored tensor; BF16 as float32, small floats as bytes. KeyError where there is none."""
        info = self.checkpoint.tensors[name]
        if info.dtype == "BF16":
            return self.checkpoint.float32(name)
        if info.dtype.startswith("F8_"):
            return self.checkpoint.raw(name).reshape(info.shape)
        return self.checkpoint.array(name)

    def entry(self, name: str) -> Entry:
        """The entry of a tensor, a module, or a stored tensor."""
        for candidate in (name, f"{name}.weight"):
            if candidate in self.entries:
                return self.entries[candidate]
        for entry in self.entries.values():
            if name in entry.stored:
                return entry
        raise SourceError(f"{self.checkpoint.path}: has no tensor {name!r}")

    def experts(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Experts first to last of those that are stacked in one tensor."""
        if (whole := self._wholes.get(self.entry(name).name)) is not None:
            return np.stack([whole.expert(one, self._part) for one in range(first, last)])
        parts = []
        for stored in self.entry(name).stored:
            shape = self.checkpoint.tensors[stored].shape[1:]
            part = self.checkpoint.part(stored, first, last)
            parts.append(part.reshape(last - first, *shape))
        return mxfp4_experts.dequantize(*parts)

    def read(self, name: str) -> GroupQuant | NDArray[np.float32]:
        """One matrix: its codes where it is quantized, float32 where it is dense, or stacked."""
        entry = self.entry(name)
        if entry.scheme is None:
            return self.checkpoint.float32(entry.stored[0])
        if entry.stacked:
            return self.experts(name, 0, entry.shape[0])
        if not isinstance(entry.scheme, Scheme):
            raise UnsupportedError(
                f"{entry.name}: {self.found.format} is recognised, but not decoded by this version"
            )
        quant: GroupQuant = FORMATS[self.found.format].unpack(
            entry.module, self.stored_tensor, self.found
        )
        dtype = quant.scheme.scale_dtype
        for scales in entry.stored:
            if scales.rpartition(".")[2] in _SCALES:
                stored = self.checkpoint.tensors[scales].dtype
                if stored != "U8":  # which of the formats of a byte it is, the config told
                    dtype = SCALE_DTYPES.get(stored, dtype)
                break
        # Arrays do not tell small floats apart, headers do.
        scheme = replace(quant.scheme, scale_dtype=dtype, book=entry.scheme.book)
        return replace(quant, scheme=scheme)

    def dequantized(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """(name, array) of the whole model under its unquantized names, one at a time: float32,
        or the stored dtype where a dense tensor is no float."""
        for name, entry in self.entries.items():
            if entry.scheme is None and entry.dtype not in st.FLOAT_DTYPES:
                yield name, self.checkpoint.array(entry.stored[0])
                continue
            value = self.read(name)
            yield name, value.dequantize() if isinstance(value, GroupQuant) else value


def experts_apart(checkpoint: Checkpoint) -> Checkpoint:
    """MLX's stacks of experts as a tensor for each expert, and its convolutions turned; any other
    checkpoint as it is."""
    parts = mlx_experts.apart(checkpoint.tensors, str(checkpoint.config.get("model_type")))
    if all(info is checkpoint.tensors.get(name) for name, (_, info) in parts.items()):
        return checkpoint
    return replace(
        checkpoint,
        tensors={name: info for name, (_, info) in parts.items()},
        _file_of={name: checkpoint.file_of(stored) for name, (stored, _) in parts.items()},
    )


def record_in(folder: Path) -> tuple[Mapping[str, Any] | None, str]:
    """The qtool.json of a folder, None without one; and why it cannot be read, where that is so."""
    file = folder / FILE_NAME
    try:
        return (st.read_json(file) if file.is_file() else None), ""
    except QtoolError as error:
        return None, str(error).replace(str(file), FILE_NAME)


def without_layers(record: Mapping[str, Any]) -> dict[str, Any]:
    """A qtool.json as it is shown to people: without a line for each layer, and for each file."""
    shown = {key: value for key, value in record.items() if key not in (LAYERS, OUTLIERS, FILES)}
    if isinstance(source := shown.get("source"), Mapping) and "files" in source:
        shown["source"] = {key: value for key, value in source.items() if key != "files"}
    return shown


def _mlx_bits(checkpoint: Checkpoint, module: str) -> int:
    """The width of a module's codes in mlx-lm's table."""
    config = quantization_config(checkpoint)
    own = config.get(module)
    bits = own.get("bits") if isinstance(own, Mapping) else config.get("bits")
    return bits if type(bits) is int and 1 <= bits <= 32 else 32


def _unpacked(stored: TensorInfo, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a matrix that is packed as GPTQ or AWQ does and not decoded: AutoRound's own
    config says which. As stored, where nothing does."""
    bits, packing = config.get("bits"), str(config.get("packing_format") or "")
    if type(bits) is not int or not 2 <= bits <= 8 or len(stored.shape) != 2:
        return stored.shape
    first, last = stored.shape
    if packing.endswith("gptq"):
        return last, first * 32 // bits
    return (last * 32 // bits, first) if packing.endswith("awq") else stored.shape


def _codes_per_element(dtype: str, last: str, width: int) -> int:
    """Weights in one stored element of a format that is not decoded."""
    bits = st.DTYPE_BITS[dtype]
    if last == "weight_packed" or (dtype == "U8" and last == "weight"):
        return max(1, bits // (width if last == "weight_packed" else 4))
    return 1


def quantization_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The quantization_config from config.json or, without one, from the files beside it."""
    # mlx-lm's own key, which it asks first, and newer files repeat as quantization_config.
    own = checkpoint.config.get("quantization")
    if isinstance(own, dict) and is_mlx(own):
        return own
    inner = checkpoint.config.get("text_config")
    for config in (checkpoint.config, inner if isinstance(inner, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = config.get(key)
            if isinstance(found, dict) and found:
                return found
    for file, inside in _CONFIG_FILES:
        path = checkpoint.folder / file
        if checkpoint.config.get("quantization_config") is None and path.is_file():
            content = st.read_json(path)
            if inside is not None:
                nested = content.get(inside)
                return {"quant_method": "modelopt", **(nested if isinstance(nested, dict) else {})}
            return content
    return {}


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the unquantized model."""
    plain = {key: value for key, value in config.items() if key not in _QUANTIZATION_KEYS}
    inner = plain.get("text_config")
    if isinstance(inner, dict):
        plain["text_config"] = plain_config(inner)
    return plain


def _guess(checkpoint: Checkpoint, module: str) -> ArtifactScheme:
    """AWQ or GPTQ without a config: the shapes of one module tell them apart."""
    tensors = checkpoint.tensors
    weight, scales = tensors[f"{module}.qweight"], tensors.get(f"{module}.scales")
    zeros = tensors.get(f"{module}.qzeros")
    where = f"{checkpoint.path}: quantized ({module}.qweight), but no config says how"
    if scales is None or zeros is None or not len(weight.shape) == len(scales.shape) == 2:
        raise FormatError(f"{where}; expected config.json beside it")
    groups, rows = scales.shape
    if weight.shape[1] * 8 == rows and groups and weight.shape[0] % groups == 0:
        size = weight.shape[0] // groups
        return ArtifactScheme("awq", "awq", Scheme(4, -1 if groups == 1 else size, False), "gemm")
    if weight.shape[1] == rows and groups:
        # Without a config nothing tells v1 from v2; v1 is what most files are.
        rough = ArtifactScheme("gptq", "gptq", Scheme(4, -1, False), "v1")
        scheme, _ = gptq.scheme_in(module, tensors.get, rough)
        return replace(rough, scheme=scheme)
    raise FormatError(f"{where}, and its shapes are neither AWQ's nor GPTQ's")
