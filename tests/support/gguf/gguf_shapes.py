"""Models that are all header: the metadata and the shapes that the choice of types looks at.

tests/oracle/gguf_types.py writes them as files for llama-quantize; the tests plan them as they are.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool.formats.gguf_values import Kind, Value, array, f32, string, u32
from qtool.gguf.architectures import TABLE
from qtool.gguf.architectures.shapes import expected_shape
from qtool.gguf.from_hf.source import gguf_names
from qtool.gguf.source import GgufSource, SourceTensor
from qtool.gguf_types import F16, F32, BlockType


def unread(first: int, last: int) -> NDArray[np.uint8]:
    """Stands where data would be read."""
    raise AssertionError(f"rows {first} to {last} are read, where headers are enough")


def tensor(name: str, *shape: int, type_: BlockType | None = None) -> SourceTensor:
    """A matrix of F16, or a vector of F32."""
    return SourceTensor(name, shape, type_ or (F16 if len(shape) > 1 else F32), unread)


def source(architecture: str, tensors: list[SourceTensor], **counts: int) -> GgufSource:
    """A source with the metadata that llama.cpp needs to load its header, and `counts`."""
    usual = {
        "context_length": 128, "embedding_length": 64, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 4, "block_count": 4, "vocab_size": 64,
    }  # fmt: skip
    numbers = {**usual, **{key.replace("__", "."): value for key, value in counts.items()}}
    metadata = {"general.architecture": string(architecture)}
    metadata |= {f"{architecture}.{key}": u32(value) for key, value in numbers.items()}
    for norm in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        metadata[f"{architecture}.attention.{norm}"] = f32(1e-5)
    return GgufSource(Path("model.gguf"), metadata, tuple(tensors))


def with_metadata(model: GgufSource, more: dict[str, Value]) -> GgufSource:
    """The model with more keys, or other values."""
    return replace(model, metadata={**model.metadata, **more})


def dense(
    architecture: str,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    heads_kv: int,
    *,
    tied: bool = False,
    fused: bool = False,
    more: tuple[SourceTensor, ...] = (),
) -> GgufSource:
    """A decoder of the usual kind; `fused` has attn_qkv, and gate and up in one."""
    kv = hidden * heads_kv // heads
    found = [tensor("token_embd.weight", 96, hidden), tensor("output_norm.weight", hidden)]
    found += [] if tied else [tensor("output.weight", 96, hidden)]
    for layer in range(layers):
        at = f"blk.{layer}."
        found += [tensor(at + "attn_norm.weight", hidden), tensor(at + "ffn_norm.weight", hidden)]
        if fused:
            found += [tensor(at + "attn_qkv.weight", hidden + 2 * kv, hidden)]
        else:
            found += [tensor(at + "attn_q.weight", hidden, hidden)]
            found += [tensor(at + f"attn_{part}.weight", kv, hidden) for part in "kv"]
            found += [tensor(at + "ffn_gate.weight", ffn, hidden)]
        found += [
            tensor(at + "attn_output.weight", hidden, hidden),
            tensor(at + "ffn_up.weight", ffn * (2 if fused else 1), hidden),
            tensor(at + "ffn_down.weight", hidden, ffn),
        ]
    counts = {"block_count": layers, "embedding_length": hidden, "feed_forward_length": ffn}
    heads_of = {"attention__head_count": heads, "attention__head_count_kv": heads_kv}
    return source(architecture, found + list(more), **counts, **heads_of)


def experts(architecture: str, layers: int, count: int, heads: int, heads_kv: int) -> GgufSource:
    """A model of experts whose first layer is dense and whose others have a shared expert."""
    hidden, ffn = 256, 512
    made = dense(architecture, layers, hidden, ffn, heads, heads_kv)
    found = [
        t
        for t in made.tensors
        if "ffn_" not in t.name or "_norm" in t.name or t.name.startswith("blk.0.")
    ]
    for layer in range(1, layers):
        at = f"blk.{layer}."
        found += [tensor(at + "ffn_gate_inp.weight", count, hidden)]
        found += [tensor(at + "ffn_gate_inp_shexp.weight", 1, hidden)]
        for kind, lead in (("exps", (count,)), ("shexp", ())):
            found += [
                tensor(at + f"ffn_gate_{kind}.weight", *lead, ffn, hidden),
                tensor(at + f"ffn_up_{kind}.weight", *lead, ffn, hidden),
                tensor(at + f"ffn_down_{kind}.weight", *lead, hidden, ffn),
            ]
    counts = {"expert_count": count, "expert_used_count": 2, "expert_feed_forward_length": ffn}
    more = {f"{architecture}.{key}": u32(value) for key, value in counts.items()}
    return with_metadata(replace(made, tensors=tuple(found)), more)


def zoo() -> GgufSource:
    """Names that are kept for one reason or another, and shapes that are odd."""
    odd = (
        "position_embd.weight", "token_types.weight", "per_layer_token_embd.weight",
        "per_layer_model_proj.weight", "blk.0.altup_router.weight", "blk.0.laurel_l.weight",
        "blk.1.ssm_conv1d.weight", "blk.1.shortconv.conv.weight", "blk.1.indexer.k_proj.weight",
        "blk.1.indexer.attn_k.weight", "blk.0.time_mix_w1.weight", "blk.0.time_mix_decay_w2.weight",
        "blk.0.time_mix_key.weight", "blk.0.attn_rel_b.weight", "blk.2.attn_q.bias",
        "blk.2.ffn_gate_tid2eid.weight", "blk.2.cross_attn_v.weight", "blk.2.attn_kv_b.weight",
        "v.patch_embd.weight", "v.blk.0.attn_v.weight", "blk.11.attn_q_norm.weight",
        "blk.1.indexer.q_proj.weight", "v.position_embd.weight", "v.sam.pos_embd.weight",
        "v.sam.neck.0.weight", "v.sam.net_2.weight", "v.blk.0.attn.rel_pos_h.weight",
        "mm.patch_merger.weight", "a.rvq.codebook.weight", "mm.a.code_embd.weight",
    )  # fmt: skip
    mixed = "first w0 w2 v0 v1 v2 a0 a1 a2 g1 g2 decay_w1 lerp_fused"
    odd += tuple(f"blk.5.time_mix_{part}.weight" for part in mixed.split())
    more = [tensor(name, 8, 256) for name in odd]
    more += [tensor("blk.3.attn_v_b.weight", 4, 32, 128), tensor("blk.10.odd.weight", 8, 100)]
    more += [tensor("blk.9.one_row.weight", 1, 256), tensor("blk.9.three.weight", 1, 8, 256)]
    more += [tensor("blk.9.in_f32.weight", 8, 512, type_=F32)]
    return dense("llama", 12, 256, 256, 8, 2, more=tuple(more))


def heads_by_layer() -> GgufSource:
    """Counts of heads that are lists by layer, as in hybrid models."""
    more = {
        "llama.attention.head_count": array(Kind.INT32, [8] * 8),
        "llama.attention.head_count_kv": array(Kind.INT32, [2, 0] * 4),
    }
    return with_metadata(dense("llama", 8, 256, 256, 8, 2), more)


def _latent(architecture: str, odd: str) -> GgufSource:
    """An architecture whose attention has matrices of three axes, and names that are kept."""
    made = experts(architecture, 6, 16, 4, 4)
    numbers = (
        "attention.key_length_mla", "attention.value_length_mla", "attention.q_lora_rank",
        "attention.kv_lora_rank", "ssm.conv_kernel", "kda.head_dim", "expert_shared_count",
        "leading_dense_block_count", "attention.indexer.head_count",
        "attention.indexer.key_length", "attention.indexer.top_k", "attention.indexer.kpool",
        "hyper_connection.count", "hyper_connection.sinkhorn_iterations",
    )  # fmt: skip
    more = {f"{architecture}.{key}": u32(4) for key in numbers}
    more[f"{architecture}.expert_gating_func"] = u32(1)
    for key, value in (("hyper_connection.epsilon", 1e-5), ("kda.gate_lower_bound", -5.0)):
        more[f"{architecture}.{key}"] = f32(value)
    found = [tensor(f"blk.2.{name}.weight", 8, 256) for name in odd.split()]
    found += [tensor(f"blk.3.attn_{part}_b.weight", 4, 32, 256) for part in "kv"]
    return with_metadata(replace(made, tensors=(*made.tensors, *found)), more)


def glm5() -> GgufSource:
    """GLM 5, of which much is kept, and a little never gets less than eight bits."""
    return _latent(
        "glm5-next",
        "hc_attn_fn indexer.attn_q_b indexer.attn_k indexer.proj indexer_compressor_gate "
        "indexer_compressor_ape ssm_f_a ssm_f_b ssm_g_a ssm_g_b ssm_beta attn_kv_a_mqa attn_q_a "
        "attn_q_b nextn.eh_proj ssm_out",
    )


def of_table(named: str, settings: dict[str, object]) -> GgufSource:
    """A model of a row of the table, by the settings of its config.json."""
    row = TABLE[named]
    config = row.completed({"architectures": [named], **settings})
    modules = {module.name: module for module in row.modules}
    found = [tensor("rope_freqs.weight", 16)] if row.name == "gemma4" else []
    for (name, block), gguf_name in gguf_names(row, config).items():
        module = modules[name]
        if name == "lm_head" or (module.asked and not config.get(module.asked)):
            continue
        shape = expected_shape(module, config, block=block)
        assert shape is not None
        found.append(tensor(gguf_name + module.ends[0][0], *shape))
    metadata = {"general.architecture": string(row.name), f"{row.name}.vocab_size": u32(96)}
    for key in row.keys:
        if (value := key.value(config)) is not None:
            metadata[f"{row.name}.{key.name}"] = value
    return GgufSource(Path("model.gguf"), metadata, tuple(found))


_GEMMA4 = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64,
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0,
}  # fmt: skip
_E2B = {
    **_GEMMA4, "num_hidden_layers": 35, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 256,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
}  # fmt: skip
_A4B = {
    **_GEMMA4, "num_key_value_heads": 4, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
    "enable_moe_block": True, "num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 256,
}  # fmt: skip

_3N = {
    **_GEMMA4, "num_hidden_layers": 30, "num_kv_shared_layers": 10, "num_key_value_heads": 2,
    "hidden_size_per_layer_input": 256,
}  # fmt: skip
_MAMBA = {"vocab_size": 96, "hidden_size": 256, "num_hidden_layers": 16, "state_size": 16}
_JAMBA = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip

MODELS: dict[str, Callable[[], GgufSource]] = {
    "smollm2": lambda: dense("llama", 30, 576, 1536, 9, 3, tied=True),
    "smollm2-768": lambda: dense("llama", 30, 768, 1536, 12, 4),
    "eight experts": lambda: experts("llama", 17, 8, 4, 1),
    "sixteen experts": lambda: experts("qwen3moe", 24, 16, 4, 4),
    "70B of Llama": lambda: dense("llama", 80, 256, 256, 4, 2),
    "65B": lambda: dense("llama", 80, 256, 256, 4, 4),
    "70B of Qwen2": lambda: dense("qwen2", 80, 256, 256, 4, 4),
    "Falcon": lambda: dense("falcon", 32, 256, 1024, 8, 1, fused=True),
    "Phi-3": lambda: dense("phi3", 32, 256, 512, 8, 8, fused=True),
    "narrow": lambda: dense("llama", 9, 96, 80, 3, 3),
    "heads by layer": heads_by_layer,
    "zoo": zoo,
    "GLM 5": glm5,
    "Gemma 4 E2B": lambda: of_table("Gemma4ForCausalLM", _E2B),
    "Gemma 4 26B-A4B": lambda: of_table("Gemma4ForCausalLM", _A4B),
    "Gemma 3n E2B": lambda: of_table("Gemma3nForCausalLM", _3N),
    "Mamba": lambda: of_table("MambaForCausalLM", _MAMBA),
    "Jamba": lambda: of_table("JambaForCausalLM", _JAMBA),
    "Bailing 3": lambda: _latent("bailingmoe3", "attn_kv_a_mqa ssm_f_a"),
}
