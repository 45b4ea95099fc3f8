"""How far each tensor of a GGUF file is from its source."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from qtool.checkpoints.holes import EMPTY, is_bias, said_torn
from qtool.gguf.pieces import Done, Pieces
from qtool.gguf.planned import PlannedTensor
from qtool.gguf.source import as_floats
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.gguf_types import BY_NAME, FLOATS
from qtool.messages.sentences import FETCH, some
from qtool.messages.summary import OUTPUTS, WEIGHTS, LayerReport
from qtool.planning.gguf.planned import GgufPlan
from qtool.runs import layer_errors
from qtool.runs.zeros import together

if TYPE_CHECKING:
    from qtool.quantizing.gguf.gptq.sweeping import Sweeping

_TYPICAL_ROWS = 32  # of a tensor, by which its typical weight is told


def reports_of(
    plan: GgufPlan, pieces: Pieces, done: Done, sweeping: "Sweeping | None", threads: int
) -> list[LayerReport]:
    """The relative error of every tensor that was encoded, in the order of the file."""

    def report(number: int) -> LayerReport:
        tensor, numbers = plan.tensors[number], pieces.of(number)
        size, lost = math.fsum(done.size[numbers]), math.fsum(done.lost[numbers])
        error = math.sqrt(lost / size) if size else 0.0
        of_outputs = None if sweeping is None else sweeping.error(tensor.name)
        of = WEIGHTS if of_outputs is None else OUTPUTS
        error = error if of_outputs is None else of_outputs
        return LayerReport(tensor.name, tensor.type.name, error, of, _coarseness(tensor, lost))

    encoded = [number for number, tensor in enumerate(plan.tensors) if not tensor.copied]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(report, encoded))


def emptied(plan: GgufPlan, pieces: Pieces, done: Done) -> list[str]:
    """Sentences on matrices of the source that are 0, or have holes; see qtool.runs.zeros."""
    said: dict[str, str] = {}
    for number, tensor in enumerate(plan.tensors):
        source, numbers = tensor.source, pieces.of(number)
        known = source.type in FLOATS or source.type.name in BY_NAME
        if not known or not source.rows or len(stored_shape(source.shape)) < 2:
            continue
        name = some(source.origin) or tensor.name
        if not done.size[numbers].any():
            if not is_bias(tensor.name):
                said[name] = EMPTY
        elif hole := int(done.holes[numbers].sum()):
            said[name] = said_torn(hole, FETCH)
    return together(said)


def _coarseness(tensor: PlannedTensor, lost: float) -> float | None:
    """That of a tensor in blocks, by some of its rows. lost: the sum of all squared errors."""
    source = tensor.source
    if tensor.type.name not in BY_NAME or not source.rows:
        return None
    places = np.linspace(0, source.rows - 1, min(source.rows, _TYPICAL_ROWS)).astype(int).tolist()
    some = as_floats(source, np.concatenate([source.read(row, row + 1) for row in places]), 1)
    mean = lost / (source.rows * source.in_features)
    return layer_errors.coarseness_of_blocks(some, mean, tensor.type)
