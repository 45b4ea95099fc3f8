"""Experts as mlx-lm has them: one tensor for a projection of all experts of a block.

    ...mlp.experts.E.gate_proj.weight          as checkpoints have them, [out, words]
    ...mlp.switch_mlp.gate_proj.weight         [experts, out, words], one expert after another

and so scales and biases; the parent keeps its name (mlp, block_sparse_moe, feed_forward). Mixtral's
w1, w3 and w2 are gate_proj, up_proj and down_proj there, and Nemotron-H's two are fc1 and fc2. An
expert is a part of its stack's bytes, which is all that whoever writes or reads it needs to know.

Weights of convolutions over time are [channels, width, 1] there, and [channels, 1, width] in
checkpoints: the same bytes, and told apart by the shape, as none is 1 wide.

Source: mlx-lm 0.32.2 (models/, switch_layers.py).
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from qtool.formats.mlx_fused import part_of
from qtool.formats.safetensors_header import TensorInfo

# Models whose classes call the stack switch_mlp, by model_type, and what checkpoints call the three
# projections.
_PLAIN = ("gate_proj", "up_proj", "down_proj")
_NUMBERED = ("w1", "w3", "w2")
STACKED: dict[str, tuple[str, str, str]] = {
    **dict.fromkeys(
        ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "kimi_k2", "olmoe", "qwen2_moe", "qwen3_moe"),
        _PLAIN,
    ),
    **dict.fromkeys(("lfm2_moe", "minimax_m2", "mixtral"), _NUMBERED),
}
# The same of a class that is read only, and those whose convolutions lie otherwise and whose other
# tensors are what checkpoints have: of Qwen3-Next and 3.5 norms are not, of Falcon-H1 and Granite 4
# much is not.
_TWO = {"fc1": "up_proj", "fc2": "down_proj"}
_CONVOLVED = frozenset(
    ("falcon_mamba", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h")
)
_CONVOLUTION = re.compile(r".+\.(?:conv_?1d|\w*conv\.conv)\.weight")
_LFM2_PLAIN = re.compile(r"(.+\.feed_forward)\.(\w+)\.(weight|scales|biases)")
_APART = re.compile(r"(.+)\.experts\.(\d{1,6})\.(\w+)((?:\.\w+)?)")
_TOGETHER = re.compile(r"(.+)\.switch_mlp\.(\w+)\.(weight|scales|biases|global_scale)")


def stack_of(name: str) -> tuple[str, int] | None:
    """The stack that an expert's tensor or module belongs to, and the expert; None of no expert."""
    found = _APART.fullmatch(name)
    if found is None:
        return None
    part = dict(zip(_NUMBERED, _PLAIN, strict=True)).get(found[3], found[3])
    return f"{found[1]}.switch_mlp.{part}{found[4]}", int(found[2])


def apart(tensors: Mapping[str, TensorInfo], kind: str) -> dict[str, tuple[str, TensorInfo]]:
    """Each tensor by the name that checkpoints have for it, with the name of what it is stored in:
    stacks as one tensor an expert. kind: model_type."""
    names = dict(zip(_PLAIN, STACKED.get(kind, _PLAIN), strict=True)) | _TWO
    out: dict[str, tuple[str, TensorInfo]] = {}
    for name, info in tensors.items():
        around = _around(name, names) or part_of(name, tensors, kind)
        axes = {"global_scale": 1, "bias": 2}.get(name.rpartition(".")[2], 3)
        if around is None or len(info.shape) != axes or not info.shape[0]:
            own = _of_one(info, kind, names)
            out[own.name] = name, own
            continue
        size = info.nbytes // info.shape[0]
        for expert in range(info.shape[0]):
            part = f"{around[0]}{expert}{around[1]}"
            start = info.start + expert * size
            out[part] = name, TensorInfo(part, info.dtype, info.shape[1:], start, start + size)
    return out


def _around(name: str, names: Mapping[str, str]) -> tuple[str, str] | None:
    found = _TOGETHER.fullmatch(name)
    if found is None:
        return None
    return f"{found[1]}.experts.", f".{names.get(found[2], found[2])}.{found[3]}"


def _of_one(info: TensorInfo, kind: str, names: Mapping[str, str]) -> TensorInfo:
    """A tensor that is no stack, as checkpoints have it; itself where that is the same."""
    if kind == "lfm2_moe" and (found := _LFM2_PLAIN.fullmatch(info.name)) and found[2] in names:
        return replace(info, name=f"{found[1]}.{names[found[2]]}.{found[3]}")
    if kind not in _CONVOLVED or _CONVOLUTION.fullmatch(info.name) is None:
        return info
    if not _is_transposed(info.shape):
        return info
    return replace(info, shape=(info.shape[0], 1, info.shape[1]))


def changed(tensors: Mapping[str, TensorInfo], kind: str) -> str | None:
    """Why tensors as `apart` gives them are not those of a checkpoint, or None."""
    for name, info in tensors.items():
        if _CONVOLUTION.fullmatch(name) is not None and _is_transposed(info.shape):
            return (
                f"{name} is {list(info.shape)}, as mlx-lm saves it: of {kind or 'this model'} it "
                "changes other weights, too, which is not undone here; take the checkpoint itself"
            )
    return None


def _is_transposed(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[1] > 1 == shape[2]
