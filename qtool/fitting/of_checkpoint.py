"""Bits of the matrices in a checkpoint's artifact, to choose among.

What engines fuse into one layer has one scheme: q/k/v, gate/up, and all experts of a block.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.gguf_models import is_gguf
from qtool.converting.source import check_needed, opened
from qtool.errors import SourceError, UnsupportedError
from qtool.fitting import outside
from qtool.fitting.recipe_text import checkpoint_text
from qtool.fitting.request import FitRequest, widths
from qtool.fitting.ways import Made, Ways, said_by
from qtool.formats.safetensors_file import to_float32
from qtool.gradients.sampled import by_weight, checked, pieces
from qtool.gradients.sensitivity import Sensitivities, Sensitivity
from qtool.messages.progress import Progress
from qtool.methods import rtn
from qtool.planned import Planned
from qtool.planning.experts import as_quantized
from qtool.planning.fitting import Fitting, passing
from qtool.planning.handed import handed_on
from qtool.planning.heads import says_tied
from qtool.planning.plan import Plan, make_plan
from qtool.planning.shapes import shapes_of
from qtool.quality.weights import runnable
from qtool.recipe.recipe import Recipe, parse
from qtool.streaming.workers import Workers
from qtool.texts.calibration import calibration_tokens

_MIXED = ("gptq", "compressed-tensors", "mlx")  # formats whose matrices may differ in bits


@contextmanager
def checkpoint_ways(request: FitRequest, recipe: Recipe) -> Iterator[Ways]:
    """UnsupportedError where there is nothing to choose."""
    _check(request, recipe)
    check_needed(request.source, request.requantize)
    checkpoint = as_quantized(recipe, opened(request.source, request.requantize))
    plan = make_plan(recipe, checkpoint)
    bits = widths(request.types, recipe.format)
    kept = request.kept_keys
    plans = {width: make_plan(outside.of_width(recipe, width, kept), checkpoint) for width in bits}
    units = _units(plan, plans)
    headless, tied = outside.has_no_head(checkpoint, plan), says_tied(checkpoint.config)
    keys = {
        name: key
        for name, unit in units.items()
        if recipe.format == "mlx" and (key := outside.key_of(unit[0], tied)) is not None
    }
    made_by = {
        name: {w: made for w, made in plans.items() if all(_has(made, one.name) for one in unit)}
        for name, unit in units.items()
    }
    units = {name: unit for name, unit in units.items() if made_by[name]}
    weights = runnable(checkpoint)
    handed = handed_on(checkpoint.config, request.settings.length)
    active = structure.active_share(checkpoint.config)
    shapes = passing(shapes_of(recipe, plan.tensors, active, handed), request.settings)
    header = sum(len(file.header) for file in plan.layout.files)
    fitting = Fitting(shapes, header, len(units))

    def tokens(progress: Progress) -> tuple[NDArray[np.int64], dict[str, Any]]:
        found = calibration_tokens(request.settings, weights.folder, progress)
        return found.tokens, found.record()

    def losses(
        name: str, sensitivities: Sensitivities, workers: Workers
    ) -> dict[str, float | None]:
        sensitivity_of = {
            one.name: outside.sensitivities_of(one, sensitivities, headless) for one in units[name]
        }
        if not all(sensitivity_of.values()):
            return {}
        return {
            str(width): sum(
                _lost(checkpoint, made.by_name[matrix], sensitivity, workers)
                for matrix, ways in sensitivity_of.items()
                for sensitivity in ways
            )
            for width, made in made_by[name].items()
        }

    def made(text: str) -> Made:
        other = parse(text, str(request.out), request.out.stem)
        assert isinstance(other, Recipe)
        return _made(make_plan(other, checkpoint))

    yield Ways(
        weights,
        {
            name: {
                str(width): sum(made.by_name[one.name].nbytes for one in unit)
                for width, made in made_by[name].items()
            }
            for name, unit in units.items()
        },
        {name: len(unit) for name, unit in units.items()},
        _made(plan),
        {name: (_bits(unit[0]), sum(one.nbytes for one in unit)) for name, unit in units.items()},
        tokens,
        losses,
        partial(
            checkpoint_text, recipe, {k: [t.module for t in u] for k, u in units.items()}, keys
        ),
        made,
        {"weights": recipe.weights and recipe.weights.model_dump(mode="json", exclude={"bits"})},
        fitting,
        "layer",
        tuple(said_by(_given(plan, units))),
        {name: outside.remains(recipe, unit[0]) for name, unit in units.items()},
    )


def _check(request: FitRequest, recipe: Recipe) -> None:
    if recipe.format not in _MIXED or recipe.weights is None or recipe.weights.type != "int":
        kind = "" if recipe.weights is None or recipe.weights.type == "int" else recipe.weights.type
        raise UnsupportedError(
            f"recipe {recipe.name} makes {kind or recipe.format}, whose matrices all have the same "
            "bits; take one of GGUF, or of integers in gptq, compressed-tensors or mlx, such "
            "as w4a16-ct"
        )
    if recipe.activations is not None:
        raise UnsupportedError(
            f"recipe {recipe.name} rounds inputs, too, for which engines want one kind of weights; "
            "take one that rounds weights alone, such as w4a16-ct"
        )
    if is_gguf(request.source):
        raise SourceError(
            f"{request.source}: GGUF, and recipe {recipe.name} makes safetensors; take a GGUF "
            "recipe, or turn it into a checkpoint first (qtool convert FILE --to hf -o DIR)"
        )


def _has(plan: Plan, name: str) -> bool:
    """Whether a matrix is quantized there."""
    return plan.by_name[name].scheme is not None


def _units(plan: Plan, plans: Mapping[int, Plan]) -> dict[str, list[Planned]]:
    """Matrices whose bits are to be chosen, by what engines fuse: all that have those of each plan,
    and not what an override or a key of the recipe says."""
    found: dict[str, list[Planned]] = {}
    for planned in plan.quantized:
        found.setdefault(structure.fused_key(planned.module), []).append(planned)
    return {
        name: unit
        for name, unit in found.items()
        if all(
            scheme is None or scheme.bits == width
            for width, made in plans.items()
            for scheme in (made.by_name[one.name].scheme for one in unit)
        )
    }


def _given(plan: Plan, units: Mapping[str, list[Planned]]) -> dict[str, str]:
    """Bits of the matrices that are quantized, and not chosen for."""
    free = {one.name for unit in units.values() for one in unit}
    return {one.name: f"{_bits(one)} bits" for one in plan.quantized if one.name not in free}


def _bits(planned: Planned) -> str:
    assert planned.scheme is not None
    return str(planned.scheme.bits)


def _made(plan: Plan) -> Made:
    numbers = sum(tensor.parameters for tensor in plan.tensors if tensor.nbytes)
    return Made(plan.size_bytes, sum(tensor.nbytes for tensor in plan.tensors), numbers)


def _lost(
    checkpoint: Checkpoint, planned: Planned, sensitivity: Sensitivity, workers: Workers
) -> float:
    """What rounding a matrix to nearest, as `planned` says, costs."""
    scheme = planned.scheme
    assert scheme is not None
    rows, columns = planned.shape

    def lost(span: tuple[int, int]) -> tuple[float, float]:
        first, last = span
        raw = checkpoint.part(planned.name, first, last)
        weight = to_float32(raw, planned.dtype, (last - first, columns))
        checked(planned.name, weight, first)
        back = rtn.quantize(weight, None, scheme, rtn.Options()).quant.dequantize()
        own = sensitivity.rows[first:last]
        errors = np.square(weight - back, dtype=np.float64) @ sensitivity.columns
        return 0.5 * float(errors @ own), float(own.sum())

    if planned.block is None:
        spans = by_weight(sensitivity.rows, columns)
        found = workers.map(lost, [span[:2] for span in spans])
        spoken = (weight for _, _, weight in spans)
        pairs = zip(found, spoken, strict=True)
        return sum(one * weight / seen for (one, seen), weight in pairs if seen > 0)
    found = workers.map(lost, pieces(rows, columns))
    total, seen = (sum(part) for part in zip(*found, strict=True))
    return total * float(sensitivity.rows.sum()) / seen if seen > 0 else 0.0
