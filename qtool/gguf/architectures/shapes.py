"""How large each tensor of an architecture is, told by the settings of config.json.

llama.cpp makes its tensors from the metadata, and refuses a file whose tensors have other shapes:
for a model of width h, inner width f, H heads and K key heads of d elements each

    q [H d, h]   k, v [K d, h]   o [h, H d]   gate, up [f, h]   down [h, f]   norms [h]

so that both directions of conversion can tell before any work.
"""

from collections.abc import Iterable, Mapping
from math import prod

from qtool.checkpoints.hf_config import Config, count, of_block
from qtool.gguf.architectures.modules import Module
from qtool.gguf.architectures.sizes import SIZES

# By how a module's name ends; the longest end that fits counts.
_ENDS: Mapping[str, tuple[str, ...]] = {
    "embed_tokens": ("vocabulary", "width"),
    "embed_in": ("vocabulary", "width"),
    "lm_head": ("vocabulary", "width"),
    "embed_out": ("vocabulary", "width"),
    "norm": ("width",),
    "q_proj": ("heads", "width"),
    "k_proj": ("key heads", "width"),
    "v_proj": ("key heads", "width"),
    "o_proj": ("width", "heads"),
    "q_norm": ("head",),
    "k_norm": ("head",),
    "query_layernorm": ("head",),
    "key_layernorm": ("head",),
    "self_attn.q_layernorm": ("number of heads", "head"),
    "self_attn.k_layernorm": ("number of key heads", "head"),
    "qkv_proj": ("queries, keys, values", "width"),
    "query_key_value": ("three of each head", "width"),
    "attention.dense": ("width", "heads"),
    "dense_h_to_4h": ("inner", "width"),
    "dense_4h_to_h": ("width", "inner"),
    "self_attn.dense": ("width", "heads"),
    "mlp.fc1": ("inner", "width"),
    "mlp.fc2": ("width", "inner"),
    "mlp.c_fc": ("inner", "width"),
    "mlp.c_proj": ("width", "inner"),
    "gate_up_proj": ("gate and up", "width"),
    "gate_proj": ("inner", "width"),
    "up_proj": ("inner", "width"),
    "down_proj": ("width", "inner"),
    "mlp.gate": ("experts", "width"),
    "block_sparse_moe.gate": ("experts", "width"),
    "mlp.router": ("experts", "width"),
    "shared_expert_gate": ("one", "width"),
    "shared_expert.gate_proj": ("inner of the shared expert", "width"),
    "shared_expert.up_proj": ("inner of the shared expert", "width"),
    "shared_expert.down_proj": ("width", "inner of the shared expert"),
    "e_score_correction": ("experts", "one"),
    "shared_experts.gate_proj": ("inner of shared experts", "width"),
    "shared_experts.up_proj": ("inner of shared experts", "width"),
    "shared_experts.down_proj": ("width", "inner of shared experts"),
    "eh_proj": ("width", "two widths"),
    "shared_head.head": ("vocabulary", "width"),
    "experts.gate_proj": ("experts", "inner of experts", "width"),
    "experts.up_proj": ("experts", "inner of experts", "width"),
    "experts.down_proj": ("experts", "width", "inner of experts"),
    "experts.w1": ("experts", "inner", "width"),
    "experts.w3": ("experts", "inner", "width"),
    "experts.w2": ("experts", "width", "inner"),
}


def expected_shape(
    module: Module, config: Config, suffix: str = ".weight", block: int = 0
) -> tuple[int, ...] | None:
    """The shape of a module's GGUF tensor in numpy's order, None where no setting tells.

    `config` is complete (hf_config.complete). A file may leave leading axes of one out, so compare
    what kinds.stored_shape makes of both. SourceError for a setting that counts nothing.
    """
    sizes = module.shape or _by_name(module.name)
    if not sizes or ("vocabulary" in sizes and config.get("vocab_size") is None):
        return None
    # The bias of a matrix has one number for each row; that of a norm, one for each weight.
    if suffix == ".bias" and len(sizes) > 1 and not module.name.endswith("norm"):
        sizes = sizes[:-1]
    own = of_block(config, block) if "{b}" in module.name else config
    return tuple(SIZES[size](own) for size in sizes)


def has_mlp(modules: Iterable[Module]) -> bool:
    """Whether the width of an MLP decides about shapes; where all is experts, it is not said."""
    sizes = [module.shape or _by_name(module.name) for module in modules]
    return any("inner" in one or "gate and up" in one for one in sizes)


def checkpoint_shape(
    module: Module, config: Config, suffix: str = ".weight", block: int = 0
) -> tuple[int, ...] | None:
    """The shape of the checkpoint's tensor, where it is one; None where no setting tells."""
    shape = expected_shape(module, config, suffix, block)
    if shape is None:
        return None
    if module.folded:
        return (prod(shape),)
    if module.padded:
        return (count(config, module.padded), *shape[1:])
    if module.transposed and suffix == ".weight":
        return shape[::-1]
    rows, cut = module.fitted(config).rows, module.fitted(config).cut
    if rows is not None and rows.taken is not None:
        shape = (rows.taken[0], *shape[1:])
    share = 1 if rows is None else rows.share
    if cut is not None and suffix == ".bias":
        shape = (shape[0], shape[1] * share)
    elif cut is None and share > 1:
        shape = (shape[0], shape[1] * share, *shape[2:])
    elif cut is not None:
        matrices, height, width = shape[0], shape[1] * share, shape[2]
        shape = (matrices, width, height) if cut.transposed else (matrices, height, width)
        if cut.matrices:
            shape = (cut.matrices * cut.height, shape[2])
    return (*shape[:-1], 1, shape[-1]) if module.squeezed else shape


def _by_name(name: str) -> tuple[str, ...]:
    ends = [end for end in _ENDS if name.endswith(end)]
    return _ENDS[max(ends, key=len)] if ends else ()
