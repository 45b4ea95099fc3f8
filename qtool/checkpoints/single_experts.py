"""gpt-oss's experts as unsloth trains them, a linear layer each, seen as the model's class has
them.

    ...mlp.experts.gate_up_projs.3.weight [2 * inner, hidden]   .bias [2 * inner]
    ...mlp.experts.down_projs.3.weight [hidden, inner]          .bias [hidden]
        -> ...mlp.experts.gate_up_proj [experts, hidden, 2 * inner]   gate_up_proj_bias
           ...mlp.experts.down_proj [experts, inner, hidden]          down_proj_bias
    ...mlp.router.linear.weight, .bias
        -> ...mlp.router.weight, .bias

Rows of gate and up take turns there, too, so that each matrix is the transpose. Merged without
unsloth's own `save_pretrained_merged` a model is saved so, and no engine loads it.

Source: unsloth-zoo, temporary_patches/gpt_oss.py (GptOssExpertsBnb4bit, GptOssTopKRouterBnb4bit).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.checkpoint import Checkpoint, Watch
from qtool.errors import SourceError
from qtool.formats import safetensors_file as st
from qtool.formats.safetensors_file import FLOAT_DTYPES, TensorInfo

_SINGLE = re.compile(r"(.+\.experts\.(?:gate_up|down)_proj)s\.(\d{1,6})\.(weight|bias)")
_ROUTER = re.compile(r"(.+\.router)\.linear\.(weight|bias)")


@dataclass(frozen=True)
class Single:
    """What an expert has of a fused tensor: a matrix that lies there as [out, in], or a bias."""

    info: TensorInfo
    file: Path

    def read(self, watch: Watch | None = None) -> NDArray[np.uint8]:
        """Its bytes as the fused tensor has them."""
        raw = st.read_range(self.file, self.info)
        if watch is not None:
            watch(self.file, self.info.start, raw)
        if len(self.info.shape) < 2:
            return raw
        numbers = raw.view(f"u{len(raw) // np.prod(self.info.shape)}").reshape(self.info.shape)
        return np.ascontiguousarray(numbers.T).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class Stacked(Checkpoint):
    """See Checkpoint. Fused tensors lie nowhere as they are read: their `start` is 0."""

    stacks: Mapping[str, tuple[Single, ...]] = field(default_factory=dict, repr=False)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [nbytes]."""
        if name not in self.stacks:
            return super().raw(name)
        return self.part(name, 0, len(self.stacks[name]))

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, from `first` to `last` of its leading axis."""
        if name not in self.stacks:
            return super().part(name, first, last)
        return np.concatenate([np.empty(0, np.uint8), *self._each(name, first, last)])

    def stretch(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of a tensor from `start` to `stop`."""
        if name not in self.stacks:
            return super().stretch(name, start, stop)
        return self._stretch_of_part(name, start, stop)

    def _each(self, name: str, first: int, last: int) -> Iterator[NDArray[np.uint8]]:
        for single in self.stacks[name][first:last]:
            yield single.read(self.watch)


def single_experts(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Tensors of plain numbers that are an expert's own, and the fused one that each belongs to."""
    found = {}
    for name, info in tensors.items():
        if info.dtype in FLOAT_DTYPES and (match := _SINGLE.fullmatch(name)):
            found[name] = match[1] + ("_bias" if match[3] == "bias" else "")
    return found


def stacked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with such experts in one tensor; itself where it has none.

    SourceError where some are missing, or are of another shape or dtype than others.
    """
    singles = single_experts(checkpoint.tensors)
    if not singles:
        return checkpoint
    parts: dict[str, list[str]] = defaultdict(list)
    for name, whole in singles.items():
        parts[whole].append(name)
    stacks = {whole: _stack(checkpoint, whole, names) for whole, names in parts.items()}
    tensors: dict[str, TensorInfo] = {}
    files: dict[str, Path] = {}
    for name, info in checkpoint.tensors.items():
        shown = singles.get(name) or _of_router(name, checkpoint.tensors)
        if shown in stacks and shown not in tensors:
            each = stacks[shown][0].info
            size = len(stacks[shown]) * each.nbytes
            shape = (len(stacks[shown]), *reversed(each.shape))
            tensors[shown] = TensorInfo(shown, each.dtype, shape, 0, size)
        elif shown not in stacks:
            tensors[shown] = replace(info, name=shown)
        files.setdefault(shown, checkpoint.file_of(name))
    return Stacked(
        checkpoint.path, checkpoint.config, tensors, checkpoint.metadata, checkpoint.files, files,
        checkpoint.readable, stacks, watch=checkpoint.watch,
    )  # fmt: skip


def _of_router(name: str, tensors: Mapping[str, TensorInfo]) -> str:
    """The name that a router's tensor has in the class; of any other, its own."""
    found = _ROUTER.fullmatch(name)
    wanted = name if found is None else f"{found[1]}.{found[2]}"
    return name if wanted in tensors else wanted


def _stack(checkpoint: Checkpoint, fused: str, names: Sequence[str]) -> tuple[Single, ...]:
    """What a fused tensor is made of, expert by expert. names: of all that is there of it."""
    if fused in checkpoint.tensors:
        raise SourceError(
            f"{checkpoint.path}: has both {fused} and {names[0]}, which are the same experts; keep "
            "one of them"
        )
    stem, last = fused.removesuffix("_bias"), "bias" if fused.endswith("_bias") else "weight"
    infos = []
    for expert in range(len(names)):
        name = f"{stem}s.{expert}.{last}"
        info = checkpoint.tensors.get(name)
        if info is None:
            raise SourceError(
                f"{checkpoint.path}: lacks {name}, where {names[-1]} is there; fetch it again"
            )
        infos.append(info)
    first = infos[0]
    if len(first.shape) != (1 if last == "bias" else 2) or 0 in first.shape:
        raise SourceError(
            f"{checkpoint.path}: {first.name} is {list(first.shape)}, expected "
            f"{'[out]' if last == 'bias' else '[out, in]'} of an expert; save the model again"
        )
    for info in infos:
        if (info.dtype, info.shape) != (infos[0].dtype, infos[0].shape):
            raise SourceError(
                f"{checkpoint.path}: {info.name} is {info.dtype} {list(info.shape)}, where expert "
                f"0 has {infos[0].dtype} {list(infos[0].shape)}; save the model again"
            )
    return tuple(Single(info, checkpoint.file_of(info.name)) for info in infos)
