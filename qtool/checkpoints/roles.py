"""What each tensor of a checkpoint is: a linear layer of a decoder block, or why it is not.

A float matrix of a block that is called `*.weight` is a linear layer [out, in] unless it is a
router or an embedding; an unknown architecture is read the same way.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from qtool.checkpoints.structure import AHEAD, BlockStack
from qtool.formats.layer_names import is_head, number_of
from qtool.formats.safetensors_file import FLOAT_DTYPES, TensorInfo

_ROUTERS = ("gate", "router", "shared_expert_gate")
_GROUPED = {"wo_a", "o_a_proj"}  # DeepSeek V4's first half of an output projection
_CHOOSING = {"indexer", "compressor"}  # of sparse attention
_MOST_EXPERTS = 1024
LEAST_EXPERT_WIDTH = 16  # of a 3-D tensor's matrices; the kernels of a convolution are narrower
# As compressed-tensors stores them, below the layer: `q_proj.u_output.weight`.
_ROTATIONS = re.compile(r".*_proj\.\w+_(?:input|output)\.weight")
_BUFFERS = ("inv_freq", "masked_bias", "position_ids", "causal_mask")

FUSED_EXPERTS = "experts fused in one tensor, which are not taken apart for this format"
LEFT_FUSED = "experts fused in one tensor, of which the recipe quantizes none"
NO_LINEAR = "a parameter that is no linear layer's weight"
OUTSIDE = "outside the decoder blocks"


@dataclass(frozen=True)
class Role:
    """What one tensor is: a linear layer of a block, or the reason why it is not."""

    block: int | None
    reason: str | None  # None: a linear layer
    # A matrix, or experts, of multi-token prediction, which the model class does not run.
    mtp: bool = False


def roles_of(tensors: Mapping[str, TensorInfo], blocks: BlockStack) -> dict[str, Role]:
    """What each of a checkpoint's tensors is."""
    # Modules that have an `experts` child.
    parents = frozenset(name.split(".experts.", 1)[0] for name in tensors if ".experts." in name)
    return {name: _role(name, info, blocks, parents) for name, info in tensors.items()}


def _role(name: str, info: TensorInfo, blocks: BlockStack, expert_parents: frozenset[str]) -> Role:
    start = blocks.prefix + "."
    block = number_of(name[len(start) :].split(".", 1)[0]) if name.startswith(start) else None
    mtp = len(info.shape) > 1
    if block is None:
        reason = outside_reason(name)
        return Role(None, reason, mtp and reason == OUTSIDE and bool(AHEAD.search(name)))
    if block >= blocks.count:
        beyond = f"block {block} is beyond the {blocks.count} that the model class runs"
        return Role(None, f"{beyond} (multi-token prediction or the like)", mtp)
    return Role(block, _inside(name, info, expert_parents))


def is_rotation(name: str) -> bool:
    """Whether a tensor is a rotation that an engine computes with, by its name."""
    return _ROTATIONS.fullmatch(name) is not None


def outside_reason(name: str) -> str:
    """What a tensor outside of the blocks is, by its name."""
    module = name.rsplit(".", 1)[0]
    last = module.rsplit(".", 1)[-1]
    if name.endswith(".weight") and is_head(module):
        return "output head"
    if "norm" in last or last.startswith("ln_"):
        return "norm"
    if "embed" in last or last in ("wte", "wpe"):
        return "embedding"
    if name.endswith(_BUFFERS):
        return "buffer"
    return OUTSIDE


def _inside(name: str, info: TensorInfo, expert_parents: frozenset[str]) -> str | None:
    module, _, kind = name.rpartition(".")
    parts = module.split(".")
    last = parts[-1]
    if info.dtype not in FLOAT_DTYPES:
        return "buffer" if info.dtype in ("BOOL", "U8") else f"{info.dtype} values, not float"
    if name.endswith(_BUFFERS):
        return "buffer"
    wide = kind == "weight" and min(info.shape[1:], default=0) >= LEAST_EXPERT_WIDTH
    if len(info.shape) == 3 and ("experts" in name or wide):
        return FUSED_EXPERTS
    if len(info.shape) != 2:
        if kind == "bias":
            return "bias" if len(info.shape) == 1 else "buffer"
        if "norm" in last or last.startswith("ln"):
            return "norm"
        return "vector" if len(info.shape) < 2 else f"{len(info.shape)}-D, not a matrix"
    if is_rotation(name):
        return "a rotation of a layer's inputs or outputs"
    if kind != "weight":
        # DBRX has all experts of a block in one matrix [experts * inner, hidden].
        wide = min(info.shape) >= LEAST_EXPERT_WIDTH and not kind.endswith("bias")
        return FUSED_EXPERTS if wide and "experts" in parts else NO_LINEAR
    if "norm" in last:
        return "norm"
    if "embed" in last or any(part.endswith("embedding") for part in parts):
        return "embedding"
    if _is_router(parts, info.shape, expert_parents):
        return "router: a few numbers that decide everything"
    if not _CHOOSING.isdisjoint(parts):
        return "chooses, or sums up, what attention reads: small, and engines have it as it is"
    if last in _GROUPED:
        return "multiplied by groups of its rows, in a way that no quantized layer is"
    if "altup" in parts or any(part.endswith("hyper_connection") for part in parts):
        return "mixes streams of hidden states: a few numbers that decide much"
    return None


def _is_router(parts: list[str], shape: tuple[int, ...], expert_parents: frozenset[str]) -> bool:
    if "router" in parts:
        return True
    # Beside experts it may be a module around its matrix: HunYuan has mlp.gate.wg.
    if any(p in _ROUTERS and ".".join(parts[:i]) in expert_parents for i, p in enumerate(parts)):
        return True
    return parts[-1] in _ROUTERS and shape[0] <= _MOST_EXPERTS and 2 * shape[0] <= shape[1]
