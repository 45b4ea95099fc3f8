"""What a run into GGUF will need, guessed from shapes: peak resident memory and seconds.

    memory  = the process itself + the header + a piece of weights for each thread
    seconds = weights / rate of the type's encoder, weights read, checked and compared, over the
              cores; and bytes read, written and read back over the rate of the storage

Measuring importance adds a forward pass with one decoder block in memory at a time. The constants
are the only measured numbers: cores of an AMD Zen 4 with AVX-512.
"""

from collections import defaultdict
from collections.abc import Sequence

from qtool.estimate import (
    ACTIVATION_BYTES_PER_CORE,
    FLOPS_PER_CORE,
    PLAIN_PROCESS_BYTES,
    STARTUP_SECONDS,
    STORAGE_BYTES_PER_SECOND,
    TORCH_PROCESS_BYTES,
    Cost,
    usable_cores,
)
from qtool.gguf.kinds import layer_of
from qtool.gguf.planned import PlannedTensor
from qtool.recipe_file import Calibration

# Millions of weights a second on one core: without importance, with.
_ENCODED = {
    "Q4_0": (2100, 360), "Q4_1": (2200, 100), "Q5_0": (2000, 340), "Q5_1": (2200, 100),
    "Q8_0": (2600, 2600), "Q2_K": (225, 98), "Q3_K": (520, 330), "Q4_K": (195, 96),
    "Q5_K": (210, 98), "Q6_K": (325, 320), "IQ2_XXS": (21, 21), "IQ2_XS": (14, 14),
    "IQ3_XXS": (12, 12), "IQ1_S": (57, 57), "IQ4_NL": (190, 180), "IQ3_S": (16, 16),
    "IQ2_S": (27, 27), "IQ4_XS": (190, 180), "IQ1_M": (54, 49), "TQ1_0": (2100, 2100),
    "TQ2_0": (2200, 2200), "MXFP4": (1500, 1500), "NVFP4": (1200, 1200), "Q1_0": (3700, 3700),
    "Q2_0": (1900, 1900),
}  # fmt: skip
_HANDLED = 300e6  # weights a second on one core: to float32, checked, dequantized, compared
_PIECE_BYTES = 3_000_000  # of one thread
_HEADER_COPIES = 2  # in memory


def run_cost(
    tensors: Sequence[PlannedTensor],
    header_bytes: int,
    calibration: Calibration | None,
    active: float = 1.0,
    cores: int | None = None,
) -> Cost:
    """The estimate. calibration: where importance is measured; active: share of the experts that
    a token visits."""
    cores = cores or usable_cores()
    written = sum(tensor.nbytes for tensor in tensors)
    read = sum(tensor.source.nbytes for tensor in tensors)
    seconds = STARTUP_SECONDS[False] + (read + 2 * written) / STORAGE_BYTES_PER_SECOND
    for tensor in tensors:
        work = tensor.parameters / _HANDLED
        if not tensor.copied and tensor.type.name in _ENCODED:
            work += tensor.parameters / (_ENCODED[tensor.type.name][tensor.importance] * 1e6)
        seconds += work / cores
    widest = max((tensor.source.in_features for tensor in tensors), default=0)
    peak = PLAIN_PROCESS_BYTES + _HEADER_COPIES * header_bytes
    peak += cores * max(_PIECE_BYTES, 16 * widest)
    if calibration is None:
        return Cost(peak, round(seconds, 1))
    tokens = calibration.samples * calibration.length
    blocks: dict[int, int] = defaultdict(int)
    flops = 0.0
    hidden = 0
    for tensor in tensors:
        blocks[layer_of(tensor.name)] += 4 * tensor.parameters
        if layer_of(tensor.name) >= 0 and len(tensor.shape) > 1:
            share = active if "_exps" in tensor.name else 1.0
            flops += 2.0 * tokens * share * tensor.parameters
            hidden = max(hidden, min(tensor.shape[-2:]))
    seconds += STARTUP_SECONDS[True] + flops / (FLOPS_PER_CORE * cores)
    seconds += read / STORAGE_BYTES_PER_SECOND
    embedding = blocks.pop(-1, 0) // 2
    streaming = 2 * 4 * tokens * hidden + max(blocks.values(), default=0)
    streaming += ACTIVATION_BYTES_PER_CORE * cores
    return Cost(
        max(peak, TORCH_PROCESS_BYTES + header_bytes + max(embedding, streaming)),
        round(seconds, 1),
    )
