"""`qtool fit`, from a request to a recipe."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.gguf_models import source_files
from qtool.errors import SourceError, UnsupportedError
from qtool.fitting import costs as kept
from qtool.fitting.choose import check_size, choose, loss_before
from qtool.fitting.costs import Costs
from qtool.fitting.request import FitRequest, Fitted, check_files, fitted_of, recorded
from qtool.fitting.ways import Ways
from qtool.formats.safetensors_header import TensorInfo
from qtool.messages.progress import Progress
from qtool.messages.summary import peak_rss_bytes
from qtool.planning.fitting import memory
from qtool.provenance.record import environment
from qtool.recipe.file import Precision, said_of
from qtool.recipe.gguf import GgufRecipe
from qtool.workspaces import program
from qtool.workspaces.already import SAID, AlreadyMade
from qtool.workspaces.differences import DEVICE
from qtool.workspaces.identity import file_facts
from qtool.workspaces.leftovers import check_free
from qtool.workspaces.watched import marks
from qtool.workspaces.workspace import COMMAND, AskAgain, Workspace, workspace

if TYPE_CHECKING:
    from qtool.gradients.sensitivity import Sensitivities


def fit(request: FitRequest, progress: Progress) -> Fitted:
    """Measure, choose and write the recipe; nothing is left under its name unless all succeeds."""
    check_free(request.out, is_folder=False, again=not request.fresh)
    check_files(request)
    recipe = request.recipe
    if recipe.rotates:
        raise UnsupportedError(
            f"recipe {recipe.name} rotates the network, and what errors cost is measured of the "
            "network as it is; take a recipe without, or --set transforms=[awq]"
        )
    files = source_files(request.source)
    there = request.costs is not None and request.costs.exists()
    with _ways(request) as ways:
        check_size(request, ways)
        most = memory(ways.fitting, request.threads, request.max_ram, chooses_only=there)
        request = replace(request, threads=most.setting.threads)
        if request.max_ram is not None:
            progress.say(most.line())
        for note in ways.notes:
            progress.say(f"note: {note}")
        tokens, record = ways.tokens(progress)
        precision = _precision(request, there, progress)
        of_sensitivities = {
            program.VERSION: program.facts()[program.VERSION],
            "model": [file_facts(file) for file in files],
            "calibration text": {**record, **said_of(precision)},
            "tensors that are run": _digest(ways.weights.tensors),
        }
        known = {**of_sensitivities, **ways.facts}
        measured = _agreed(request, known)
        of_all = {**measured, **_chosen_by(request)}
        room = replace(ways.fitting.shapes, tokens=tokens.size).sensitivities_on_disk
        try:
            with workspace(
                request.out,
                is_folder=False,
                nbytes=0 if there else room,
                fresh=request.fresh,
                sources=marks(files),
                facts=of_all,
            ) as space:
                space.told_of(of_all)
                if request.costs is not None and there:
                    costs = kept.read(request.costs, known, ways.sizes)
                    progress.say(f"costs taken from {request.costs}")
                else:
                    costs = _measured(
                        request, ways, tokens, of_sensitivities, space, progress, precision
                    )
                    if request.costs is not None:
                        kept.write(request.costs, costs, known)
                try:
                    chosen = choose(request, ways, costs)
                except UnsupportedError as error:
                    raise AskAgain(f"{error}; what was measured is kept") from error
                for note in chosen.notes:
                    progress.say(f"note: {note}")
                space.artifact.write_text(chosen.text, encoding="utf-8")
                made = Fitted(
                    out=request.out,
                    made=chosen.made,
                    loss=chosen.loss,
                    before=(ways.before, loss_before(ways, costs)),
                    chosen=chosen.chosen,
                    members=ways.members,
                    kept=tuple(chosen.left),
                    kept_share=chosen.left_share,
                    tokens=costs.tokens,
                    unrelated=costs.unrelated,
                    memory=most,
                    seconds=progress.total(),
                    peak_rss_bytes=peak_rss_bytes(),
                    notes=(*ways.notes, *chosen.notes),
                )
                # The file of costs is there by now.
                space.conclude(recorded(made), {**measured, **_chosen_by(request)})
        except AlreadyMade as found:
            progress.say(f"note: {SAID}")
            return fitted_of(found.made, request.out, most, progress.total(), peak_rss_bytes())
    return made


def _agreed(request: FitRequest, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a measurement that is not finished is of."""
    return {
        **program.facts(),
        **known,
        "version of torch or kind of CPU": environment(),
        # Not of costs: those of a GPU serve as well.
        DEVICE: "cpu" if request.device is None else request.device.name,
    }


def _chosen_by(request: FitRequest) -> dict[str, Any]:
    """What a choice hangs on beside what is measured."""
    recipe, costs = request.recipe, request.costs
    return {
        COMMAND: "fit",
        "recipe": {"name": recipe.name, "changes": recipe.changes, **recipe.effective()},
        "choice": [request.size_bytes, request.bits, request.types, sorted(request.kept_keys)],
        "costs": None if costs is None or not costs.exists() else file_facts(costs),
    }


def _precision(request: FitRequest, there: bool, progress: Progress) -> Precision:
    """Of products; where costs are there, that of those, if they are as exact as asked."""
    asked = request.settings.precision
    if asked == "float32":
        return asked
    if there:
        assert request.costs is not None
        return kept.precision_of(request.costs)
    from qtool.streaming.precision import settled

    return settled(asked, request.device, progress)


def _digest(tensors: Mapping[str, TensorInfo]) -> str:
    """Of names and shapes: recipes of two families see fused experts differently."""
    seen = sorted((name, *info.shape) for name, info in tensors.items())
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


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
    precision: Precision,
) -> Costs:
    from qtool.fitting import losses as rounded
    from qtool.gradients import measure as sensitivities

    space.agree(_agreed(request, known))
    found = sensitivities.finished(space)
    if found is None:
        found = _passed(request, ways, tokens, space, progress, precision)
    with progress.stage("quantize"):
        losses = rounded.losses_of(ways, found, space, request.threads, progress)
    if not any(losses.values()):
        raise SourceError(
            f"{request.source}: of none of its matrices could be measured what errors in it cost"
        )
    return Costs(losses, tokens.size, found.unrelated)


def _passed(
    request: FitRequest,
    ways: Ways,
    tokens: NDArray[np.int64],
    space: Workspace,
    progress: Progress,
    precision: Precision,
) -> "Sensitivities":
    """What the forward and the backward pass tell."""
    from qtool.gradients import measure as sensitivities
    from qtool.streaming.skeleton import Skeleton

    with progress.stage("calibrate"):
        skeleton = Skeleton.open(ways.weights)
        return sensitivities.measure(
            skeleton, tokens, request.settings.seed, space, request.threads, progress,
            device=request.device, precision=precision,
        )  # fmt: skip
