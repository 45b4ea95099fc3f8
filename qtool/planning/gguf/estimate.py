"""What a run into GGUF will need, guessed from shapes: peak resident memory and seconds.

    memory  = the process itself + the header + a piece of weights for each thread
    seconds = weights / rate of the type's encoder, weights read, checked and compared, over the
              cores; and bytes read, written and read back over the rate of the storage

Measuring importance adds a forward pass with one decoder block in memory at a time; transforms
that scale channels add another, and where they search, the Gram matrices of a block. So does GPTQ's
sweep, and factors, and a matrix for each thread. The constants are the only measured numbers: cores
of an AMD Zen 4 with AVX-512.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qtool.gguf.planned import PlannedTensor
from qtool.gguf_mixtures.kinds import layer_of
from qtool.native.library import default_threads
from qtool.planning import duration
from qtool.planning.budget import Memory, choose
from qtool.planning.duration import (
    FLOPS_PER_CORE,
    STARTUP_SECONDS,
    STORAGE_BYTES_PER_SECOND,
    rotating,
)
from qtool.planning.estimate import (
    PLAIN_PROCESS_BYTES,
    PROVING,
    PROVING_PROCESS_BYTES,
    peak,
    proving,
)
from qtool.planning.handed import PER_LAYER, Handed
from qtool.planning.peak import Peak
from qtool.planning.shapes import (
    Block,
    Input,
    Setting,
    Shapes,
    attention_rows,
    groups,
    is_last,
    micro_batch,
    sensitivity_bytes,
    table_bytes,
    text_bytes,
    whole_batches,
)
from qtool.recipe.file import Calibration
from qtool.recipe.methods import TuneOptions

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
# The same for points of a lattice in GPTQ's sweep, beyond what other types take there.
_CHOSEN = {
    "IQ1_S": 37, "IQ1_M": 19, "IQ2_XXS": 99, "IQ2_XS": 62, "IQ2_S": 69, "IQ3_XXS": 55, "IQ3_S": 65,
}  # fmt: skip
_HANDLED = 300e6  # weights a second on one core: to float32, checked, dequantized, compared
_PIECE_BYTES = 3_000_000  # of one thread
_HEADER_COPIES = 2  # in memory


@dataclass(frozen=True)
class Measuring:
    """What a forward pass is for, beside importance."""

    scales: bool = False  # channels are scaled
    searches: bool = False  # which is searched for
    sweeps: bool = False  # GPTQ chooses codes
    tune: TuneOptions | None = None  # scales are moved afterwards
    compensates: bool = False  # before: matrices compensate for what earlier blocks have lost
    guides: bool = False  # tokens of keys and values count by gradients
    feeds_back: int = 0  # samples whose gradients say how rows compensate for each other

    @property
    def grams(self) -> bool:
        """Whether Gram matrices are measured."""
        return self.searches or self.sweeps


SWEPT_AT_ONCE = 1 << 23  # weights of a matrix
# What reads the same input as a tensor of another name does.
_SAME_INPUT = {
    "attn_k": "attn_q", "attn_v": "attn_q", "ffn_gate": "ffn_up", "ffn_gate_exps": "ffn_up_exps",
}  # fmt: skip


def shapes_of(
    tensors: Sequence[PlannedTensor],
    calibration: Calibration,
    active: float = 1.0,
    measuring: Measuring = Measuring(),
) -> Shapes:
    """What the memory of measuring importance depends on."""
    inside: dict[int, list[PlannedTensor]] = defaultdict(list)
    for tensor in tensors:
        inside[layer_of(tensor.name)].append(tensor)
    outer = [tensor for tensor in inside.pop(-1, []) if len(tensor.shape) == 2]
    given = max((t.shape[-1] for t in outer if PER_LAYER in t.name), default=0)
    hidden = max((t.shape[-1] for t in outer if PER_LAYER not in t.name), default=0)
    kept = max((t.shape[0] for t in tensors if t.name.endswith("attn_k.weight")), default=0)
    blocks = set()
    for group in inside.values():
        shared = [t for t in group if len(t.shape) == 2]
        experts = [t for t in group if len(t.shape) == 3]
        # Gate and up read one input, down another: the widest and the narrowest of each.
        routed = {t.shape[-1]: Input(t.shape[-1], 0, active * t.shape[0]) for t in experts}
        most = max(t.parameters for t in group)
        if measuring.sweeps and not measuring.searches:
            most = SWEPT_AT_ONCE
        inputs = (
            _searched(shared, experts, active, most) if measuring.grams else tuple(routed.values())
        )
        numbers = [tensor.parameters for tensor in group]
        widest = max((max(t.shape) for t in shared), default=0)
        alike: dict[str, int] = defaultdict(int)
        for tensor in (*shared, *experts):
            kind = tensor.name.split(".")[-2]
            alike[_SAME_INPUT.get(kind, kind)] += tensor.parameters
        folded = max(alike.values(), default=0)
        attending = attention_rows((t.name.removesuffix(".weight"), t.shape) for t in shared)
        made = tuple(sorted((t.shape[0] for t in shared if t.swept), reverse=True))
        last = [t for t in experts if t.swept and is_last(t.name)]
        states = active * sum(t.shape[0] * t.shape[1] for t in last)
        blocks.add(
            Block(4 * sum(numbers), max(numbers), widest, inputs, folded, attending, made, states)
        )
    return Shapes(
        calibrates=True,
        tokens=calibration.samples * calibration.length,
        length=calibration.length,
        batch=micro_batch(calibration.samples, calibration.length),
        hidden=hidden,
        vocabulary=max((tensor.shape[0] for tensor in outer), default=0),
        outside=0,  # written later, in pieces
        quantized=0,
        blocks=tuple(blocks),
        grams=measuring.grams,
        chained=measuring.searches,  # scales are shared by all that read a norm
        solves=measuring.sweeps,
        tunes=0 if measuring.tune is None else measuring.tune.batch,
        compensates=measuring.compensates,
        guides=measuring.guides,
        fed_back=whole_batches(measuring.feeds_back, calibration.samples, calibration.length),
        text=text_bytes(calibration),
        tables=table_bytes(calibration),
        # Models that have such a table share keys and values, of two kinds of attention.
        handed=Handed(columns=4 * kept if given else 0, given=given),
        count=len(inside),
        sensitivities=sensitivity_bytes(tensor.shape for tensor in tensors),
    )


def _searched(
    shared: Sequence[PlannedTensor], experts: Sequence[PlannedTensor], active: float, most: int
) -> tuple[Input, ...]:
    """Every input of a block whose Gram matrix is measured, the widest first. most: weights of a
    matrix that are worked on at once."""
    found: dict[str, Input] = {}
    for tensor in shared:
        kind = tensor.name.split(".")[-2]
        kind = _SAME_INPUT.get(kind, kind)
        known = found.get(kind, Input(tensor.shape[-1], 0))
        found[kind] = replace(
            known,
            largest=max(min(tensor.parameters, most), known.largest),
            rows=max(tensor.shape[0] if tensor.swept else 0, known.rows),
            fed=max(tensor.parameters if tensor.swept else 0, known.fed),
        )
    apart = [t for t in experts if not t.name.endswith("ffn_gate_exps.weight")]
    each = [
        Input(
            t.shape[-1],
            min(t.parameters // t.shape[0], most),
            active,
            fed=t.parameters // t.shape[0] if t.swept and is_last(t.name) else 0,
        )
        for t in apart
        for _ in range(t.shape[0])
    ]
    return tuple(sorted([*found.values(), *each], key=lambda one: -one.width))


def peak_of(
    tensors: Sequence[PlannedTensor],
    header_bytes: int,
    shapes: Shapes | None,
    setting: Setting,
    rotates: bool = False,
) -> Peak:
    """Resident memory at its highest, and what it is for. shapes: where importance is measured."""
    widest = max((tensor.source.in_features for tensor in tensors), default=0)
    pieces = _HEADER_COPIES * header_bytes + setting.threads * max(_PIECE_BYTES, 16 * widest)
    process = PROVING_PROCESS_BYTES if rotates else PLAIN_PROCESS_BYTES
    encoding = Peak(process + pieces, "a piece of weights for each thread")
    if rotates:
        proof = process + header_bytes + proving(shapes_of(tensors, Calibration()))
        rotating = Peak(proof, PROVING)
        encoding = max(encoding, rotating, key=lambda one: one.nbytes)
    if shapes is None:
        return encoding
    measuring = peak(shapes, setting)
    most = Peak(measuring.nbytes + header_bytes, measuring.of)
    return max(encoding, most, key=lambda one: one.nbytes)


def run_cost(
    tensors: Sequence[PlannedTensor],
    header_bytes: int,
    calibration: Calibration | None,
    active: float = 1.0,
    threads: int | None = None,
    max_ram: int | None = None,
    measuring: Measuring = Measuring(),
    rotates: bool = False,
) -> tuple[Memory, float]:
    """Memory, with the setting that keeps it, and seconds. calibration: where a forward pass is
    made; active: share of the experts that a token visits; max_ram: bytes that a run may take,
    UnsupportedError where it cannot do with them; rotates: whether the network is, and that
    proved."""
    shapes = None if calibration is None else shapes_of(tensors, calibration, active, measuring)
    memory = choose(
        shapes,
        threads or default_threads(),
        max_ram,
        lambda setting: peak_of(tensors, header_bytes, shapes, setting, rotates),
    )
    cores = memory.setting.threads
    written = sum(tensor.nbytes for tensor in tensors)
    read = sum(tensor.source.nbytes for tensor in tensors)
    with_torch = rotates or shapes is not None
    seconds = STARTUP_SECONDS[with_torch] + (read + 2 * written) / STORAGE_BYTES_PER_SECOND
    for tensor in tensors:
        work = tensor.parameters / _HANDLED
        if not tensor.copied and tensor.type.name in _ENCODED:
            work += tensor.parameters / (_ENCODED[tensor.type.name][tensor.importance] * 1e6)
        if tensor.swept and tensor.type.name in _CHOSEN:
            work += tensor.parameters / (_CHOSEN[tensor.type.name] * 1e6)
        seconds += work / cores
    if rotates:
        seconds += rotating(sum(tensor.parameters for tensor in tensors))
    if shapes is None:
        return memory, round(seconds, 1)
    flops = 0.0
    passes = 1.0 + measuring.scales
    if measuring.sweeps:  # each group of inputs takes one, and so do those that are not swept
        if not measuring.searches:  # which measures for the sweep, too
            each = (groups(shapes, block, memory.setting) for block in shapes.blocks)
            passes += max(each, default=1)
        passes += any("_exps" in tensor.name for tensor in tensors)
    if measuring.compensates:
        passes += duration.COMPARING_PASSES
    seconds += duration.beside(shapes, passes) / cores
    if measuring.guides:
        passes += duration.GUIDED_PASSES
    for tensor in tensors:
        if tensor.swept and layer_of(tensor.name) < 0:
            flops += duration.sweeping_head(shapes, tensor.shape)
        elif layer_of(tensor.name) >= 0 and len(tensor.shape) > 1:
            share = active if "_exps" in tensor.name else 1.0
            width, kind = tensor.shape[-1], tensor.name.split(".")[-2]
            experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
            first = _SAME_INPUT.get(kind, kind) == kind  # of those that read one input
            flops += 2.0 * passes * shapes.tokens * share * tensor.parameters
            if experts > 1:
                met, columns = shapes.tokens * share * experts, width + tensor.shape[1]
                seconds += duration.beside_experts(met, columns, passes) / cores
            if measuring.grams and first:  # X'X, of which half is computed
                flops += experts * shapes.tokens * share * width**2
            if measuring.tune is not None:
                seconds += duration.tuning(measuring.tune, shapes, share, tensor.parameters, cores)
            if tensor.swept:
                flops += 2.0 * width * tensor.parameters + 2.0 * first * experts * width**3
                if len(tensor.shape) == 2:
                    flops += duration.fed_back(shapes, tensor.shape[0], width)
                elif is_last(tensor.name):
                    flops += duration.fed_back_experts(
                        shapes, share * experts, experts, tensor.shape[1], width
                    )
    if shapes.fed_back:
        shares = (
            tensor.parameters * (active if "_exps" in tensor.name else 1.0)
            for tensor in tensors
            if len(tensor.shape) > 1
        )
        flops += duration.feeding_back(shapes, sum(shares))
    seconds += flops / (FLOPS_PER_CORE * cores)
    seconds += read / STORAGE_BYTES_PER_SECOND
    if memory.setting.states_on_disk:
        layers = len({layer_of(tensor.name) for tensor in tensors})
        seconds += 4 * shapes.states * layers / STORAGE_BYTES_PER_SECOND
    return memory, round(seconds, 1)
