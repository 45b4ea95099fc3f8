"""Planning a GGUF file: the type of every tensor, the metadata, and what speaks against it.

Made from headers alone, before any work. Tensors come in llama.cpp's order, whatever the order of
the source; metadata is the source's, then what llama-quantize adds, then qtool.* keys. A plan does
not change while a run goes on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qtool import __version__
from qtool.checkpoints.scaled import Record, to_json
from qtool.errors import SourceError, UnsupportedError
from qtool.formats.gguf_arrays import StoredArray
from qtool.formats.gguf_file import SPLIT_KEYS
from qtool.formats.gguf_values import Kind, Value, string, u32
from qtool.gguf.gptq.levels import SWEPT
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.second_scales import with_scales
from qtool.gguf.source import QUANTIZATION_VERSION, GgufSource, SourceTensor
from qtool.gguf_mixtures.kinds import EMBEDDINGS, HEAD, head_of, layer_of, model_facts
from qtool.gguf_mixtures.rules import Choice, choose, needs_importance
from qtool.gguf_mixtures.table import FILE_TYPES, MOSTLY_NVFP4
from qtool.gguf_types import FLOATS
from qtool.planning import notes, unmatched
from qtool.planning.gguf import estimate
from qtool.planning.gguf.plan_warnings import of_another, warnings
from qtool.planning.gguf.planned import GgufPlan
from qtool.planning.gguf.refusals import (
    refuse_conv1d,
    refuse_floats,
    refuse_packed,
    refuse_sweep,
    requantized,
)
from qtool.planning.gguf.scales_size import scales_bytes
from qtool.provenance.record import environment
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.portable import portable
from qtool.record import CALIBRATION, CHECKSUM_KEY, ENVIRONMENT_KEY, RECIPE_KEY, SCALES_KEY

__all__ = ["GgufPlan", "Importance", "PlannedTensor", "make_gguf_plan"]

NO_CHECKSUM = "0" * 16
_LONGEST_TEXT = 127  # bytes of a string that llama-quantize adds


@dataclass(frozen=True)
class Scales:
    """The scales that transforms found, and what they were measured over, as JSON."""

    found: Record
    calibration: str | None


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
    @property
    def calibration(self) -> str | None: ...  # what it was measured over, as JSON


def make_gguf_plan(
    recipe: GgufRecipe,
    source: GgufSource,
    importance: Importance | None = None,
    *,
    scaled: Scales | None = None,
    requantize: bool = False,
    origin: str | None = None,
    threads: int | None = None,
    max_ram: int | None = None,
) -> GgufPlan:
    """Plan `recipe` for a source, from its headers.

    importance: None in a recipe with `importance: true` means that it is measured later. scaled:
    what transforms found, once they have.
    requantize: tensors of a quantized type may be encoded anew. origin: what the artifact records
    as its source; no path of the host. threads, max_ram: as make_plan has them.
    SourceError, UnsupportedError: what llama-quantize refuses too, told before any work;
    RecipeError for an override that matches no tensor.
    """
    unmatched.refuse_gguf(recipe, [tensor.name for tensor in source.tensors])
    if recipe.sweeps and importance is not None and importance.file is not None:
        raise UnsupportedError(
            f"--imatrix {importance.file}: recipe {recipe.name} has method gptq, which measures "
            "what matrices read, importance with it; leave --imatrix out"
        )
    if recipe.transforms or recipe.sweeps:
        refuse_packed(source, recipe.name)
    facts = model_facts(source.metadata)
    measured = importance is not None or recipe.importance
    converts = any(tensor.origin for tensor in source.tensors)
    options = replace(recipe.options, converts=converts)
    choices = choose(facts, source.tensors, options, measured)
    sources = {tensor.name: tensor for tensor in source.tensors}
    head = head_of(sources)
    planned = tuple(
        PlannedTensor(
            sources[name],
            choice.type,
            choice.why,
            choice.fallback,
            choice.eligible,
            _weighed(source, recipe, sources[name], choice, importance),
            _swept(recipe, sources[name], choice, head),
        )
        for name, choice in choices.items()
    )
    refuse_floats(source, planned, recipe)
    lossy = requantized(source, planned, requantize)
    source, planned = _multiplied(source, planned)
    if recipe.sweeps and not any(one.swept and layer_of(one.name) >= 0 for one in planned):
        refuse_sweep(source, planned, recipe)
    calibration = recipe.calibration if recipe.calibrates and importance is None else None
    if calibration is not None:
        refuse_conv1d(source, recipe.name)
    if recipe.tunes:
        experts = (one.name for one in planned if one.swept and "_exps" in one.name)
        notes.refuse_experts(source.path, experts)
    header = 64 * len(planned) + sum(_roughly(value) for value in source.metadata.values())
    memory, seconds = estimate.run_cost(
        planned, header, calibration, facts.active_share, threads, max_ram,
        estimate.Measuring(
            bool(recipe.scaling), recipe.searches_scales, recipe.sweeps,
            recipe.tune if recipe.tunes else None, recipe.compensates > 0, recipe.guides > 0,
            recipe.feeds_back,
        ),
        recipe.rotates,
    )  # fmt: skip
    swept = sum(tensor.nbytes for tensor in planned if tensor.swept)  # there twice meanwhile
    memory = replace(memory, disk_bytes=memory.disk_bytes + swept)
    return GgufPlan(
        recipe,
        planned,
        _metadata(recipe, _named(recipe, planned), source, importance, scaled, lossy, origin),
        (
            *source.warnings,
            *(
                []
                if importance is None
                else of_another(importance.file, importance.entries, planned)
            ),
            *warnings(recipe, facts, planned, lossy),
        ),
        source.dropped,
        memory,
        seconds,
        scales_bytes(recipe, planned) if scaled is None else 0,
    )


# Of an element of an array.
_OBJECT_BYTES: dict[Kind | None, int] = {Kind.STRING: 145, Kind.FLOAT32: 32, Kind.FLOAT64: 32}


def _multiplied(
    source: GgufSource, planned: tuple[PlannedTensor, ...]
) -> tuple[GgufSource, tuple[PlannedTensor, ...]]:
    """What is encoded anew with its second scale in its numbers; what is copied keeps it apart."""
    source = with_scales(source, {tensor.name for tensor in planned if tensor.copied})
    left = {tensor.name: tensor for tensor in source.tensors}
    return source, tuple(replace(t, source=left[t.name]) for t in planned if t.name in left)


def _roughly(value: Value) -> int:
    """Bytes of a value in memory, about."""
    if value.kind is not Kind.ARRAY:
        return 64
    if isinstance(value.value, StoredArray):
        return len(value.value) * 24
    # Strings that are Python objects take more room than those in a header; small numbers, of which
    # there is one object each, take little.
    return len(value.value) * _OBJECT_BYTES.get(value.element, 8)


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
        if needed and (tensor.name in EMBEDDINGS or tensor.name == HEAD):
            raise UnsupportedError(
                f"{source.path}: {tensor.name} would become {choice.type.name}, which cannot be "
                "encoded without importance, and none is measured for embeddings and head; "
                "give embedding_type or output_type"
            )
        return recipe.importance and choice.type not in FLOATS and tensor.name.startswith("blk.")
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
    return found and choice.type not in FLOATS


def _swept(recipe: GgufRecipe, tensor: SourceTensor, choice: Choice, head: str) -> bool:
    """Whether GPTQ chooses the codes: of matrices in decoder blocks and of the head, whose type has
    levels."""
    matrix = len(tensor.shape) > 1 and (layer_of(tensor.name) >= 0 or tensor.name == head)
    return recipe.sweeps and matrix and choice.type != tensor.type and choice.type.name in SWEPT


def _named(recipe: GgufRecipe, tensors: Sequence[PlannedTensor]) -> int:
    """general.file_type: as convert_hf_to_gguf.py has it, where experts stay as they were trained
    in a file of plain numbers, or most is copied that was NVFP4."""
    kept = [tensor for tensor in tensors if tensor.copied]
    copied = sum(tensor.parameters for tensor in kept if tensor.type.name == "NVFP4")
    if 2 * copied > sum(tensor.parameters for tensor in tensors):
        return MOSTLY_NVFP4
    plain = recipe.file_type.default in FLOATS
    if plain and any(tensor.type.name == "MXFP4" for tensor in kept):
        return FILE_TYPES["MXFP4_MOE"].number
    return recipe.file_type.number


def _metadata(
    recipe: GgufRecipe,
    file_type: int,
    source: GgufSource,
    importance: Importance | None,
    scaled: Scales | None,
    lossy: Sequence[str],
    origin: str | None,
) -> dict[str, Value]:
    """The source's keys, llama-quantize's, ours. A key that is set again moves to the end."""
    added = {
        "general.quantization_version": u32(QUANTIZATION_VERSION),
        "general.file_type": u32(file_type),
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
    keys = {"name": recipe.name, **portable(recipe)}
    added[RECIPE_KEY] = string(json.dumps(keys, ensure_ascii=False, separators=(",", ":")))
    measured = importance or scaled
    if measured is not None and measured.calibration is not None:
        added[CALIBRATION] = string(measured.calibration)
    if scaled is not None:
        added[SCALES_KEY] = string(json.dumps(to_json(scaled.found), separators=(",", ":")))
    if recipe.rotates:
        added[ENVIRONMENT_KEY] = string(json.dumps(environment(), sort_keys=True))
    if origin is not None:
        added["qtool.source"] = string(origin)
    kinds = [*lossy, *filter(None, [source.requantized])]
    if kinds:
        added["qtool.requantized_from"] = string(", ".join(kinds))
    added[CHECKSUM_KEY] = string(NO_CHECKSUM)
    kept = {
        key: value
        for key, value in source.metadata.items()
        if key not in added and key not in SPLIT_KEYS and not key.startswith("qtool.")
    }
    return kept | added


def _cut(text: str) -> str:
    return text.encode("utf-8", "surrogateescape")[:_LONGEST_TEXT].decode("utf-8", "ignore")
