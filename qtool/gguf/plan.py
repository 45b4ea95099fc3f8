"""The plan of a GGUF file: the type and the place of every tensor, and the metadata.

    header   see formats/gguf_header.py
    data     tensor after tensor, each followed by zeros up to a multiple of the alignment

Made from headers alone, before any work. Tensors come in llama.cpp's order, whatever the order of
the source; metadata is the source's, then what llama-quantize adds, then qtool.* keys. A plan does
not change while a run goes on.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from struct import calcsize
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qtool import __version__
from qtool.errors import SourceError, UnsupportedError
from qtool.formats.gguf_arrays import StoredArray
from qtool.formats.gguf_values import STRUCT, Kind, Value, string, u32
from qtool.gguf.kinds import EMBEDDINGS, model_facts, stored_shape
from qtool.gguf.mixture_table import TYPES
from qtool.gguf.mixtures import Choice, choose, needs_importance
from qtool.gguf.plan_warnings import warnings
from qtool.gguf.recipe import GgufRecipe
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf_types import BF16, F16, F32, BlockType

DEFAULT_ALIGNMENT = 32
QUANTIZATION_VERSION = 2  # of the blocks, GGML_QNT_VERSION
_FLOATS = (F32, F16, BF16)
_SPLIT = ("split.no", "split.count", "split.tensors.count")
_LONGEST_TEXT = 127  # bytes of a string that llama-quantize adds


class Importance(Protocol):
    """Measured importance, as far as a plan looks at it."""

    @property
    def entries(self) -> Mapping[str, NDArray[np.float32]]: ...  # tensor name -> [matrices, in]
    @property
    def file(self) -> str | None: ...  # where it was read from
    @property
    def datasets(self) -> Sequence[str]: ...
    @property
    def chunks(self) -> int: ...


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file."""

    source: SourceTensor
    type: BlockType
    offset: int  # from the beginning of the data
    why: str | None  # where the type is not simply the mixture's
    fallback: bool
    eligible: bool  # False: never quantized, whatever the recipe says
    importance: bool  # encoded with importance: it was measured, or will be

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file states it, in numpy's order."""
        return stored_shape(self.source.shape)

    @property
    def copied(self) -> bool:
        """Whether the source's bytes go into the file as they are."""
        return self.type == self.source.type

    @property
    def parameters(self) -> int:
        """Numbers in the tensor."""
        return prod(self.source.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its data, without padding."""
        return self.source.rows * self.type.row_bytes(self.source.in_features)


@dataclass(frozen=True)
class GgufPlan:
    """What a run will write."""

    recipe: GgufRecipe
    tensors: tuple[PlannedTensor, ...]  # in the order of writing
    metadata: Mapping[str, Value]  # complete, in the order of writing
    alignment: int
    warnings: tuple[str, ...]
    dropped: tuple[tuple[str, str], ...]  # source tensors that are not written, and why

    @property
    def format(self) -> str:
        return "gguf"

    @cached_property
    def data_start(self) -> int:
        """Bytes of the header, padding included."""
        keys = sum(8 + len(_bytes(key)) + 4 + _nbytes(v) for key, v in self.metadata.items())
        infos = sum(8 + len(_bytes(t.name)) + 16 + 8 * len(t.shape) for t in self.tensors)
        return _padded(24 + keys + infos, self.alignment)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the file, exact."""
        return self.data_start + sum(_padded(t.nbytes, self.alignment) for t in self.tensors)

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits of tensor data for each number of the model, as llama-quantize counts them."""
        numbers = sum(tensor.parameters for tensor in self.tensors)
        return 8 * self.tensor_bytes / numbers if numbers else 0.0

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors are encoded anew, and how many are copied."""
        copied = sum(tensor.copied for tensor in self.tensors)
        return {
            "converted": len(self.tensors) - copied,
            "copied": copied,
            "dropped": len(self.dropped),
        }

    @property
    def fallbacks(self) -> tuple[PlannedTensor, ...]:
        """Those whose rows do not divide into the blocks that they should have."""
        return tuple(tensor for tensor in self.tensors if tensor.fallback)

    def json(self) -> dict[str, Any]:
        """The --json object of `qtool plan`."""
        return {
            "recipe": self.recipe.name,
            "format": self.format,
            "type": self.recipe.type,
            "size_bytes": self.size_bytes,
            "bits_per_weight": self.bits_per_weight,
            "counts": self.counts,
            "types": dict(Counter(tensor.type.name for tensor in self.tensors)),
            "fallbacks": len(self.fallbacks),
            "warnings": list(self.warnings),
            "tensors": [
                {
                    "name": tensor.name,
                    "shape": list(tensor.shape),
                    "source_type": tensor.source.type.name,
                    "type": tensor.type.name,
                    "reason": tensor.why,
                    "fallback": tensor.fallback,
                    "importance": tensor.importance,
                    "bytes": tensor.nbytes,
                }
                for tensor in self.tensors
            ],
            "dropped": [{"name": name, "reason": reason} for name, reason in self.dropped],
        }


def make_gguf_plan(
    recipe: GgufRecipe,
    source: GgufSource,
    importance: Importance | None = None,
    *,
    requantize: bool = False,
    origin: str | None = None,
) -> GgufPlan:
    """Plan `recipe` for a source, from its headers.

    importance: None in a recipe with `importance: true` means that it is measured later.
    requantize: tensors of a quantized type may be encoded anew. origin: what the artifact records
    as its source; no path of the host.
    SourceError, UnsupportedError: what llama-quantize refuses too, told before any work.
    """
    facts = model_facts(source.metadata)
    measured = importance is not None or recipe.importance
    choices = choose(facts, source.tensors, recipe.options, measured)
    sources = {tensor.name: tensor for tensor in source.tensors}
    alignment = _alignment(source)
    planned: list[PlannedTensor] = []
    offset = 0
    for name, choice in choices.items():
        tensor = sources[name]
        made = PlannedTensor(
            tensor,
            choice.type,
            offset,
            choice.why,
            choice.fallback,
            choice.eligible,
            _weighed(source, recipe, tensor, choice, importance),
        )
        planned.append(made)
        offset += _padded(made.nbytes, alignment)
    lossy = _requantized(source, planned, requantize)
    return GgufPlan(
        recipe,
        tuple(planned),
        _metadata(recipe, source, importance, lossy, origin),
        alignment,
        (*source.warnings, *warnings(recipe, facts, planned, lossy)),
        source.dropped,
    )


def _alignment(source: GgufSource) -> int:
    found = source.metadata.get("general.alignment")
    return DEFAULT_ALIGNMENT if found is None else int(found.value)


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _weighed(
    source: GgufSource,
    recipe: GgufRecipe,
    tensor: SourceTensor,
    choice: Choice,
    importance: Importance | None,
) -> bool:
    """Whether the tensor is encoded with importance; refuses what cannot be without."""
    if choice.type == tensor.type:
        return False
    needed = choice.eligible and needs_importance(tensor.name, choice.type, recipe.file_type)
    if importance is None:
        if needed and not recipe.importance:
            raise UnsupportedError(
                f"{source.path}: {tensor.name} would become {choice.type.name}, which is useless "
                "without an importance matrix; add --set importance=true, or give one with "
                "--imatrix FILE"
            )
        # Embeddings are looked up, not multiplied; the head is left out as llama-imatrix does.
        if needed and (tensor.name in EMBEDDINGS or tensor.name == "output.weight"):
            raise UnsupportedError(
                f"{source.path}: {tensor.name} would become {choice.type.name}, which cannot be "
                "encoded without importance, and none is measured for embeddings and head; "
                "give embedding_type or output_type"
            )
        return recipe.importance and choice.type not in _FLOATS and tensor.name.startswith("blk.")
    entry = importance.entries.get(tensor.name)
    matrices = tensor.shape[-3] if len(tensor.shape) > 2 else 1
    expected = matrices * tensor.in_features
    if entry is not None and entry.size != expected and tensor.name not in EMBEDDINGS:
        raise SourceError(
            f"{importance.file or 'importance'}: {tensor.name} has {entry.size} numbers, expected "
            f"{expected} ({matrices} x {tensor.in_features}); it was measured on another model"
        )
    found = entry is not None and entry.size == expected
    if needed and not found:
        raise SourceError(
            f"{importance.file or 'importance'}: has nothing of {tensor.name}, which would become "
            f"{choice.type.name}, and that is useless without; measure the same model, or give the "
            "tensor another type with an override"
        )
    return found and choice.type not in _FLOATS


def _requantized(
    source: GgufSource, planned: Sequence[PlannedTensor], allowed: bool
) -> tuple[str, ...]:
    """The quantized types of the source that are encoded anew."""
    for tensor in planned:
        type_ = tensor.source.type
        if tensor.copied or type_ in _FLOATS:
            continue
        if type_.name not in TYPES:
            raise UnsupportedError(
                f"{source.path}: {tensor.name} is {type_.name}, which is not converted to "
                f"{tensor.type.name}; keep it with an override that says dense: true"
            )
        if not allowed:
            raise UnsupportedError(
                f"{source.path}: {tensor.name} is quantized already, as {type_.name}; quantizing "
                "it again loses more than quantizing the original: use the F16, BF16 or F32 "
                "file, or give --requantize"
            )
    again = Counter(t.source.type.name for t in planned if not t.copied)
    return tuple(name for name, _ in again.most_common() if TYPES[name] not in _FLOATS)


def _metadata(
    recipe: GgufRecipe,
    source: GgufSource,
    importance: Importance | None,
    lossy: Sequence[str],
    origin: str | None,
) -> dict[str, Value]:
    """The source's keys, llama-quantize's, ours. A key that is set again moves to the end."""
    added = {
        "general.quantization_version": u32(QUANTIZATION_VERSION),
        "general.file_type": u32(recipe.file_type.number),
    }
    if importance is not None and importance.entries:
        if importance.file is not None:
            added["quantize.imatrix.file"] = string(_cut(importance.file))
        if importance.datasets:
            added["quantize.imatrix.dataset"] = string(_cut(importance.datasets[0]))
        added["quantize.imatrix.entries_count"] = u32(len(importance.entries))
        if importance.chunks > 0:
            added["quantize.imatrix.chunks_count"] = u32(importance.chunks)
    added["qtool.version"] = string(__version__)
    keys = {"name": recipe.name, **recipe.effective()}
    added["qtool.recipe"] = string(json.dumps(keys, ensure_ascii=False, separators=(",", ":")))
    if origin is not None:
        added["qtool.source"] = string(origin)
    if lossy:
        added["qtool.requantized_from"] = string(", ".join(lossy))
    kept = {
        key: value
        for key, value in source.metadata.items()
        if key not in added and key not in _SPLIT and not key.startswith("qtool.")
    }
    return kept | added


def _cut(text: str) -> str:
    return _bytes(text)[:_LONGEST_TEXT].decode("utf-8", "ignore")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _nbytes(value: Value) -> int:
    """Bytes of a value in the header, without its kind."""
    if value.kind is Kind.STRING:
        return 8 + len(_bytes(value.value))
    if value.kind is not Kind.ARRAY:
        return calcsize("<" + STRUCT[value.kind])
    if isinstance(value.value, StoredArray):
        return 12 + value.value.nbytes
    if value.element is Kind.STRING:
        return 12 + sum(8 + len(_bytes(text)) for text in value.value)
    assert value.element is not None
    return 12 + len(value.value) * calcsize("<" + STRUCT[value.element])
