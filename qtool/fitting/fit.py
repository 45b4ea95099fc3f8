"""`qtool fit`, from a request to a recipe."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import SourceError, UnsupportedError
from qtool.fitting import costs as kept
from qtool.fitting.allocate import Candidate, allocate
from qtool.fitting.costs import Costs
from qtool.fitting.request import FitRequest, Fitted, check_files
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

if TYPE_CHECKING:
    from qtool.fitting.slope import Slopes

_TRIES = 4
_KEPT_BESIDE = 3  # states behind the last block, and gradients twice


def fit(request: FitRequest, progress: Progress) -> Fitted:
    """Measure, choose and write the recipe; nothing is left under its name unless all succeeds."""
    check_free(request.out, is_folder=False)
    check_files(request)
    recipe = request.recipe
    if recipe.rotates:
        raise UnsupportedError(
            f"recipe {recipe.name} rotates the network, and what errors cost is measured of the "
            "network as it is; take a recipe without, or --set transforms=[awq]"
        )
    files = source_files(request.source)
    with _ways(request) as ways:
        _check_size(request, ways)
        for note in ways.notes:
            progress.say(f"note: {note}")
        tokens, record = ways.tokens()
        of_slopes = {
            program.VERSION: program.facts()[program.VERSION],
            "model": [file_facts(file) for file in files],
            "calibration text": record,
        }
        known = {**of_slopes, **ways.facts}
        there = request.costs is not None and request.costs.exists()
        # What blocks are given beside states, and gradients by it.
        room = ways.hidden_bytes * (ways.blocks + _KEPT_BESIDE) + 2 * ways.given_bytes
        room *= tokens.size
        with workspace(
            request.out,
            is_folder=False,
            nbytes=0 if there else room,
            fresh=request.fresh,
            sources=marks(files),
        ) as space:
            if request.costs is not None and there:
                costs = kept.read(request.costs, known, ways.sizes)
                progress.say(f"costs taken from {request.costs}")
            else:
                costs = _measured(request, ways, tokens, of_slopes, space, progress)
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
    request: FitRequest,
    ways: Ways,
    tokens: NDArray[np.int64],
    known: Mapping[str, Any],
    space: Workspace,
    progress: Progress,
) -> Costs:
    from qtool.fitting import losses as rounded
    from qtool.fitting import slopes

    agreed = {**program.facts(), **known, "version of torch or kind of CPU": environment()}
    space.agree(agreed)
    found = slopes.finished(space)
    if found is None:
        found = _passed(request, ways, tokens, space, progress)
    with progress.stage("quantize"):
        losses = rounded.losses_of(ways, found, space, request.threads, progress)
    if not any(losses.values()):
        raise SourceError(
            f"{request.source}: of none of its matrices could be measured what errors in it cost"
        )
    return Costs(losses, tokens.size)


def _passed(
    request: FitRequest,
    ways: Ways,
    tokens: NDArray[np.int64],
    space: Workspace,
    progress: Progress,
) -> "Slopes":
    """What the passes forwards and backwards tell."""
    from qtool.calibrating.skeleton import Skeleton
    from qtool.fitting import slopes

    with progress.stage("calibrate"):
        skeleton = Skeleton.open(ways.weights)
        seed = request.settings.seed
        return slopes.measure(skeleton, tokens, seed, space, request.threads, progress)


def _budget(request: FitRequest, made: Made) -> int:
    """Bytes of tensors that an artifact may have which is like this one otherwise."""
    if request.size_bytes is not None:
        return request.size_bytes - (made.size_bytes - made.tensor_bytes)
    assert request.bits is not None
    return int(request.bits * made.numbers / 8)


def _check_size(request: FitRequest, ways: Ways) -> None:
    """UnsupportedError, before any work, where no choice is small enough; and what is refused of
    the recipes that may come out, which are the shortest and the longest of these."""
    if not ways.sizes:
        raise UnsupportedError(
            f"{request.source}: recipe {request.recipe.name} leaves nothing to be chosen; its "
            "overrides name every matrix; begin with the one that it was made from"
        )
    ends = [
        {name: pick(sizes, key=sizes.__getitem__) for name, sizes in ways.sizes.items()}
        for pick in (max, min)
    ]
    for choices in ends:
        made = ways.made(ways.text(_about(request, 0.0), choices))
    least = sum(ways.sizes[name][choice] for name, choice in choices.items())
    _refuse_less_than(request, made, made.tensor_bytes - least)


def _refuse_less_than(request: FitRequest, made: Made, fixed: int) -> None:
    """UnsupportedError where less is asked for than the smallest artifact has, of which `fixed` are
    of tensors that nothing is chosen for."""
    if _budget(request, made) >= made.tensor_bytes:
        return
    asked = f"{request.size_bytes:,} bytes" if request.size_bytes else f"{request.bits:g} bits"
    raise UnsupportedError(
        f"{request.source}: with these types the smallest artifact has {made.size_bytes:,} bytes, "
        f"{made.bits_per_weight:.3f} bits a weight, {fixed:,} bytes of it in tensors that are not "
        f"chosen for, and {asked} are asked for; ask for more, or name smaller --types"
    )


def _choose(
    request: FitRequest, ways: Ways, costs: Costs, progress: Progress
) -> tuple[Fitted, str]:
    """The cheapest choice, and the recipe that says it."""
    names = [name for name in ways.sizes if costs.losses.get(name)]
    left = {name: ways.chosen_before[name] for name in ways.sizes if name not in names}
    units = [_candidates(request, name, ways.sizes[name], costs.losses[name]) for name in names]
    chosen_before = sum(nbytes for _, nbytes in ways.chosen_before.values())
    fixed = ways.before.tensor_bytes - chosen_before + sum(nbytes for _, nbytes in left.values())
    budget = _budget(request, ways.before) - fixed
    for _ in range(_TRIES):
        found = allocate(units, budget)
        if found is None:
            break
        chosen = dict(zip(names, found, strict=True))
        loss = sum(one.loss for one in found)
        text = ways.text(_about(request, loss), {name: one.name for name, one in chosen.items()})
        made = ways.made(text)
        over = 0 if request.size_bytes is None else made.size_bytes - request.size_bytes
        if over <= 0:
            notes = (*ways.notes, *_beyond(request, units, found, made))
            for note in notes[len(ways.notes) :]:
                progress.say(f"note: {note}")
            share = sum(nbytes for _, nbytes in left.values()) / max(1, made.tensor_bytes)
            fitted = Fitted(
                request.out,
                made,
                loss,
                (ways.before, _loss_before(ways, costs)),
                chosen,
                ways.members,
                tuple(left),
                share,
                costs.tokens,
                progress.total(),
                peak_rss_bytes(),
                notes,
            )
            return fitted, text
        # The header grows with what the recipe says.
        budget = sum(one.nbytes for one in found) - over
    smallest = (min(unit, key=lambda one: one.nbytes).name for unit in units)
    least = dict(zip(names, smallest, strict=True))
    _refuse_less_than(request, ways.made(ways.text(_about(request, 0.0), least)), fixed)
    raise UnsupportedError(
        f"{request.source}: no choice of types makes an artifact so small; ask for more bytes"
    )


def _beyond(
    request: FitRequest,
    units: Sequence[Sequence[Candidate]],
    found: Sequence[Candidate],
    made: Made,
) -> list[str]:
    """A sentence where more bytes were asked for than all types together have use for."""
    pairs = zip(units, found, strict=True)
    if any(one.nbytes < max(other.nbytes for other in unit) for unit, one in pairs):
        return []
    if _budget(request, made) <= made.tensor_bytes:
        return []
    return [
        "every matrix has the largest type that there is to choose, which comes to "
        f"{made.size_bytes:,} bytes, {made.bits_per_weight:.3f} bits a weight; more were asked for"
    ]


def _candidates(
    request: FitRequest, name: str, sizes: Mapping[str, int], losses: Mapping[str, float | None]
) -> list[Candidate]:
    found = [
        Candidate(choice, nbytes, loss)
        for choice, nbytes in sizes.items()
        if (loss := losses.get(choice)) is not None
    ]
    if not found:
        raise UnsupportedError(
            f"{request.source}: {name} has weights that none of --types can hold; add one such as "
            "q8_0, or give it a type by an override"
        )
    return found


def _about(request: FitRequest, loss: float) -> str:
    """The first line of the recipe."""
    if request.size_bytes is not None:
        size = f"{request.size_bytes:,} bytes"
    else:
        size = f"{request.bits:g} bits a weight"
    return (
        f"{request.recipe.name} fitted to {size}: rounded to nearest it loses about {loss:.4f} "
        "nats a token."
    )


def _loss_before(ways: Ways, costs: Costs) -> float | None:
    """Of the recipe as it was; None where it has types that were not measured."""
    total = 0.0
    for name, (choice, _) in ways.chosen_before.items():
        if losses := costs.losses.get(name):
            loss = losses.get(choice)
            if loss is None:
                return None
            total += loss
    return total
