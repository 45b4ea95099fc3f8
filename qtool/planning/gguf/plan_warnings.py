"""What a user should know of a GGUF plan before the work is done."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Protocol

from qtool.checkpoints.padding import KEY
from qtool.gguf_mixtures.kinds import EMBEDDING_OF_TOKENS, HEAD, ModelFacts
from qtool.gguf_types import BY_NAME, FLOATS, BlockType
from qtool.messages.sentences import some
from qtool.planning.notes import unread
from qtool.recipe.consistency import without
from qtool.recipe.gguf import GgufRecipe

_SHOWN = 3  # names in a sentence
# Of the entries of an importance matrix, or of a model's matrices, that have no counterpart: more
# than llama-imatrix leaves out, or engines name in another way.
_STRANGE = 0.25
# Their encoders have no error to weigh.
_DEAF = {"F32", "F16", "BF16", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0"}
# Tables of a recipe, and the transforms that read them.
_TABLES = {"rotate": "rotate", "smooth": "smooth", "smooth_attention": "smooth-attention"}
_TRAINED_FOR = {
    "tq1_0": "ternary weights", "tq2_0": "ternary weights", "q1_0": "binary weights",
    "q2_0": "weights of four levels",
}  # fmt: skip


class Planned(Protocol):
    """Of a planned tensor, what is looked at."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> BlockType: ...
    @property
    def why(self) -> str | None: ...
    @property
    def fallback(self) -> bool: ...
    @property
    def eligible(self) -> bool: ...
    @property
    def copied(self) -> bool: ...
    @property
    def swept(self) -> bool: ...
    @property
    def importance(self) -> bool: ...


def of_another(file: str | None, named: Collection[str], tensors: Sequence[Planned]) -> list[str]:
    """A sentence where a file of importance is, by the names in it, not of this model. Of blocks
    alone: some files have embeddings and head, some do not. That experts have none tells nothing:
    llama-imatrix leaves them out where too few tokens reached them."""
    if file is None:
        return []
    known = {tensor.name for tensor in tensors}
    entries = [name for name in named if name.startswith("blk.")]
    strange = [name for name in entries if name not in known]
    weighed = [one for one in tensors if lacks(one) or one.importance]
    lacking = [one.name for one in weighed if lacks(one)]
    others = [one for one in weighed if "_exps" not in one.name]
    said = []
    if len(strange) > _STRANGE * len(entries):
        said.append(
            f"{len(strange)} of its {len(entries)} entries are of no tensor here ({some(strange)})"
        )
    if sum(map(lacks, others)) > _STRANGE * len(others):
        said.append(
            f"{len(lacking)} of {len(weighed)} matrices have none ({some(lacking)}), so that all "
            "their columns count alike"
        )
    if not said:
        return []
    return [
        f"importance {file} seems to be of another model: {', and '.join(said)}; "
        "measure it on this very model, or leave --imatrix out"
    ]


def lacks(tensor: Planned) -> bool:
    """Whether a matrix of a block is encoded without importance, though there is some."""
    made = not tensor.copied and tensor.type.name in BY_NAME
    return made and not tensor.importance and tensor.name.startswith("blk.")


def warnings(
    recipe: GgufRecipe, facts: ModelFacts, tensors: Sequence[Planned], lossy: Sequence[str]
) -> tuple[str, ...]:
    """Sentences, the gravest first. lossy: quantized types that are encoded anew."""
    found = []
    if lossy:
        what = (
            f"turning it into {recipe.type} does not bring back what was lost"
            if recipe.file_type.default in FLOATS
            else "quantizing it again loses more than quantizing the original does"
        )
        found.append(f"the source is quantized already ({', '.join(lossy)}): {what}")
    found += _fallbacks(tensors)
    if recipe.type in _TRAINED_FOR:
        found.append(
            f"{recipe.type} is for models trained with {_TRAINED_FOR[recipe.type]}; "
            "any other becomes useless"
        )
    if recipe.type == "mxfp4_moe" and not recipe.pure and not facts.experts:
        found.append("the model has no experts, so that mxfp4_moe stores everything as Q8_0")
    if recipe.sweeps and (left := [t for t in tensors if _left(t)]):
        every = len(left) + sum(one.swept and one.name.startswith("blk.") for one in tensors)
        types = ", ".join(sorted({tensor.type.name for tensor in left}))
        found.append(
            f"method gptq leaves {len(left)} of {every} matrices of the blocks to llama.cpp's "
            f"encoder: {types} has no levels that it can choose among"
        )
    return (*found, *_idle(recipe, tensors))


def _left(tensor: Planned) -> bool:
    """Whether a matrix of a block is quantized, and not swept."""
    made = not tensor.copied and tensor.type not in FLOATS
    return made and tensor.name.startswith("blk.") and not tensor.swept


def _fallbacks(tensors: Sequence[Planned]) -> list[str]:
    groups: dict[tuple[str | None, str], list[str]] = defaultdict(list)
    for tensor in tensors:
        if tensor.fallback:
            groups[tensor.why, tensor.type.name].append(tensor.name)
    count = sum(map(len, groups.values()))
    return [
        f"{len(names)} of {len(tensors)} tensors fall back to {type_}, as {why}: {_some(names)}"
        + _padding(names)
        for (why, type_), names in groups.items()
        if count
    ]


def _padding(names: Sequence[str]) -> str:
    """What helps where all of these read an intermediate width, in a checkpoint of safetensors."""
    if not all("ffn_down" in name for name in names):
        return ""
    return f"; --set {KEY}=256 gives a Hugging Face checkpoint rows of whole blocks there"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _idle(recipe: GgufRecipe, tensors: Sequence[Planned]) -> list[str]:
    """Keys of the recipe that change nothing."""
    found = [
        f"{table}.{key} has no effect {without(transform, recipe.transforms)}"
        for table, transform in _TABLES.items()
        if transform not in recipe.transforms
        for key in sorted(getattr(recipe, table).model_fields_set)
    ]
    if recipe.rotates:
        found += [
            f"rotate.{key} has no effect: rotations are not learned for format gguf"
            for key in sorted({"steps", "rate"} & recipe.rotate.model_fields_set)
            if getattr(recipe.rotate, key) != type(recipe.rotate).model_fields[key].default
        ]
    options, names = recipe.options, {tensor.name for tensor in tensors if tensor.eligible}
    all_names = [tensor.name for tensor in tensors]
    for item in options.overrides:
        # An override that keeps a tensor makes it not eligible.
        if not any(options.override_of(name) is item for name in all_names):
            found.append(
                f"override {item.match} has no effect: it matches no tensor that an earlier one "
                "leaves"
            )
        elif item.type is not None and not any(item.hits(name) for name in names):
            found.append(f"override {item.match} has no effect: what it matches is never quantized")
    if HEAD not in all_names:
        if recipe.leave_output:
            found.append("leave_output has no effect: the head is the token embedding")
        if recipe.output_type is not None and recipe.embedding_type is not None:
            found.append(
                "output_type has no effect: the head is the token embedding, which gets "
                "embedding_type"
            )
    if recipe.embedding_type is not None and EMBEDDING_OF_TOKENS not in all_names:
        found.append("embedding_type has no effect: there is no token_embd.weight")
    if not recipe.sweeps:
        found += [
            f"gptq.{key} has no effect without method: gptq"
            for key in sorted(recipe.gptq.model_fields_set)
        ]
    if (
        recipe.importance
        and not recipe.sweeps
        and all(t.copied or t.type.name in _DEAF for t in tensors)
    ):
        found.append(f"importance has no effect with type {recipe.type}")
    return [*found, *unread(recipe)]
