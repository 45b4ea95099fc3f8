"""`qtool fit`, from a request to a recipe."""

from collections.abc import Sequence
from typing import Any

from qtool.errors import UnsupportedError
from qtool.fitting import costs as kept
from qtool.fitting.allocate import allocate
from qtool.fitting.costs import Costs
from qtool.fitting.losses import EMBEDDING, HEAD, usable_types
from qtool.fitting.recipe_text import recipe_text
from qtool.fitting.request import FitRequest, Fitted
from qtool.gguf.kinds import model_facts
from qtool.gguf.plan import make_gguf_plan
from qtool.gguf.planned import GgufPlan, PlannedTensor
from qtool.gguf.recipe import GgufRecipe
from qtool.gguf.resume import source_files
from qtool.gguf.source import GgufSource
from qtool.gguf_types import FLOATS
from qtool.recipe.recipe import parse
from qtool.runs import program
from qtool.runs.progress import Progress
from qtool.runs.provenance import environment
from qtool.runs.summary import peak_rss_bytes
from qtool.runs.watched import marks
from qtool.runs.workspace import check_free, workspace

_TRIES = 4


def fit(request: FitRequest, progress: Progress) -> Fitted:
    """Measure, choose and write the recipe; nothing is left under its name unless all succeeds."""
    check_free(request.out, is_folder=False)
    _check_recipe(request.recipe)
    from qtool.calibrating.calibration import calibration_tokens
    from qtool.fitting.measuring import measured, opened
    from qtool.gguf.importance import begin_with_bos

    files = source_files(request.source)
    with opened(request.source) as (weights, source):
        plan = make_gguf_plan(request.recipe, source)
        free = _free(plan, request)
        _check_size(request, plan, free)
        calibration = begin_with_bos(calibration_tokens(request.settings, weights.folder), source)
        known = kept.facts(request, files, calibration.digest)
        room = 4 * _width(source) * calibration.tokens.size * model_facts(source.metadata).layers
        with workspace(
            request.out, is_folder=False, nbytes=room, fresh=request.fresh, sources=marks(files)
        ) as space:
            if request.costs is not None and request.costs.exists():
                costs = kept.read(request.costs, known)
                progress.say(f"costs taken from {request.costs}")
            else:
                space.agree({**program.facts(), **known, **_environment()})
                costs = measured(
                    request, weights, source, free, calibration.tokens, space, progress
                )
                if request.costs is not None:
                    kept.write(request.costs, costs, known)
            found, text = _choose(request, plan, source, free, costs, progress)
            space.artifact.write_text(text, encoding="utf-8")
    return found


def _environment() -> dict[str, Any]:
    return {"version of torch or kind of CPU": environment()}


def _width(source: GgufSource) -> int:
    """Of hidden states."""
    return next((t.in_features for t in source.tensors if t.name == EMBEDDING), 0)


def _about(request: FitRequest, loss: float) -> str:
    """The first line of the recipe."""
    size = f"{request.size_bytes:,} bytes" if request.size_bytes is not None else (
        f"{request.bits:g} bits a weight")  # fmt: skip
    return f"{request.recipe.name} fitted to {size}: about {loss:.4f} nats a token are lost."


def _check_recipe(recipe: GgufRecipe) -> None:
    if recipe.file_type.default in FLOATS:
        raise UnsupportedError(
            f"recipe {recipe.name} makes a file of plain numbers ({recipe.type}), in which nothing "
            "is to be chosen; take one that quantizes, such as q4_k_m"
        )
    if recipe.rotates:
        raise UnsupportedError(
            f"recipe {recipe.name} rotates the network, and what errors cost is measured of the "
            "network as it is; take a recipe without, or --set transforms=[awq]"
        )


def _free(plan: GgufPlan, request: FitRequest) -> list[PlannedTensor]:
    """Tensors whose types are to be chosen: all that the recipe quantizes, but for those of which
    it says the type."""
    recipe = request.recipe
    given = {EMBEDDING: recipe.embedding_type, HEAD: recipe.output_type}
    return [
        tensor
        for tensor in plan.tensors
        if tensor.eligible
        and tensor.type not in FLOATS
        and given.get(tensor.name) is None
        and recipe.options.override_of(tensor.name) is None
    ]


