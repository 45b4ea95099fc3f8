"""Types of the tensors in a GGUF file, to choose among."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.gguf_models import is_gguf
from qtool.checkpoints.padding import padded
from qtool.converting.source import opened
from qtool.errors import UnsupportedError
from qtool.fitting.gguf_losses import losses_of, usable_types, weighed
from qtool.fitting.recipe_text import gguf_text
from qtool.fitting.request import FitRequest, block_types
from qtool.fitting.ways import Made, Ways, said_by
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.importance.measured import begin_with_bos
from qtool.gguf.open import open_source, open_view
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.weights import gguf_weights
from qtool.gguf_mixtures.kinds import EMBEDDING_OF_TOKENS, EMBEDDINGS, HEAD, layer_of, model_facts
from qtool.gguf_types import FLOATS, BlockType
from qtool.gradients.sensitivity import Sensitivities
from qtool.messages.progress import Progress
from qtool.planning.fitting import Fitting, passing
from qtool.planning.gguf.estimate import shapes_of
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.planning.gguf.planned import GgufPlan
from qtool.planning.handed import handed_on
from qtool.quality.weights import runnable
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import parse
from qtool.streaming.weights import Weights
from qtool.streaming.workers import Workers
from qtool.texts.calibration import calibration_tokens

_RECORD = 1024  # bytes at most that a file tells of what it was calibrated on
_SCALES_MORE = 0.05  # that AWQ's scales may take above what is guessed

# What GPTQ leaves of the KL divergence by rounding the head to nearest: 0.11 to 0.18, of SmolLM2's
# as Q3_K to Q6_K and IQ4_XS. GPTQ and AWQ make less of a difference in blocks, where types with
# scales of scales and importance have less to gain: 0.9 to 1.0 of what is estimated. Nothing makes
# up for errors in rows that are looked up: of `tiny`, whose embedding is its head and loses more as
# that, 0.6 (Q3_K) to 0.75 (Q5_K) remain of both together.
_HEAD_REMAINS = 1 / 6


@contextmanager
def gguf_ways(request: FitRequest, recipe: GgufRecipe) -> Iterator[Ways]:
    """UnsupportedError where there is nothing to choose."""
    _check_recipe(recipe)
    types = block_types(request.types)
    if is_gguf(request.source):
        open_view(request.source, recipe, None)  # refuses what is done to checkpoints alone
        with gguf_weights(open_source(request.source)) as (weights, source):
            yield _ways(request, recipe, types, weights, source)
    else:
        found = opened(request.source, request.requantize)
        checkpoint = padded(found, recipe.pad_intermediate)
        yield _ways(request, recipe, types, runnable(checkpoint), hf_source(checkpoint))


def _ways(
    request: FitRequest,
    recipe: GgufRecipe,
    types: Sequence[BlockType],
    weights: Weights,
    source: GgufSource,
) -> Ways:
    plan = make_gguf_plan(recipe, source, requantize=request.requantize)
    free = {tensor.name: tensor for tensor in _free(plan, recipe)}
    usable = {name: _usable(tensor, types, recipe) for name, tensor in free.items()}
    others = [t for t in plan.tensors if t.name in EMBEDDINGS and t.name != EMBEDDING_OF_TOKENS]
    tables = {t.name: t.type.name for t in others if not _says(recipe, t.name)}
    facts = model_facts(source.metadata)
    handed = handed_on(weights.config, request.settings.length)
    shapes = shapes_of(plan.tensors, request.settings, facts.active_share)
    fitting = Fitting(
        passing(replace(shapes, handed=handed), request.settings),
        2 * len(plan.layout.header),
        len(free),
    )

    def tokens(progress: Progress) -> tuple[NDArray[np.int64], dict[str, Any]]:
        found = begin_with_bos(
            calibration_tokens(request.settings, weights.folder, progress), source
        )
        return found.tokens, found.record()

    tied = all(tensor.name != HEAD for tensor in source.tensors)
    swept = {name for name, tensor in free.items() if _is_swept_head(tensor)}
    tied_remains = _HEAD_REMAINS if tied and swept else 1.0

    def losses(
        name: str, sensitivities: Sensitivities, workers: Workers
    ) -> dict[str, float | None]:
        if not (ways := weighed(free[name], sensitivities, tied, tied_remains)):
            return {}
        lost = losses_of(ways, usable[name], recipe.importance, workers)
        return {
            kind.name: float(loss) if np.isfinite(loss) else None
            for kind, loss in zip(usable[name], lost, strict=True)
        }

    def made(text: str) -> Made:
        other = parse(text, str(request.out), request.out.stem)
        assert isinstance(other, GgufRecipe)
        return _made(make_gguf_plan(other, source, requantize=request.requantize))

    return Ways(
        weights,
        {
            name: {
                kind.name: tensor.source.rows * kind.row_bytes(tensor.source.in_features)
                for kind in usable[name]
            }
            for name, tensor in free.items()
        },
        dict.fromkeys(free, 1),
        _made(plan),
        {name: (tensor.type.name, tensor.nbytes) for name, tensor in free.items()},
        tokens,
        losses,
        partial(gguf_text, recipe, tables),
        made,
        {
            "importance": recipe.importance,
            "kind of file": recipe.file_type.name,
            "method of an embedding that is the head": "gptq" if tied and swept else None,
        },
        fitting,
        "tensor",
        (*_without_data(recipe), *_not_chosen(plan, free), *_fallen_back(usable, types)),
        {} if tied else dict.fromkeys(swept, _HEAD_REMAINS),
    )


def _is_swept_head(tensor: PlannedTensor) -> bool:
    """Whether GPTQ is to choose codes of the head, or of an embedding that is it."""
    return tensor.swept and layer_of(tensor.name) < 0


def _not_chosen(plan: GgufPlan, free: Mapping[str, PlannedTensor]) -> list[str]:
    """Sentences on the matrices whose types are not chosen, by what decides them."""
    left = [t for t in plan.tensors if len(t.shape) > 1 and t.name not in free]
    named = {t.name: t.type.name for t in left if t.eligible and _says(plan.recipe, t.name)}
    short = [t for t in left if t.eligible and t.type in FLOATS and t.name not in named]
    packed = [t for t in left if t.copied and t.type not in FLOATS and t.name not in named]
    found = said_by(named)
    if short:
        found.append(
            f"rows of {len(short)} matrices ({_some(short)}) are no whole blocks of any type; "
            "they stay plain numbers"
        )
    if packed:
        found.append(
            f"{len(packed)} matrices ({_some(packed)}) are quantized already, and stay as they are"
        )
    return found


def _some(tensors: Sequence[PlannedTensor]) -> str:
    """The first few, with their types."""
    named = [f"{tensor.name} {tensor.type.name.lower()}" for tensor in tensors[:3]]
    return ", ".join(named) + (" ..." if len(tensors) > 3 else "")


def _without_data(recipe: GgufRecipe) -> list[str]:
    if recipe.importance:
        return []
    return [
        f"recipe {recipe.name} rounds without looking at text; with --set importance=true, or as "
        "q4_k_m-awq-gptq does it, the same bytes lose less"
    ]


def _fallen_back(
    usable: Mapping[str, Sequence[BlockType]], types: Sequence[BlockType]
) -> list[str]:
    """A sentence on types that nobody asked for."""
    names = [name for name, kinds in usable.items() if not set(kinds) <= set(types)]
    found = {kind.name for name in names for kind in usable[name] if kind not in types}
    if not names:
        return []
    return [
        f"rows of {len(names)} tensors are no whole blocks of all --types; there it is, as with "
        f"llama.cpp, {', '.join(sorted(found))} in their place"
    ]


def _made(plan: GgufPlan) -> Made:
    """With room for what the file will tell of its calibration."""
    numbers = sum(tensor.parameters for tensor in plan.tensors)
    more = _RECORD if plan.recipe.calibrates else 0
    more += int(plan.scales_bytes * _SCALES_MORE)
    return Made(plan.size_bytes + more, plan.tensor_bytes, numbers)


def _check_recipe(recipe: GgufRecipe) -> None:
    if recipe.file_type.default in FLOATS:
        raise UnsupportedError(
            f"recipe {recipe.name} makes a file of plain numbers ({recipe.type}), in which nothing "
            "is to be chosen; take one that quantizes, such as q4_k_m"
        )


def _free(plan: GgufPlan, recipe: GgufRecipe) -> list[PlannedTensor]:
    """Tensors whose types are to be chosen: all that the recipe quantizes, but for those of which
    it says the type."""
    return [
        tensor
        for tensor in plan.tensors
        if tensor.eligible and tensor.type not in FLOATS and not _says(recipe, tensor.name)
    ]


def _says(recipe: GgufRecipe, name: str) -> bool:
    """Whether the recipe itself says the type of a tensor."""
    given = {EMBEDDING_OF_TOKENS: recipe.embedding_type, HEAD: recipe.output_type}
    return given.get(name) is not None or recipe.options.override_of(name) is not None


def _usable(
    tensor: PlannedTensor, types: Sequence[BlockType], recipe: GgufRecipe
) -> list[BlockType]:
    found = usable_types(tensor.source, types, recipe)
    if not found:
        names = ", ".join(kind.name.lower() for kind in types)
        raise UnsupportedError(
            f"{tensor.name}: none of --types ({names}) is encoded without importance, which recipe "
            f"{recipe.name} does not measure; add one such as q2_k, or --set importance=true"
        )
    return found
