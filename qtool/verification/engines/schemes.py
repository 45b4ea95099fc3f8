"""Which weights and inputs of compressed-tensors vLLM and SGLang multiply, and what they round.

    vLLM    float-quantized  8 bits a tensor, row or block of 128x128: inputs as they are; dynamic;
                             or static with one scale for all, not with blocks
            mxfp8-quantized  groups of 32, e8m0 scales      mxfp4-pack-quantized  groups of 32
            nvfp4-pack-quantized    groups of 16: inputs as they are, or stored alike
            int-quantized    8 bits a tensor or row: inputs of 8 bits, static with one scale for
                             all, or dynamic with one a token; 4 bits a row or group: dynamic, token
            pack-quantized   a row or group: inputs as they are, or symmetric, of 4 or 8 bits,
                             dynamic with one scale a token or group (humming)
    SGLang  float-quantized  with rounded inputs as vLLM; without, a tensor or row, not in experts
            nvfp4-pack-quantized    as vLLM
            int-quantized    8 bits on both sides, as vLLM; not in experts
            pack-quantized   a row or group of 32, 64 or 128, inputs as they are: 4 and 8 bits,
                             of which those of 4 may have zeros, but in experts; of experts also
                             4 bits, symmetric, with dynamic inputs of 8 bits

No others: not SmoothQuant's dynamic scale for all tokens (O2), nor FP8 in groups of a row. Of FP8
in other blocks, only Triton's kernels know: vLLM takes them on AMD alone, SGLang of its format fp8
where a block is not 128 wide, and else where it has nothing faster. NVFP4 on both sides SGLang
multiplies on Blackwell alone, elsewhere by inputs as they are (0.5.22 and later).

Zeros of experts SGLang unpacks in AWQ's order, in which compressed-tensors does not have them.

Sources: vLLM 0.33 (compressed_tensors/compressed_tensors.py, compressed_tensors_moe, schemes,
kernels/linear/scaled_mm), SGLang 0.5.23 (quantization/compressed_tensors/compressed_tensors.py,
schemes; quantization/fp8_utils.py, marlin_utils.py; the kernels that gptq_marlin.cuh is made for).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MATRIX = ("tensor", "channel")
_RUNS = ("channel", "group")
_BLOCKS = ("tensor", "channel", "block")
BLOCK = (128, 128)  # rows and columns
# Of which SGLang reads input_activations, and knows floats.
_READ = (
    "naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "pack-quantized",
)  # fmt: skip
_MARLIN = (-1, 32, 64, 128)  # group sizes
_FLOATS = "FP8 a tensor, row or block of both"
_STATIC = "static inputs have one scale for all, and go with weights a tensor or row"
_INT8 = "inputs of 8 bits, static with one scale for all or dynamic with one a token, do, and "


@dataclass(frozen=True)
class Numbers:
    """Weights or inputs, as compressed-tensors completes what a config says of them."""

    kind: str  # int or float
    bits: int
    strategy: str
    size: int  # of a group, or rows of a block; -1: neither
    dynamic: bool
    symmetric: bool
    powers: bool  # scales are powers of two (e8m0)
    columns: int = -1  # of a block

    @property
    def nvfp4(self) -> bool:
        """Groups of 16 with scales in FP8, and one for all."""
        wanted = ("float", 4, "tensor_group", 16, True)
        return (self.kind, self.bits, self.strategy, self.size, self.symmetric) == wanted

    @property
    def mxfp(self) -> bool:
        """MXFP4 or MXFP8."""
        groups = (self.kind, self.strategy, self.size, self.symmetric)
        wide = self.bits == 4 or (self.bits == 8 and self.powers)
        return groups == ("float", "group", 32, True) and wide

    @property
    def name(self) -> str:
        """Such as 8-bit float."""
        return f"{self.bits}-bit" + (" float" if self.kind == "float" else "")

    @property
    def run(self) -> str:
        """What shares a scale."""
        if self.kind == "int" or self.size < 0:
            return self.strategy
        if self.strategy == "block":
            return f"block of {self.size}x{self.columns}"
        return f"group of {self.size}"


@dataclass(frozen=True)
class Pair:
    """What a group of a config multiplies."""

    weights: Numbers
    inputs: Numbers | None  # None: as they are
    layout: str  # pack-quantized, ...
    expert: bool = False

    def __str__(self) -> str:
        text = f"{self.weights.name} weights per {self.weights.run}"
        if self.inputs is None:
            return f"{text} with inputs as they are"
        when = "dynamic" if self.inputs.dynamic else "static"
        return f"{text} with {when} {self.inputs.name} inputs per {self.inputs.run}"


def pair_of(group: Mapping[str, Any], layout: str, expert: bool = False) -> Pair | None:
    """A group of a config; None where it does not say what its weights are."""
    weights = _numbers(group.get("weights"))
    if weights is None:
        return None
    return Pair(weights, _numbers(group.get("input_activations")), layout, expert)


def _numbers(arguments: object) -> Numbers | None:
    if not isinstance(arguments, Mapping):
        return None
    bits, size, columns = arguments.get("num_bits", 8), arguments.get("group_size"), -1
    block = arguments.get("block_structure")
    strategy = str(arguments.get("strategy") or "").lower()
    if not strategy:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "block" and isinstance(block, list) and len(block) == 2:
        size, columns = block
    elif strategy not in ("group", "tensor_group"):
        size = -1
    return Numbers(
        kind=str(arguments.get("type") or "int").lower(),
        bits=bits if type(bits) is int else 0,
        strategy=strategy,
        size=size if type(size) is int else -1,
        dynamic=bool(arguments.get("dynamic")),
        symmetric=arguments.get("symmetric", True) is not False,
        powers=str(arguments.get("scale_dtype")) == "torch.uint8",
        columns=columns if type(columns) is int else -1,
    )


def refused(pair: Pair, engine: str) -> str | None:
    """Why vLLM or SGLang has no kernel, from a verb on; None where it has one."""
    known = _vllm(pair) if engine == "vllm" else _sglang(pair)
    return None if known is None else f"have no kernel; {known}"


def _vllm(pair: Pair) -> str | None:
    """What has a kernel instead; None where this has."""
    weights, inputs, expert = pair.weights, pair.inputs, pair.expert
    if weights.nvfp4:
        fits = inputs is None or inputs.nvfp4
        return None if fits else "NVFP4 weights go with inputs in NVFP4, or as they are"
    if weights.mxfp:
        return None
    if weights.kind == "float":
        if inputs is None and expert:
            return f"of experts, {_FLOATS} has"
        return _fp8(pair)
    if inputs is None:
        fits = pair.layout == "pack-quantized" and weights.strategy in _RUNS
        return None if fits else "pack-quantized, with a scale a row or group, has"
    if inputs.kind == "float":
        return None  # some GPUs have one
    if expert or pair.layout != "pack-quantized":
        return _integers(pair, expert)
    fits = (
        weights.strategy in _RUNS
        and inputs.bits in (4, 8)
        and inputs.strategy in ("token", "group")
        and inputs.dynamic
        and inputs.symmetric
    )
    known = "symmetric inputs of 4 or 8 bits, dynamic, with a scale a token or group, do"
    return None if fits else known


def other_block(rows: int, columns: int, triton: bool = False) -> str | None:
    """What has a kernel instead of FP8 in such blocks; None where they have.

    triton: whether blocks of another width than 128 are left to Triton (SGLang's format fp8)."""
    if (rows, columns) == BLOCK or (triton and columns != BLOCK[1]):
        return None
    return f"FP8 in blocks of {BLOCK[0]}x{BLOCK[1]} does"


def _fp8(pair: Pair, more: str = ", mxfp4 and mxfp8") -> str | None:
    """Both engines' rule of 8-bit floats. more: what else one of them has."""
    weights, inputs = pair.weights, pair.inputs
    if weights.columns > 0 and (known := other_block(weights.size, weights.columns)):
        return known
    if weights.bits != 8 or weights.strategy not in _BLOCKS or not weights.symmetric:
        return f"FP8 with a scale a tensor, row or block, and nvfp4 in groups of 16{more} do"
    if inputs is None or inputs.dynamic or inputs.kind != "float":
        return None
    fits = inputs.symmetric and inputs.strategy == "tensor" and weights.strategy != "block"
    return None if fits else _STATIC


def _integers(pair: Pair, expert: bool = False) -> str | None:
    """vLLM's rule of integers on both sides that are not packed."""
    weights, inputs = pair.weights, pair.inputs
    assert inputs is not None
    given = (inputs.bits, inputs.strategy, inputs.dynamic)
    if weights.bits == 4:
        fits = weights.strategy in _RUNS and given == (8, "token", True)
        known = "inputs of 8 bits, dynamic, with a scale a token, do, and weights a scale a group"
    else:
        wanted = [(8, "token", True)] + ([] if expert else [(8, "tensor", False)])
        fits = weights.bits == 8 and weights.strategy in _MATRIX and given in wanted
        known = f"{_INT8}8-bit weights with a scale a row"
        if expert:
            known = "of experts, 8 bits with a scale a row and dynamic inputs of one a token do"
    return None if fits and weights.symmetric else known


def _sglang(pair: Pair) -> str | None:
    """The same for SGLang."""
    weights = pair.weights
    inputs = pair.inputs if pair.layout in _READ else None
    if weights.kind == "float":
        return _sglang_floats(pair, inputs)
    if inputs is None:
        return _sglang_packed(pair)
    if pair.layout == "pack-quantized":
        rounded = inputs.bits == 8 and inputs.dynamic
        fits = pair.expert and weights.bits == 4 and weights.symmetric and rounded
        known = "packed weights go with inputs as they are"
        return (
            None if fits else f"{known}, of experts symmetric ones of 4 bits also with 8-bit ones"
        )
    if pair.expert:
        return "integers on both sides are not for its experts on GPUs; FP8 is"
    fits = _integers(pair) is None and weights.bits == 8
    return None if fits else f"{_INT8}8-bit weights with a scale a row"


def _sglang_floats(pair: Pair, inputs: Numbers | None) -> str | None:
    weights = pair.weights
    if weights.nvfp4 and pair.layout in _READ:
        fits = inputs is None or inputs.nvfp4
        return None if fits else "NVFP4 weights go with inputs in NVFP4, or as they are"
    if weights.mxfp:
        return f"NVFP4 does, and {_FLOATS}, weights and inputs"
    if inputs is not None:
        return _fp8(pair, "")
    if pair.expert:
        return f"of experts without rounded inputs NVFP4 has, and {_FLOATS}, weights and inputs"
    fits = pair.layout in _READ and weights.strategy in _MATRIX and weights.symmetric
    return None if fits else "without rounded inputs, FP8 a tensor or row, and NVFP4, do"


def _sglang_packed(pair: Pair) -> str | None:
    """Integers that are multiplied by inputs as they are."""
    weights = pair.weights
    if pair.layout != "pack-quantized" or weights.bits not in (4, 8):
        return "without rounded inputs, int4 and int8 in pack-quantized do"
    if weights.strategy not in _RUNS or weights.size not in _MARLIN:
        return "a scale a row, or for groups of 32, 64 or 128, has"
    if weights.symmetric or (weights.bits == 4 and not pair.expert):
        return None
    return "with zero points int4 has, but in experts"


def otherwise(pair: Pair, engine: str) -> str | None:
    """What vLLM or SGLang does to inputs of what it loads, where the config says something else."""
    weights, inputs = pair.weights, pair.inputs
    if weights.kind == "int":
        if inputs is None or pair.layout != "pack-quantized":
            return None
        if engine == "sglang":
            return "inputs of experts are rounded to FP8, by a kernel for Hopper and later"
        return "the humming kernels alone multiply such inputs, a package of their own"
    if weights.mxfp and inputs is None and engine == "vllm":
        return (
            f"inputs are rounded to MXFP{weights.bits} too where the GPU multiplies it (Blackwell)"
        )
    if weights.bits != 8 or weights.strategy not in _BLOCKS or inputs is None:
        return None
    if not inputs.dynamic or inputs.kind != "float":
        return None
    wanted = ("group", weights.size) if weights.strategy == "block" else ("token", -1)
    if (inputs.strategy, inputs.size) == wanted:
        return None
    runs = f"in groups of {weights.size}" if weights.strategy == "block" else "token by token"
    return f"inputs are rounded {runs}, though the config says per {inputs.run}"
