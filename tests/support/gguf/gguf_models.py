"""Small checkpoints with random weights for conversion to GGUF, each with unusual settings.

`build(name, folder)` writes config.json and model.safetensors under the names of checkpoints in the
wild. Widths are not what the defaults would give, so that a setting that is ignored shows.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from support.gguf.families import (
    dense,
    gemma4,
    hybrid,
    later,
    llamas,
    newest,
    remote,
    seeing,
    sparse,
    states,
)
from support.models.built_once import built_once

VOCABULARY = 96
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {
    "rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0,
    "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LONG = [1.0 + 0.5 * i for i in range(8)]
_SLIDING = ["sliding_attention", "full_attention"]

_RELEASED_AS = {"Mpt": "MPTForCausalLM", "InternLM3": "InternLM3ForCausalLM"}
_OLDER = ("GPT2", "GPTBigCode", "Bloom", "Mpt", "Falcon", "Dbrx")  # sizes under names of their own

# name -> (class of the configuration, its settings beside the small ones)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-3.1": ("Llama", {"head_dim": 32, "rope_parameters": _LLAMA3}),
    "llama-biases-tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    ),
    "llama-yarn": ("Llama", {"num_key_value_heads": 4, "rope_parameters": _YARN}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "mistral-window": ("Mistral", {"num_key_value_heads": 1, "sliding_window": 128}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-wide": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3,
                                 "head_dim": 32, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5": ("Qwen2", {"rope_parameters": _YARN, "rms_norm_eps": 1e-5}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 16, "attention_bias": False,
                               "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-moe": ("Qwen3Moe", {**_MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen2-moe": ("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 80}),
    "gemma": ("Gemma", {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8,
                          "num_hidden_layers": 4, "attn_logit_softcapping": 20.0,
                          "final_logit_softcapping": 15.0}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8,
                              "num_hidden_layers": 7, "num_key_value_heads": 1}),
    "gemma3-linear": (
        "Gemma3Text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6,
         "final_logit_softcapping": 12.0,
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "gemma3-windows": (
        "Gemma3Text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 3,
         "layer_types": [*_SLIDING, "sliding_attention"]},
    ),
    "phi3": ("Phi3", {"original_max_position_embeddings": 256}),
    "phi3-long": (
        "Phi3",
        {"original_max_position_embeddings": 256, "max_position_embeddings": 1024,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": _LONG,
                             "long_factor": [2 * f for f in _LONG]}},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"rms_norm_eps": 1e-6}),
    "olmo2-tied": ("Olmo2", {"tie_word_embeddings": True}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "embedding_multiplier": 3.0,
                            "residual_multiplier": 0.5, "logits_scaling": 2.0,
                            "tie_word_embeddings": True}),
    "granite-plain": ("Granite", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 3e3, "partial_rotary_factor": 0.5}}),
    "stablelm-12b": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True,
                                  "layer_norm_eps": 1e-6}),
    "gpt-neox": ("GPTNeoX", {"use_parallel_residual": True}),
    "gpt-neox-rotary": ("GPTNeoX", {"use_parallel_residual": False, "layer_norm_eps": 1e-6,
                                    "rotary_pct": 0.5, "rotary_emb_base": 2e3,
                                    "hidden_act": "gelu_new"}),
    **dense.MODELS,
    **gemma4.MODELS,
    **sparse.SPARSE,
    **seeing.MODELS,
}  # fmt: skip
MODELS |= hybrid.MODELS | states.MODELS | remote.MODELS
MODELS |= newest.MODELS | later.MODELS
_SEEING = {
    **dense.SEEING, **gemma4.SEEING, **seeing.SEEING,
    **newest.SEEING, **later.SEEING,
}  # fmt: skip
# Keys that convert_hf_to_gguf.py does not write, and llama.cpp would assume something else.
SAID_BEYOND = {
    "gemma3-windows": {"gemma3.attention.sliding_window_pattern"},
    "stablelm": {"stablelm.rope.freq_base"},
    "gpt-neox-rotary": {"gptneox.rope.freq_base"},
    **dense.SAID_BEYOND,
    **gemma4.SAID_BEYOND,
    **sparse.SAID_BEYOND,
    **remote.SAID_BEYOND,
    **newest.SAID_BEYOND,
    **later.SAID_BEYOND,
    **seeing.SAID_BEYOND,
}


def auto_model(config: Any) -> Any:
    """The class that makes and loads models of this configuration."""
    import transformers

    if config.model_type == "mistral4":  # which transformers finds as a part of others alone
        return transformers.Mistral4ForCausalLM
    sees = hasattr(config, "vision_config") or hasattr(config, "vq_config")
    if hasattr(config, "audio_config") and not sees and hasattr(config, "text_config"):
        return transformers.AutoModelForMultimodalLM
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


@built_once
def build(
    name: str, folder: Path, *, dtype: str = "float32", seed: int = 0, renamed: bool = True
) -> Path:
    """Write the checkpoint; every norm and bias gets values that differ from channel to channel.

    renamed: as those whose class comes with them, not as the class of transformers that made it.
    """
    import torch
    import transformers

    kind, settings = MODELS[name]
    wanted = {**_SMALL, **settings}
    if "layers_block_type" in settings:
        del wanted["num_hidden_layers"]
    if kind in ("GPTNeoX", "HrmText", *_OLDER):
        del wanted["num_key_value_heads"]
    if kind in _OLDER:
        del wanted["intermediate_size"], wanted["max_position_embeddings"]
    if kind in states.ALONE:
        del wanted["intermediate_size"], wanted["num_attention_heads"]
        del wanted["num_key_value_heads"], wanted["max_position_embeddings"]
    around = _SEEING.get(kind)
    if around is not None:
        wanted = {**around, "text_config": {**around["text_config"], **wanted}}
    # The configuration's class, and what is inside it, if that needs telling.
    config = getattr(transformers, f"{kind.partition(' ')[0]}Config")(**wanted)
    torch.manual_seed(seed)
    model = auto_model(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
            else:
                parameter.mul_(4.0)
        sparse.fill(model)
        gemma4.fill(model)
        states.fill(model)
        newest.fill(model)
        later.fill(model)
        seeing.fill(name, model)
        llamas.fill(name, model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    sparse.finish(name, folder)
    seeing.finish(name, folder)
    if kind in _RELEASED_AS:
        rewrite_config(folder, lambda config: config.update(architectures=[_RELEASED_AS[kind]]))
    if name == "falcon-7b":  # the number does not count there, and was not said
        rewrite_config(folder, lambda config: config.pop("num_kv_heads"))
    if kind in ("NemotronH", "GraniteMoeHybrid"):
        hybrid.as_released(folder)
    if name in remote.MODELS and renamed:
        remote.rename(name, folder)
    if name in newest.MODELS:
        newest.finish(name, folder)
    if name in later.MODELS:
        later.finish(name, folder)
    if name == "gemma3n":
        gemma4.add_unread(folder)
    if name in hybrid.PREDICTING:
        hybrid.add_prediction(folder, seed)
    return folder


def fuse_experts(apart: Path, folder: Path) -> Path:
    """The same two blocks of eight experts as transformers has them in memory: in two tensors."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(apart, folder)
    state = load_file(folder / "model.safetensors")
    for block in range(2):
        at = f"model.layers.{block}.mlp.experts"
        matrices = {
            kind: np.stack([state.pop(f"{at}.{i}.{kind}_proj.weight") for i in range(8)])
            for kind in ("gate", "up", "down")
        }
        state[f"{at}.gate_up_proj"] = np.concatenate([matrices["gate"], matrices["up"]], axis=1)
        state[f"{at}.down_proj"] = matrices["down"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def rewrite_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit config.json in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
