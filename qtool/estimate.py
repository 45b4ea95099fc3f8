"""What a run will need, guessed from shapes: peak resident memory and seconds.

    memory  = the process itself
            + max(embedding as stored,
                  hidden states in and out + one block as float32 + its Gram matrices + a solve)
    seconds = tokens * flops of the forward passes and Gram matrices, flops of the solves,
              and bytes read and written, each over a measured rate

Rounding to nearest holds one matrix at a time and needs no forward pass. The constants below are
the only measured numbers.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qtool.planned import Planned
    from qtool.recipe import Recipe

# Resident bytes of the process before any tensor is read.
PLAIN_PROCESS_BYTES = 55_000_000
TORCH_PROCESS_BYTES = 480_000_000
# Temporary bytes per weight while a matrix is rounded and packed (float32 copies, codes, words).
ROUNDING_BYTES_PER_WEIGHT = 20
# Activations of the micro-batches under way in one block, per core.
ACTIVATION_BYTES_PER_CORE = 48_000_000
# Rates of one core: matrix products, element-wise rounding (weights per second).
FLOPS_PER_CORE = 8.5e10
ROUNDED_PER_CORE = 1.5e8
STORAGE_BYTES_PER_SECOND = 4.0e8
STARTUP_SECONDS = {False: 0.3, True: 4.0}
# What a search over clipped ranges costs, in roundings of the matrix.
CLIP_TRIALS = 7
# The part of X'X that is computed: strips on and above the diagonal.
GRAM_SHARE = 0.55
# AWQ's search looks at this many rows of a site, for so many exponents of the weights each, and
# compares so many finalists exactly.
AWQ_ROWS, AWQ_EXPONENTS, AWQ_FINALISTS = 256, 5, 5


@dataclass(frozen=True)
class Cost:
    """An estimate."""

    peak_rss_bytes: int
    seconds: float


def usable_cores() -> int:
    """The cores this process may run on, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_cost(
    recipe: "Recipe", tensors: "Sequence[Planned]", active: float = 1.0, cores: int | None = None
) -> Cost:
    """The estimate for a run over `tensors` on `cores` cores (default: as many as a run uses).

    `active` is the share of a block's experts that a token visits.
    """
    cores = cores or usable_cores()
    written = sum(tensor.nbytes for tensor in tensors)
    read = sum(tensor.parameters for tensor in tensors) * 2
    seconds = STARTUP_SECONDS[recipe.calibrates] + (read + written) / STORAGE_BYTES_PER_SECOND
    weights = sum(tensor.parameters for tensor in tensors if tensor.scheme is not None)
    widest = max((t.parameters for t in tensors if t.scheme is not None), default=0)
    trials = CLIP_TRIALS if recipe.clips else 1
    seconds += trials * weights / (ROUNDED_PER_CORE * cores)
    if not recipe.calibrates:
        largest = max((tensor.parameters * 4 for tensor in tensors), default=0)
        peak = PLAIN_PROCESS_BYTES + max(widest * ROUNDING_BYTES_PER_WEIGHT, largest)
        return Cost(peak, round(seconds, 1))

    from qtool import structure  # not where only the constants above are wanted

    block_bytes: dict[int, int] = defaultdict(int)
    grams: dict[int, dict[str, int]] = defaultdict(dict)  # block -> input site -> in_features
    flops = 0.0
    tokens = recipe.calibration.samples * recipe.calibration.length
    hidden = 0
    for tensor in tensors:
        if tensor.block is None:
            continue
        block_bytes[tensor.block] += 4 * tensor.parameters
        if tensor.scheme is None or len(tensor.shape) != 2:
            continue
        out, width = tensor.shape
        seen = tokens * (active if structure.expert_of(tensor.name) is not None else 1.0)
        site = structure.input_site(tensor.module)
        if site not in grams[tensor.block]:
            grams[tensor.block][site] = width
            flops += GRAM_SHARE * 2.0 * seen * width * width
            if recipe.transform_chain:
                flops += AWQ_FINALISTS * 2.0 * AWQ_ROWS * width * width
                searched = recipe.awq.grid * AWQ_EXPONENTS * AWQ_ROWS * width
                seconds += searched / (ROUNDED_PER_CORE * cores)
            if recipe.rounding == "gptq":
                flops += 2.0 * width**3
        flops += 2 * 2.0 * seen * out * width  # two forward passes
        if recipe.rounding == "gptq":
            flops += 2.0 * out * width * width
        hidden = max(hidden, min(tensor.shape))
    embedding = max(
        (t.parameters * 2 for t in tensors if t.block is None and len(t.shape) == 2), default=0
    )
    matrices = max((sum(4 * w * w for w in sites.values()) for sites in grams.values()), default=0)
    solve = 0
    if recipe.rounding == "gptq":
        solve = max((3 * 4 * w * w for sites in grams.values() for w in sites.values()), default=0)
    streaming = (
        2 * 4 * tokens * hidden
        + max(block_bytes.values(), default=0)
        + matrices
        + solve
        + widest * ROUNDING_BYTES_PER_WEIGHT
        + ACTIVATION_BYTES_PER_CORE * cores
    )
    seconds += flops / (FLOPS_PER_CORE * cores)
    return Cost(TORCH_PROCESS_BYTES + max(embedding, streaming), round(seconds, 1))
