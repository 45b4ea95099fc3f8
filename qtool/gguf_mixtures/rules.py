"""Which type each tensor of a GGUF file gets: the rules of table.py, applied.

    a type given for the embedding or the head
    > an override by pattern > the default type (pure, and files of plain numbers)
    > head, embedding, experts of MXFP4_MOE > the mixture's rules for its kind
    then, where rows do not divide into blocks, the fallback

Source: llama.cpp 0c1e57098, what src/llama-quant.cpp does; an override counts there only in files
of a quantized type, here in every file.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qtool.errors import UnsupportedError
from qtool.gguf_mixtures import table
from qtool.gguf_mixtures.kinds import (
    ATTENTION_OUTPUT,
    CONVERTED,
    DOWN,
    EMBEDDING,
    EMBEDDINGS,
    FLOAT32_IN,
    FLOAT32_WHERE_CONVERTED,
    GATE,
    HEAD,
    KEY,
    OUTPUT,
    UP,
    VALUE,
    ModelFacts,
    Tensor,
    kept_reason,
    kind_of,
    layer_of,
    output_order,
)
from qtool.gguf_mixtures.table import TYPES, FileType, Spot
from qtool.gguf_types import F16, FLOATS, BlockType


@dataclass(frozen=True)
class Override:
    """Another type for the tensors that a pattern finds; type None: as in the source."""

    match: str
    type: BlockType | None

    def hits(self, name: str) -> bool:
        """As `llama-quantize --tensor-type`: a regular expression in small letters, found anywhere.

        One that starts with a star, which no expression can, is a shell pattern of the whole name.
        """
        pattern = self.match.lower()
        if pattern.startswith("*"):
            return fnmatchcase(name, pattern)
        return re.search(pattern, name) is not None


@dataclass(frozen=True)
class Options:
    """What is asked for: the options of llama-quantize that decide about types."""

    file_type: FileType
    pure: bool = False  # the default type everywhere
    output_type: BlockType | None = None
    embedding_type: BlockType | None = None
    leave_output: bool = False  # output.weight as in the source
    overrides: Sequence[Override] = ()  # the first that hits counts
    converts: bool = False  # the source is a checkpoint and no GGUF file

    def override_of(self, name: str) -> Override | None:
        return next((override for override in self.overrides if override.hits(name)), None)


@dataclass(frozen=True)
class Choice:
    """The type of one tensor."""

    type: BlockType
    eligible: bool  # False: copied as it is, whatever is asked for
    why: str | None = None  # where it is not simply what the mixture gives its kind
    fallback: bool = False  # counted by llama-quantize as "required fallback quantization"


@dataclass
class _Model:
    """The counters of a file whose tensors are gone through in the order of writing."""

    facts: ModelFacts
    options: Options
    imatrix: bool
    tied: bool  # no output.weight: the token embedding is the head too
    values: int  # tensors of kind VALUE
    seen: dict[str, int]


def choose(
    facts: ModelFacts, tensors: Iterable[Tensor], options: Options, imatrix: bool
) -> dict[str, Choice]:
    """The type of each tensor, by name and in the order of writing.

    imatrix: whether importance was measured. UnsupportedError where llama-quantize stops too.
    """
    ordered = output_order(tensors)
    kinds = [kind_of(tensor.name) for tensor in ordered]
    counters = dict.fromkeys((VALUE, DOWN, GATE, UP), 0)
    model = _Model(facts, options, imatrix, OUTPUT not in kinds, kinds.count(VALUE), counters)
    return {
        tensor.name: _choice(model, tensor, kind)
        for tensor, kind in zip(ordered, kinds, strict=True)
    }


def _choice(model: _Model, tensor: Tensor, kind: str) -> Choice:
    options, columns = model.options, tensor.shape[-1] if tensor.shape else 1
    reason = kept_reason(tensor, model.facts.architecture)
    override = options.override_of(tensor.name)
    if options.converts and options.file_type.default in FLOATS:
        if tensor.name.endswith(FLOAT32_IN.get(model.facts.architecture, ())):
            reason = "float32, as llama.cpp converts it"
        elif reason == "small" and tensor.name.endswith(CONVERTED):
            reason = None
        elif tensor.name.endswith(FLOAT32_WHERE_CONVERTED) and not (override or options.pure):
            reason = "float32, as llama.cpp converts it"
    if reason is None and options.leave_output and kind == OUTPUT:
        reason = "leave_output"
    if reason is None and override is not None and override.type is None:
        reason = f"override {override.match}"
    if reason is not None:
        return Choice(tensor.type, False, reason)
    given = _given(options, tensor.name, kind, override)
    if given is not None:
        if columns % given.weights:
            raise UnsupportedError(_indivisible(tensor.name, given, columns))
        return Choice(given, True, "given by the recipe")
    why = None
    if override is not None and override.type is not None:
        asked, why = override.type, f"override {override.match}"
    elif options.pure or options.file_type.default in FLOATS:
        asked = options.file_type.default
    elif kind == OUTPUT or (kind == EMBEDDING and model.tied):
        asked, why = _head(model, columns)
    else:
        asked = TYPES[_mixed(model, tensor, kind)]
    stored = fallback(asked, columns, tensor.name)
    if stored is not asked:
        why = f"rows of {columns} are no whole blocks of {asked.name} ({asked.weights})"
    return Choice(stored, True, why, stored is not asked)


def _given(options: Options, name: str, kind: str, override: Override | None) -> BlockType | None:
    """The type that the recipe gives the embedding or the head; no fallback applies to it."""
    # An override may name Gemma's table of per-layer embeddings all the same.
    if kind == EMBEDDING and (name == "token_embd.weight" or override is None):
        return options.embedding_type
    return options.output_type if kind == OUTPUT else None


def _head(model: _Model, columns: int) -> tuple[BlockType, str | None]:
    """The type of output.weight, and of the embedding where it is the head too."""
    options, file_type = model.options, model.options.file_type
    if options.output_type is not None:
        return options.output_type, "given by the recipe"
    if file_type.name == "MXFP4_MOE" or model.facts.falcon:
        return TYPES["Q8_0"], None
    if columns % file_type.default.weights:
        weights = file_type.default.weights
        return TYPES["Q8_0"], f"head; rows of {columns} are no whole blocks of {weights}"
    if file_type.name in table.Q5_HEAD:
        return TYPES["Q5_K"], "head"
    return TYPES["Q8_0" if file_type.default.name == "Q8_0" else "Q6_K"], "head"


def _mixed(model: _Model, tensor: Tensor, kind: str) -> str:
    """What the mixture gives a tensor of this kind; counts it."""
    facts, file_type = model.facts, model.options.file_type.name
    default = model.options.file_type.default.name
    if facts.architecture == "glm5-next" and any(
        part in tensor.name for part in ("attn_q_a", "attn_q_b", "nextn.eh_proj")
    ):
        return "Q8_0"
    if file_type == "MXFP4_MOE":
        experts = len(tensor.shape) > 2 and tensor.shape[-3] > 1
        if facts.architecture == "bailingmoe3":  # whose attention has three axes too
            experts = experts and kind in (UP, GATE, DOWN)
        return "MXFP4" if experts else "Q8_0"
    if kind == EMBEDDING:
        return table.EMBEDDING_TYPES.get(file_type, default)
    low = file_type in table.LOW
    i, n = model.seen.get(kind, 0), model.values if kind == VALUE else facts.layers
    if kind in model.seen:
        model.seen[kind] += 1
    if kind in (DOWN, GATE, UP) and facts.experts > 1 and not low:
        i = layer_of(tensor.name)  # the experts of a layer may be several tensors
        if not 0 <= i < n:
            raise UnsupportedError(
                f"{tensor.name}: in a model with experts the name has to say the layer, blk.0. to "
                f"blk.{n - 1}., as block_count is {n}"
            )
    at = Spot(i, n, facts, model.imatrix)
    rules = table.MIXTURES.get(file_type, {}).get(kind, ())
    found = next((type_ for condition, type_ in rules if condition(at)), default)
    if low:
        return found
    if kind == ATTENTION_OUTPUT and facts.falcon:
        return table.FALCON_OUTPUT.get(file_type, default)
    if facts.experts == 8:
        if kind in (VALUE, KEY):
            return "Q8_0"
        if kind == ATTENTION_OUTPUT:
            return "Q5_K" if file_type in table.Q5_OUTPUT_OF_EIGHT_EXPERTS else default
    if kind == VALUE and facts.is_70b and found in ("Q3_K", "Q4_K"):
        return "Q5_K"  # eight heads share it, so that it costs little
    return found


def fallback(asked: BlockType, columns: int, name: str) -> BlockType:
    """The type that rows of `columns` weights get in place of `asked`; itself where it fits."""
    if columns % asked.weights == 0:
        return asked
    instead = TYPES[table.FALLBACK.get(asked.name, asked.name)]
    if instead is asked and asked.weights > 32:
        raise UnsupportedError(_indivisible(name, asked, columns))
    return instead if columns % instead.weights == 0 else F16


def _indivisible(name: str, type_: BlockType, columns: int) -> str:
    return (
        f"{name}: {type_.name} stores rows in blocks of {type_.weights} weights, and {columns} is "
        "not a multiple of that; give this tensor another type"
    )


def needs_importance(name: str, type_: BlockType, file_type: FileType) -> bool:
    """Whether such a tensor is not made without importance.

    Embeddings and the head are never measured, so none is asked for, unless the type cannot be
    encoded without.
    """
    if name in EMBEDDINGS or name == HEAD:
        return type_.needs_importance
    # Q2_K does without, but for the small file type that is made of little else.
    return type_.name in table.NEED_IMPORTANCE or (
        (type_.name, file_type.name) == ("Q2_K", "Q2_K_S")
    )
