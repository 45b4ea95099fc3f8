"""The output head, where a recipe quantizes it: its input is what the final norm makes of the
hidden states that the quantized blocks leave.

GPTQ has the Gram matrix of that input. Methods that look no further than each weight, or at scales
of what comes before, round it to nearest.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qtool import methods
from qtool.blockwise.output_errors import output_error
from qtool.calibrating.placed import Passage
from qtool.calibrating.stats import SiteStats, gram_of
from qtool.formats.layer_names import is_head
from qtool.messages.summary import OUTPUTS, WEIGHTS, LayerReport
from qtool.methods import gptq
from qtool.planned import Planned
from qtool.planning.plan import Plan
from qtool.provenance.outcome import Outcome
from qtool.recipe.recipe import Recipe
from qtool.runs.by_rows import nearest, quantize_rows, side_by_side
from qtool.runs.sink import Sink
from qtool.scheme import GroupQuant, Scheme
from qtool.streaming.precision import matmuls_in
from qtool.streaming.skeleton import Skeleton


class _SeenError(Exception):
    """Ends a forward pass before the head is multiplied by."""


def planned_head(plan: Plan) -> Planned | None:
    """The head, if the plan quantizes it."""
    return next((one for one in quantized_outside(plan) if is_head(one.module)), None)


def quantized_outside(plan: Plan) -> list[Planned]:
    """The head, and the embedding, if the plan quantizes them."""
    return [tensor for tensor in plan.by_block.get(None, ()) if tensor.scheme is not None]


def measured(skeleton: Skeleton, passage: Passage, name: str, width: int) -> SiteStats | None:
    """The Gram matrix of the head's input, float32 [width, width]; None where the model has no one
    module that multiplies by the head. passage: its stream is behind the last block.

    name: of the checkpoint's tensor.
    """
    output: object = skeleton.model.get_output_embeddings()
    if not isinstance(output, nn.Linear) or not _is(skeleton, output, name):
        return None
    stream, workers = passage.stream, passage.workers

    def see(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        raise _SeenError(given[0])

    with skeleton.open_head() as head, matmuls_in(passage.precision):
        hook = output.register_forward_pre_hook(see, prepend=True)  # before its weights are read

        def rows_of(number: int) -> torch.Tensor:
            try:
                head(stream.hidden[number])
            except _SeenError as seen:
                rows: torch.Tensor = seen.args[0].detach().reshape(-1, width)
                return rows
            raise AssertionError("a forward pass without its head")

        try:
            rows_of(0)  # the final norm's weights are read once, for all threads
            return gram_of(rows_of, len(stream.hidden), width, workers)
        finally:
            hook.remove()


def _is(skeleton: Skeleton, output: nn.Module, name: str) -> bool:
    path = next((path for path, one in skeleton.model.named_modules() if one is output), None)
    stored = skeleton.stored(f"{path}.weight")
    return any([piece.checkpoint_name for piece in pieces] == [name] for pieces in stored)


def quantize_head(
    planned: Planned,
    seen: SiteStats | None,
    recipe: Recipe,
    sink: Sink,
    passage: Passage,
) -> Outcome:
    """Quantize and write it, or an embedding. seen: from measured(); None rounds it to nearest."""
    scheme, notes = planned.action, list[str]()
    assert isinstance(scheme, Scheme)
    workers = passage.workers
    make: Callable[[NDArray[np.float32], int], GroupQuant]
    rounding = side_by_side(passage.device)
    make = partial(nearest, scheme=scheme, recipe=recipe, rounding=rounding)
    if seen is not None and seen.gram is not None:
        options = gptq.Options.of(recipe.gptq)
        where = f"the input of {planned.name}"
        with methods.named(where):
            given = gptq.factor(seen.gram, options, seen.count, spread=workers.spread)
        notes = [f"{where}: {note}" for note in given.notes]
        make = _swept(given, scheme, options)
    elif recipe.rounding == "gptq" and is_head(planned.module):
        notes = [f"{planned.name}: its input was not measured; rounded to nearest"]
    found = quantize_rows(planned, sink.checkpoint, make, sink.packed, workers.map)
    sink.plain(found.arrays)
    error, of = found.error, WEIGHTS
    if seen is not None and seen.gram is not None:
        error, of = output_error(found.some, found.back, seen), OUTPUTS
    report = LayerReport(planned.name, str(scheme), error, of, found.coarseness)
    return Outcome([report], notes)


def _swept(
    given: gptq.Factor, scheme: Scheme, options: gptq.Options
) -> Callable[[NDArray[np.float32], int], GroupQuant]:
    def make(weight: NDArray[np.float32], _: int) -> GroupQuant:
        return gptq.quantize_with(weight, given=given, scheme=scheme, options=options)

    return make
