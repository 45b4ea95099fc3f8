"""An artifact opened for reading: any checkpoint folder or safetensors file, quantized or not.

The quantized matrices of a folder are the modules that have a tensor of codes (`qweight`,
`weight_packed`, a `weight` of bytes); everything else is a dense tensor. Opening reads headers and
JSON only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.artifacts.entry import (
    AUXILIARY,
    STACK,
    Entry,
    small_floats,
    undecoded,
    unpacked,
)
from qtool.artifacts.stored_config import detected, guessed, quantization_config
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.formats import (
    FORMATS,
    ArtifactScheme,
    mlx,
    mlx_experts,
    mlx_fused,
    mxfp4,
    mxfp4_experts,
)
from qtool.formats import safetensors_file as st
from qtool.formats.safetensors_header import TensorInfo
from qtool.formats.stored_codes import SCALE_DTYPES
from qtool.record import record_in
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


_SCALES = ("scales", "weight_scale", "weight_scale_inv", "SCB", "scale")


@dataclass(frozen=True)
class Artifact:
    """A checkpoint and what its config says about how it is quantized."""

    checkpoint: Checkpoint
    found: ArtifactScheme
    provenance: Mapping[str, Any] | None
    unreadable: str = ""  # why the qtool.json that is there says nothing
    apart: bool = False  # whether experts in one tensor are seen one by one

    @classmethod
    def open(cls, path: Path | str) -> Artifact:
        """Read headers and configs; FormatError where they contradict each other. A damaged record
        of how it was made is no error: weights are read without it."""
        return cls.of(Checkpoint.open(path))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Artifact:
        """The same of an opened checkpoint."""
        found = detected(checkpoint)
        if found.format in ("mlx", "dense"):  # mlx-lm's plain files, too
            checkpoint = experts_apart(checkpoint)
        packed = [name for name in checkpoint.tensors if name.endswith(".qweight")]
        if packed and found.format == "dense":
            found = guessed(checkpoint, packed[0].removesuffix(".qweight"))
        return cls(checkpoint, found, *record_in(checkpoint.folder))

    @property
    def decoded(self) -> bool:
        """Whether quantized matrices can be read here."""
        if self.found.format == mxfp4.NAME and not self.apart:
            return False  # its experts are read as stacks
        return self.found.scheme is not None and self.found.format in FORMATS

    def check_unchanged(self) -> None:
        """UnsupportedError for a file of mlx-lm whose numbers are no longer the checkpoint's."""
        why = mlx_experts.changed(self.checkpoint.tensors, self._kind)
        if self.found.format in ("mlx", "dense") and why is not None:
            raise UnsupportedError(f"{self.checkpoint.path}: {why}")

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Everything in the artifact by its unquantized name, in the order of the files."""
        entries = dict(self._apart)
        for name, whole in self._wholes.items():
            parts = [entries.pop(part) for expert in whole.parts for part in expert]
            entries[name] = Entry(
                name, whole.shape, parts[0].dtype, f"{parts[0].scheme or parts[0].dtype}{STACK}",
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
                entry = undecoded(self.checkpoint, self.found, name)
            elif self.found.format != "dense" and info.dtype.startswith("F8_E") and info.size > 1:
                entry = small_floats(self.checkpoint, self.found, name)
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
        names = (f"{module}.{last}" for last in AUXILIARY)
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
            with self._placed():
                scheme, shape = module_format.scheme_in(module, self._look, self.found)
        else:
            shape = unpacked(weight, quantization_config(self.checkpoint))
        nbytes = sum(tensors[name].nbytes for name in stored)
        return Entry(f"{module}.weight", shape, weight.dtype, scheme, stored, nbytes, prod(shape))

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """What a format says of a module, with the path in front; the cause is without."""
        try:
            yield
        except (FormatError, UnsupportedError) as error:
            raise type(error)(f"{self.checkpoint.path}: {error}") from error

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
        raise SourceError(
            f"{self.checkpoint.path}: has no tensor {name!r}; `qtool inspect --all` lists them"
        )

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
        with self._placed():
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


def one_by_one(artifact: Artifact) -> Artifact:
    """The artifact with experts that lie in one tensor in MXFP4 as matrices of codes; any other,
    and one of which a stack is damaged, as it is."""
    if artifact.found.format != mxfp4.NAME:
        return artifact
    try:
        parts = mxfp4.apart(artifact.checkpoint.tensors)
    except FormatError:
        return artifact  # what is wrong is told where entries are made
    return replace(artifact, checkpoint=_in_parts(artifact.checkpoint, parts), apart=True)


def experts_apart(checkpoint: Checkpoint) -> Checkpoint:
    """MLX's stacks of experts as a tensor for each expert, and its convolutions transposed; any
    other checkpoint as it is."""
    parts = mlx_experts.apart(checkpoint.tensors, str(checkpoint.config.get("model_type")))
    if all(info is checkpoint.tensors.get(name) for name, (_, info) in parts.items()):
        return checkpoint
    return _in_parts(checkpoint, parts)


def _in_parts(checkpoint: Checkpoint, parts: Mapping[str, tuple[str, TensorInfo]]) -> Checkpoint:
    """A checkpoint of these tensors, each a part of the stored one that is named with it."""
    return replace(
        checkpoint,
        tensors={name: info for name, (_, info) in parts.items()},
        _file_of={name: checkpoint.file_of(stored) for name, (stored, _) in parts.items()},
    )
