"""Small checkpoints of Llama and GLM in other words; rows as in `gguf_models`, and made as those of
`remote` are."""

from collections.abc import Callable
from typing import Any

_DEFAULT = {"rope_type": "default", "rope_theta": 3e4}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm2": ("Llama", {"rope_parameters": _DEFAULT, "num_attention_heads": 8,
                            "rms_norm_eps": 1e-5}),
    # As many blocks as 7B has, which llama.cpp tells it by.
    "baichuan": ("Llama", {"num_hidden_layers": 32, "num_key_value_heads": 4, "hidden_size": 32,
                           "intermediate_size": 48}),
    "chatglm": ("Glm", {"head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-3,
                        "tie_word_embeddings": False, "rope_parameters": {
                            "rope_type": "default", "rope_theta": 5e4,
                            "partial_rotary_factor": 0.5}}),
    # Of its blocks, one lacks attention, one an MLP too, and sizes differ.
    "deci": ("Llama", {"num_hidden_layers": 4, "num_key_value_heads": 4, "intermediate_size": 512,
                       "rope_parameters": _LLAMA3}),
    # One with a matrix in place of attention, which Llama has not: it loads, and that is all.
    "deci-linear": ("Llama", {"num_hidden_layers": 2, "num_key_value_heads": 4,
                              "intermediate_size": 256}),
    "nemotron-puzzle": (
        "NemotronH",
        {"layers_block_type": ["moe", "attention", "mamba", "moe"], "head_dim": 16,
         "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
         "conv_kernel": 3, "n_routed_experts": 5, "moe_intermediate_size": 32,
         "num_experts_per_tok": 3, "moe_shared_expert_intermediate_size": 48,
         "moe_latent_size": 40, "routed_scaling_factor": 1.5},
    ),
}  # fmt: skip
UNLIKE = ("deci-linear",)
FAILS_THERE = ("baichuan",)
NO_WAY_BACK = {
    name: "lacks blk.0.attn_q.weight"
    if name == "chatglm"
    else "expert_used_count is"
    if name == "nemotron-puzzle"
    else "transformers has no class"
    for name in MODELS
}
State = dict[str, Any]


def fill(name: str, model: Any) -> None:
    """What a block of DeciLM lacks adds nothing here, and heads of keys are alike in twos."""
    import torch

    if name == "nemotron-puzzle":
        with torch.no_grad():
            model.model.layers[3].mixer.experts.up_proj[:, 16:] = 0
    if name != "deci":
        return
    layers = model.model.layers
    with torch.no_grad():
        for projection in (layers[1].self_attn.k_proj, layers[1].self_attn.v_proj):
            heads = projection.weight.view(2, 2, -1)
            heads[:, 1] = heads[:, 0]
        layers[1].mlp.down_proj.weight[:, 256:] = 0
        for layer in layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
        layers[2].mlp.down_proj.weight.zero_()


def _internlm2(state: State, config: State) -> State:
    import torch

    names = (("embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("self_attn.o_proj",
             "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj",
             "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2"), ("input_layernorm",
             "attention_norm"), ("post_attention_layernorm", "ffn_norm"))  # fmt: skip
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    groups = config["num_key_value_heads"]
    found = {}
    for name, tensor in state.items():
        if name.endswith("self_attn.q_proj.weight"):
            parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            at = name.replace("self_attn.q_proj", "attention.wqkv")
            parts = [part.view(groups, -1, part.shape[1]) for part in parts]
            found[at] = torch.cat(parts, 1).flatten(0, 1).contiguous()
        elif "_proj" not in name or "self_attn.o_proj" in name or ".mlp." in name:
            for old, new in names:
                name = name.replace(old, new)
            found[name] = tensor
    return found


def _baichuan(state: State, config: State) -> State:
    import torch

    config |= {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan",
               "model_max_length": 256}  # fmt: skip
    for name in [name for name in state if name.endswith("self_attn.q_proj.weight")]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace("q_proj", "W_pack")] = torch.cat(parts)
    return state


