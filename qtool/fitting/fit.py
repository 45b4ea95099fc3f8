"""`qtool fit`, from a request to a recipe."""

from contextlib import AbstractContextManager

from qtool.errors import SourceError, UnsupportedError
from qtool.fitting import costs as kept
from qtool.fitting.allocate import Candidate, allocate
from qtool.fitting.costs import Costs
from qtool.fitting.request import FitRequest, Fitted
from qtool.fitting.ways import Made, Ways
from qtool.gguf.recipe import GgufRecipe
from qtool.gguf.resume import source_files
from qtool.runs import program
from qtool.runs.identity import file_facts
from qtool.runs.progress import Progress
from qtool.runs.provenance import environment
from qtool.runs.summary import peak_rss_bytes
from qtool.runs.watched import marks
from qtool.runs.workspace import Workspace, check_free, workspace

_TRIES = 4


def fit(request: FitRequest, progress: Progress) -> Fitted:
    """Measure, choose and write the recipe; nothing is left under its name unless all succeeds."""
    check_free(request.out, is_folder=False)
    recipe = request.recipe
    if recipe.rotates:
        raise UnsupportedError(
            f"recipe {recipe.name} rotates the network, and what errors cost is measured of the "
            "network as it is; take a recipe without, or --set transforms=[awq]"
        )
    files = source_files(request.source)
    with _ways(request) as ways:
        _check_size(request, ways)
        tokens, digest = ways.tokens()
        known = {
            "model": [file_facts(file) for file in files],
            "calibration text": digest,
            **ways.facts,
        }
        with workspace(
            request.out,
            is_folder=False,
            nbytes=ways.hidden_bytes * tokens.size,
            fresh=request.fresh,
            sources=marks(files),
        ) as space:
            if request.costs is not None and request.costs.exists():
                costs = kept.read(request.costs, known)
                progress.say(f"costs taken from {request.costs}")
            else:
                costs = _measured(request, ways, known, space, progress)
                if request.costs is not None:
                    kept.write(request.costs, costs, known)
            found, text = _choose(request, ways, costs, progress)
            space.artifact.write_text(text, encoding="utf-8")
    return found


def _ways(request: FitRequest) -> AbstractContextManager[Ways]:
    if isinstance(request.recipe, GgufRecipe):
        from qtool.fitting.of_gguf import gguf_ways

        return gguf_ways(request, request.recipe)
    from qtool.fitting.of_checkpoint import checkpoint_ways

    return checkpoint_ways(request, request.recipe)


def _measured(
    request: FitRequest, ways: Ways, known: dict[str, object], space: Workspace, progress: Progress
) -> Costs:
    from qtool.calibrating.skeleton import Skeleton
    from qtool.fitting import slopes

    agreed = {**program.facts(), **known, "version of torch or kind of CPU": environment()}
    space.agree(agreed)
    tokens, _ = ways.tokens()
    with progress.stage("calibrate"):
        skeleton = Skeleton.open(ways.weights)
        seed = request.settings.seed
        found = slopes.measure(skeleton, tokens, seed, space, request.threads, progress)
    with progress.stage("quantize"):
        losses = ways.losses(found, tokens, progress)
    if not losses:
        raise SourceError(
            f"{request.source}: of none of its matrices could be measured what errors in it cost"
        )
    return Costs(losses, tokens.size)


def _budget(request: FitRequest, made: Made) -> int:
    """Bytes of tensors that an artifact may have which is like this one otherwise."""
    if request.size_bytes is not None:
        return request.size_bytes - (made.size_bytes - made.tensor_bytes)
    assert request.bits is not None
    return int(request.bits * made.numbers / 8)


def _fixed(ways: Ways) -> int:
    """Bytes of the tensors that nothing is chosen for."""
    chosen = sum(nbytes for _, nbytes in ways.chosen_before.values())
    return ways.before.tensor_bytes - chosen


def _check_size(request: FitRequest, ways: Ways) -> None:
    """UnsupportedError, before any work, where no choice is small enough."""
    if not ways.sizes:
        raise UnsupportedError(
            f"{request.source}: recipe {request.recipe.name} leaves nothing to be chosen; its "
            "overrides name every matrix"
        )
    least = _fixed(ways) + sum(min(sizes.values()) for sizes in ways.sizes.values())
    before, budget = ways.before, _budget(request, ways.before)
    if budget < least:
        over = before.size_bytes - before.tensor_bytes
        raise UnsupportedError(
            f"{request.source}: with these types the smallest artifact has {least + over:,} bytes, "
            f"{8 * least / before.numbers:.3f} bits a weight, and {budget + over:,} are asked for; "
            "ask for more, or add smaller types to --types"
        )


def _choose(
    request: FitRequest, ways: Ways, costs: Costs, progress: Progress
) -> tuple[Fitted, str]:
    """The cheapest choice, and the recipe that says it."""
    names = [name for name in ways.sizes if name in costs.losses]
    left = [name for name in ways.sizes if name not in costs.losses]
    units = [
        [
            Candidate(choice, nbytes, costs.losses[name].get(choice, float("inf")))
            for choice, nbytes in ways.sizes[name].items()
        ]
        for name in names
    ]
    fixed = _fixed(ways) + sum(ways.chosen_before[name][1] for name in left)
    budget = _budget(request, ways.before) - fixed
    for _ in range(_TRIES):
        found = allocate(units, budget)
        if found is None:
            break
        chosen = dict(zip(names, found, strict=True))
        loss = sum(one.loss for one in found)
        types = {name: one.name for name, one in chosen.items()}
        text = ways.text(_about(request, loss), types)
        made = ways.made(text)
        over = 0 if request.size_bytes is None else made.size_bytes - request.size_bytes
        if over <= 0:
            fitted = Fitted(
                request.out,
                made,
                loss,
                (ways.before, _loss_before(ways, costs)),
                chosen,
                ways.members,
                left,
                costs.tokens,
                progress.total(),
                peak_rss_bytes(),
            )
            return fitted, text
        budget -= over  # the header grows with what the recipe says
    raise UnsupportedError(
        f"{request.source}: no choice of types makes an artifact so small; ask for more bytes"
    )


def _about(request: FitRequest, loss: float) -> str:
    """The first line of the recipe."""
    if request.size_bytes is not None:
        size = f"{request.size_bytes:,} bytes"
    else:
        size = f"{request.bits:g} bits a weight"
    return f"{request.recipe.name} fitted to {size}: about {loss:.4f} nats a token are lost."


def _loss_before(ways: Ways, costs: Costs) -> float | None:
    """Of the recipe as it was; None where it has types that were not measured."""
    total = 0.0
    for name, losses in costs.losses.items():
        choice = ways.chosen_before[name][0] if name in ways.chosen_before else ""
        if choice not in losses:
            return None
        total += losses[choice]
    return total