def _budget(request: FitRequest, plan: GgufPlan) -> int:
    """Bytes of tensor data, all of a file of this plan's header."""
    if request.size_bytes is not None:
        return request.size_bytes - (plan.size_bytes - plan.tensor_bytes)
    assert request.bits is not None
    return int(request.bits * sum(tensor.parameters for tensor in plan.tensors) / 8)


def _check_size(request: FitRequest, plan: GgufPlan, free: Sequence[PlannedTensor]) -> None:
    """UnsupportedError, before any work, where no choice is small enough."""
    least = plan.tensor_bytes
    for tensor in free:
        use = request.recipe.importance and tensor.name.startswith("blk.")
        types = usable_types(tensor.source, request.types, use)
        if not types:
            names = ", ".join(kind.name.lower() for kind in request.types)
            raise UnsupportedError(
                f"{tensor.name}: none of --types ({names}) is encoded without importance, which "
                "this tensor has none of; add one such as q2_k or iq3_xxs"
            )
        smallest = types[0].row_bytes(tensor.source.in_features) * tensor.source.rows
        least += smallest - tensor.nbytes
    if (budget := _budget(request, plan)) < least:
        over = plan.size_bytes - plan.tensor_bytes
        numbers = sum(tensor.parameters for tensor in plan.tensors)
        raise UnsupportedError(
            f"{request.source}: with these types the smallest file has {least + over:,} bytes, "
            f"{8 * least / numbers:.3f} bits a weight, and {budget + over:,} are asked for; ask "
            "for more, or add smaller types to --types"
        )


def _choose(
    request: FitRequest,
    plan: GgufPlan,
    source: GgufSource,
    free: Sequence[PlannedTensor],
    costs: Costs,
    progress: Progress,
) -> tuple[Fitted, str]:
    """The cheapest types, and the recipe that has them."""
    chosen_for = [tensor for tensor in free if tensor.name in costs.tensors]
    names = {tensor.name for tensor in chosen_for}
    fixed = sum(tensor.nbytes for tensor in plan.tensors if tensor.name not in names)
    units = [list(costs.tensors[tensor.name].values()) for tensor in chosen_for]
    budget = _budget(request, plan) - fixed
    for _ in range(_TRIES):
        chosen = allocate(units, budget)
        if chosen is None:
            break
        types = {tensor.name: one.name for tensor, one in zip(chosen_for, chosen, strict=True)}
        loss = sum(one.loss for one in chosen)
        text = recipe_text(_about(request, loss), request.recipe, types)
        recipe = parse(text, str(request.out), request.out.stem)
        assert isinstance(recipe, GgufRecipe)
        made = make_gguf_plan(recipe, source)
        over = 0 if request.size_bytes is None else made.size_bytes - request.size_bytes
        if over <= 0:
            found = Fitted(
                request.out,
                made.size_bytes,
                made.bits_per_weight,
                loss,
                (plan.size_bytes, _loss_of(plan, costs)),
                [(tensor.name, one) for tensor, one in zip(chosen_for, chosen, strict=True)],
                [tensor.name for tensor in free if tensor.name not in names],
                costs.tokens,
                progress.total(),
                peak_rss_bytes(),
            )
            return found, text
        budget -= over  # the header grows with what the recipe says
    raise UnsupportedError(
        f"{request.source}: no choice of types makes a file so small; ask for more bytes"
    )


def _loss_of(plan: GgufPlan, costs: Costs) -> float | None:
    """Of the recipe as it was; None where it has types that were not measured."""
    total = 0.0
    for tensor in plan.tensors:
        every = costs.tensors.get(tensor.name)
        if every is None:
            continue
        if tensor.type.name not in every:
            return None
        total += every[tensor.type.name].loss
    return total