def _chatglm(state: State, config: State) -> State:
    import torch

    names = (("model.embed_tokens", "transformer.embedding.word_embeddings"), ("lm_head",
             "transformer.output_layer"), ("model.norm", "transformer.encoder.final_layernorm"),
             ("model.layers", "transformer.encoder.layers"), ("self_attn.o_proj",
             "self_attention.dense"), ("mlp.gate_up_proj", "mlp.dense_h_to_4h"), ("mlp.down_proj",
             "mlp.dense_4h_to_h"))  # fmt: skip
    found = {}
    for name, tensor in state.items():
        if "self_attn.q_proj" in name:
            parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, tensor = name.replace("self_attn.q_proj", "self_attention.query_key_value"), None
            tensor = torch.cat(parts)
        if "self_attn.k_proj" in name or "self_attn.v_proj" in name:
            continue
        for old, new in names:
            name = name.replace(old, new)
        found[name] = tensor
    found["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    said = {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": False,
        "num_layers": config["num_hidden_layers"], "ffn_hidden_size": config["intermediate_size"],
        "multi_query_attention": True, "multi_query_group_num": config["num_key_value_heads"],
        "layernorm_epsilon": config["rms_norm_eps"], "padded_vocab_size": config["vocab_size"],
        "seq_length": 200, "rope_ratio": 5, "rmsnorm": True, "post_layer_norm": True,
        "kv_channels": 16, "add_qkv_bias": True,
    }  # fmt: skip
    kept = ("hidden_size", "num_attention_heads", "torch_dtype", "dtype", "bos_token_id",
            "eos_token_id", "pad_token_id", "tie_word_embeddings")  # fmt: skip
    own = {key: config[key] for key in kept if key in config}
    config.clear()
    config |= own | said
    return found


def _deci(state: State, config: State) -> State:
    blocks = config["num_hidden_layers"]
    linear = blocks == 2
    config |= {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas"}
    del config["intermediate_size"], config["num_key_value_heads"], config["head_dim"]
    sizes = [(1, 6.0), (None, 2.0)] if linear else [(1, 12.0), (2, 6.0), (None, None), (None, 12.0)]
    config["block_configs"] = [
        {"attention": {"n_heads_in_group": heads, "replace_with_linear": linear and heads is None,
                       "no_op": heads is None and not linear, "window_length": None},
         "ffn": {"ffn_mult": wide, "no_op": wide is None, "replace_with_linear": False}}
        for heads, wide in sizes
    ]  # fmt: skip
    for name in [*state]:
        if not name.startswith("model.layers."):
            continue
        b, _, rest = name.removeprefix("model.layers.").partition(".")
        heads, wide = sizes[int(b)]
        if linear and heads is None and rest == "self_attn.o_proj.weight":
            state[name.replace("o_proj", "linear_attn")] = state.pop(name)
        elif (
            heads is None
            and (rest.startswith("self_attn.") or (rest.startswith("input_") and not linear))
        ) or (wide is None and rest.startswith(("mlp.", "post_"))):
            del state[name]
        elif heads == 2 and rest.startswith(("self_attn.k_", "self_attn.v_")):
            state[name] = state[name].view(2, 2, 16, -1)[:, 0].flatten(0, 1).contiguous()
        elif wide == 6.0 and not linear and rest.startswith("mlp."):
            rows = state[name][:, :256] if "down" in rest else state[name][:256]
            state[name] = rows.contiguous()
    return state


def _puzzle(state: State, config: State) -> State:
    kinds = {"E": "moe", "*": "attention", "M": "mamba"}
    letters = config.pop("hybrid_override_pattern")
    config["block_configs"] = [
        {"block_type": kinds[letter], **({"moe_intermediate_size": 16 if b == 3 else 32,
                                          "num_experts_per_tok": 3} if letter == "E" else {})}
        for b, letter in enumerate(letters)
    ]  # fmt: skip
    config |= {"architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle"}
    del config["moe_intermediate_size"], config["num_experts_per_tok"]
    for name in [name for name in state if ".layers.3.mixer.experts." in name]:
        part = state[name][:, :16] if "down" in name else state[name][:16]
        state[name] = part.contiguous()
    return {name.replace("backbone.", "model."): tensor for name, tensor in state.items()}


RENAMED: dict[str, Callable[[State, State], State]] = {
    "internlm2": _internlm2, "baichuan": _baichuan, "chatglm": _chatglm, "deci": _deci,
    "deci-linear": _deci, "nemotron-puzzle": _puzzle,
}  # fmt: skip
