"""What a recipe wants measured before a GGUF file is written: importance, and on the way the scales
of transforms and the codes of GPTQ's sweep."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qtool.checkpoints.gguf_models import is_gguf
from qtool.gguf.importance.imatrix import Importance
from qtool.gguf.source import GgufSource
from qtool.messages.progress import Progress
from qtool.planning.gguf.plan import Scales
from qtool.planning.gguf.planned import GgufPlan
from qtool.provenance.record import environment
from qtool.runs.gguf_request import GgufRequest
from qtool.streaming.weights import Weights
from qtool.texts.calibration import check_length
from qtool.workspaces.workspace import Workspace

if TYPE_CHECKING:
    from qtool.quantizing.gguf.gptq.sweeping import Sweeping
    from qtool.quantizing.gguf.scaling import Scaling
    from qtool.transforms.rotated import Rotated


@dataclass(frozen=True)
class Measured:
    """What tensors are encoded with."""

    importance: Importance | None
    scales: Scales | None = None
    sweeping: "Sweeping | None" = None
    notes: tuple[str, ...] = ()


def _weighs(request: GgufRequest, plan: GgufPlan) -> bool:
    """Whether a run measures importance, or the sums that a sweep takes."""
    if request.imatrix is not None or not request.recipe.importance:
        return False
    return any(tensor.importance for tensor in plan.tensors)


def measured(
    request: GgufRequest,
    plan: GgufPlan,
    source: GgufSource,
    view: "Rotated | None",
    progress: Progress,
    space: Workspace,
) -> Measured | None:
    """From forward passes, block by block; None where the recipe wants nothing of them. Scales are
    put over the view.

    view: the checkpoint that `source` shows, where that is not as it lies there.
    """
    weighs = _weighs(request, plan)
    if not weighs and not request.recipe.scaling:
        return None
    space.agree({"version of torch or kind of CPU": environment()})
    if not is_gguf(request.source):
        check_length(request.recipe.calibration, request.source)
    scaling, sweeping = _scaling(request, view), _sweeping(request, plan, space)
    on_disk = plan.memory.setting.states_on_disk
    found = _measure(request, source, progress, space, on_disk, view, scaling, sweeping)
    scales, notes = None, []
    if scaling is not None and view is not None:
        scales = Scales(scaling.found, found.calibration)
        view.scales.update(scales.found)
        notes += scaling.notes
    notes += sweeping.notes if sweeping is not None else []
    if request.recipe.calibration.source is None:
        what = " and ".join(["importance"] * weighs + ["scales"] * bool(scales))
        notes.append(
            f"{what} {'were' if scales else 'was'} measured over {', '.join(found.datasets)}, "
            "Python's own documentation; --calibration FILE measures over text like yours"
        )
    return Measured(found if weighs else None, scales, sweeping, tuple(notes))


def _measure(
    request: GgufRequest,
    source: GgufSource,
    progress: Progress,
    space: Workspace,
    states_on_disk: bool,
    view: "Rotated | None",
    scaling: "Scaling | None",
    sweeping: "Sweeping | None",
) -> Importance:
    """Importance from a forward pass, of the checkpoint or of the GGUF file itself; scales and
    codes are found on the way."""
    from qtool.converting.source import opened
    from qtool.quantizing.gguf.measure import measure_importance

    def measure(model: Weights, named: GgufSource) -> Importance:
        if sweeping is not None:
            sweeping.take_names(named)
        return measure_importance(
            model,
            named,
            request.recipe.calibration,
            request.threads,
            progress,
            space,
            states_on_disk,
            scaling,
            sweeping,
            request.device,
        )

    if is_gguf(request.source):
        from qtool.gguf.to_hf.weights import gguf_weights

        with gguf_weights(source) as (weights, named):
            return measure(weights, named)
    from qtool.quality.weights import runnable

    return measure(view or runnable(opened(request.source, request.requantize)), source)


def _scaling(request: GgufRequest, view: "Rotated | None") -> "Scaling | None":
    """What finds scales, where the recipe wants some."""
    if view is None or not request.recipe.scaling:
        return None
    from qtool.quantizing.gguf.scaling import Scaling

    return Scaling.of(request.recipe, view)


def _sweeping(request: GgufRequest, plan: GgufPlan, space: Workspace) -> "Sweeping | None":
    """What finds codes, where the recipe wants GPTQ's."""
    if not request.recipe.sweeps:
        return None
    from qtool.quantizing.gguf.gptq.sweeping import Sweeping

    gram_bytes = plan.memory.setting.gram_bytes
    return Sweeping.of(request.recipe, plan.tensors, space.folder, gram_bytes)
