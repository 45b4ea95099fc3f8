"""A model to convert: the tensors of its unquantized checkpoint, whatever file they lie in."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.checkpoint import Checkpoint

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}


class Quantized(Protocol):
    """A matrix that is stored as something else than its numbers."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)"""
        ...

    def dequantize(self) -> NDArray[np.float32]:
        """float32 [out, in]"""
        ...


@dataclass(frozen=True)
class Tensor:
    """One tensor; `read` gives a quantized one, `raw` the bytes of one that is not, and one of all
    experts has `parts`."""

    name: str  # in the unquantized checkpoint
    shape: tuple[int, ...]
    dtype: str  # of raw's bytes, as safetensors calls it
    stored: str  # how, in words: "w4 g128 sym", "Q4_1", "F16"
    group_size: int | None = None
    scale_dtype: str | None = None
    read: Callable[[], Quantized] | None = None
    raw: Callable[[], NDArray[np.uint8]] | None = None
    parts: tuple[tuple["Tensor", ...], ...] = ()  # of each expert, one after another
    transposed: bool = False  # where it has parts: [experts, in, out]

    @property
    def leaves(self) -> tuple["Tensor", ...]:
        """Itself, or its parts."""
        return tuple(part for expert in self.parts for part in expert) or (self,)

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")


@dataclass(frozen=True)
class Model:
    """What is converted, from its headers."""

    path: Path
    format: str
    layout: str
    config: Mapping[str, Any]  # without what it says of quantization
    dtype: str  # of the unquantized model's matrices: F16, BF16 or F32
    tensors: tuple[Tensor, ...]  # in the order of writing
    digest: Callable[[], str]  # sha256 of the files; reads them
    provenance: Mapping[str, Any] | None  # what its qtool.json says
    side_files: Callable[[], Iterable[tuple[str, bytes]]]  # tokenizer and the like
    checkpoint: Checkpoint | None = None  # where it is one
    group_size: int | None = None  # of the artifact that this one says it was made from
    activations: str | None = None  # how engines quantize inputs of its matrices, where they do
    rounds_inputs: frozenset[str] = frozenset()  # names of these matrices
    dropped: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[Tensor, ...]:
        """The tensors that have codes."""
        return tuple(tensor for tensor in self.tensors if tensor.read is not None)

    def recorded(self, format_: str, key: str) -> object:
        """What its provenance says of an artifact of this format that it comes from, or None."""
        made = (self.provenance or {}).get("conversions")
        for one in reversed(made if isinstance(made, list) else []):
            source = one.get("from") if isinstance(one, dict) else None
            if isinstance(source, dict) and source.get("format") == format_:
                return source.get(key)
        return None

    @property
    def architecture(self) -> str | None:
        """The class that config.json names."""
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else None
