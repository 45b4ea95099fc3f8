"""Any model that can be run: a checkpoint, a quantized one dequantized as it is read, a GGUF file.

Dequantized weights are float32, exactly what the format stands for.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.untold import said_untold
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.gguf_models import is_gguf
from qtool.checkpoints.single_experts import stacked
from qtool.dequantize import dequantize
from qtool.errors import UnsupportedError
from qtool.formats.safetensors_header import TensorInfo
from qtool.gguf.open import open_source
from qtool.messages.progress import Progress
from qtool.quality.engine_rotations import online_of
from qtool.record import record_in
from qtool.scheme import GroupQuant, Scheme
from qtool.streaming.online import Online
from qtool.streaming.weights import Weights


@dataclass(frozen=True)
class ArtifactWeights:
    """See qtool.streaming.weights.Weights: dense tensors as stored, quantized ones as float32."""

    artifact: Artifact
    config: Mapping[str, Any]  # without what makes transformers look for packed tensors
    tensors: Mapping[str, TensorInfo]
    online: Online = field(default_factory=Online)  # what is rotated while it runs
    # The matrix whose parts are being read, so that it is dequantized once.
    _opened: dict[str, NDArray[np.float32]] = field(default_factory=dict, repr=False)

    @property
    def path(self) -> Path:
        """What was opened."""
        return self.artifact.checkpoint.path

    @property
    def folder(self) -> Path:
        """Where config.json and the tokenizer lie."""
        return self.artifact.checkpoint.folder

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, or the codes of a matrix."""
        return self.artifact.checkpoint.file_of(self.artifact.entry(name).stored[0])

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, from `first` to `last` of its leading axis."""
        if self.artifact.entry(name).scheme is None:
            return self.artifact.checkpoint.part(name, first, last)
        if self.artifact.entry(name).stacked:
            return self.artifact.experts(name, first, last).reshape(-1).view(np.uint8)
        if name not in self._opened:
            self._opened.clear()
            self._opened[name] = self.float32(name)
        values = np.ascontiguousarray(self._opened[name][first:last])
        if last == self.tensors[name].shape[0]:  # parts are asked for in their order
            self._opened.clear()
        return values.reshape(-1).view(np.uint8)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor; quantized ones as float32."""
        if self.artifact.entry(name).scheme is None:
            return self.artifact.checkpoint.array(name)
        return self.float32(name)

    def float32(self, name: str) -> NDArray[np.float32]:
        """A float tensor of its own shape."""
        found = self.artifact.read(name)
        return dequantize(found) if isinstance(found, GroupQuant) else found


def artifact_weights(artifact: Artifact) -> ArtifactWeights:
    """UnsupportedError where the format is one that is recognised only."""
    artifact.check_unchanged()
    tensors = {}
    for name, entry in artifact.entries.items():
        if entry.scheme is None:
            tensors[name] = artifact.checkpoint.tensors[name]
        elif isinstance(entry.scheme, Scheme) or entry.stacked:
            tensors[name] = TensorInfo(name, "F32", entry.shape, 0, 4 * prod(entry.shape))
        else:
            raise UnsupportedError(
                f"{artifact.checkpoint.path}: {artifact.found.format}, which this version "
                "recognises, but cannot run; it runs dense checkpoints, AWQ, GPTQ, "
                "compressed-tensors, FP8, int8 of bitsandbytes, gpt-oss, and GGUF"
            )
    config = dict(artifact.checkpoint.config)
    for key in ("quantization_config", "compression_config"):
        config.pop(key, None)
    return ArtifactWeights(artifact, config, tensors, online_of(artifact, tensors))


def runnable(checkpoint: Checkpoint) -> Weights:
    """An unquantized model as it runs: experts that it keeps in MXFP4 as numbers."""
    artifact = Artifact.of(checkpoint)
    stacked = artifact.found.format == "mxfp4"
    return artifact_weights(artifact) if stacked else checkpoint


def say_damaged_record(path: Path, weights: Weights, progress: Progress) -> None:
    """A line where what an artifact says of its making is damaged; weights do not need it."""
    _, damaged = (None, "") if is_gguf(path) else record_in(weights.folder)
    if damaged:
        progress.say(f"{path}: its record of how it was made cannot be read ({damaged})")


@contextmanager
def open_weights(path: Path) -> Iterator[Weights]:
    """The model in a folder or a file, ready for a forward pass."""
    if is_gguf(path):
        from qtool.gguf.to_hf.weights import gguf_weights

        source = open_source(path)
        with gguf_weights(source) as (weights, _):
            yield replace(weights, path=path)
        return
    artifact = Artifact.open(path)
    if (packed := said_untold(artifact)) is not None:
        raise UnsupportedError(f"{path}: {packed}")
    dense = artifact.found.format == "dense"
    yield stacked(artifact.checkpoint) if dense else artifact_weights(artifact)
