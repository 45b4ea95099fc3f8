"""What llama.cpp computes otherwise than a checkpoint asks for, by the small model's name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import QtoolError, UnsupportedError
from qtool.gguf.from_hf import source as from_hf
from qtool.gguf.from_hf.source import hf_source
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from support.gguf import gguf_models
from support.gguf.gguf_from_hf import without_tokenizers

__all__ = ["without_tokenizers"]

_BY_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 3e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("hunyuan-moe", {"moe_topk": [3, 2]}, "moe_topk differs from block to block"),
    ("hunyuan-moe", {"moe_topk": [3]}, "moe_topk is a list of 1 numbers"),
    ("hunyuan-moe", {"moe_intermediate_size": 48}, "experts are 48 wide, and it takes inter"),
    ("hunyuan-moe", {"attention_bias": True}, "attention_bias is true"),
    ("nemotron-h", {"hybrid_override_pattern": "M-*M"}, "are not those of 5 blocks"),
    ("nemotron-h", {"hybrid_override_pattern": "M-*XM"}, "are not those of 5 blocks"),
    ("nemotron-h", {"mamba_proj_bias": True}, "mamba_proj_bias is true"),
    ("nemotron-h", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit is \[0.0, 0.1\]"),
    ("nemotron-h", {"time_step_limit": [0.001, None]}, r"time_step_limit is \[0.001"),
    ("nemotron-h", {"mlp_hidden_act": "silu"}, "the activation is 'silu'"),
    ("nemotron-h-moe", {"hybrid_override_pattern": "ME*-"}, "some blocks have an MLP and some"),
    ("nemotron-h-moe", {"n_group": 2}, "n_group is 2, and it chooses among all"),
    ("granite-4-h", {"mamba_n_heads": 4}, "state spaces are 64 wide, and it takes 128"),
    ("granite-4-h", {"position_embedding_type": "rope"}, "is rope, and it knows no positions"),
    ("granite-4-h", {"intermediate_size": 80}, "shared_intermediate_size is 96, and it takes"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is false, and it takes true"),
    ("gpt2", {"activation_function": "relu"}, "the activation is 'relu'"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm is true"),
    ("mpt", {"attn_config": {"alibi": False}}, "alibi is false, and it takes true"),
    ("mpt", {"attn_config": {"kv_n_heads": 1}}, "kv_n_heads is 1"),
    ("mpt", {"expansion_ratio": 2}, "expansion_ratio is 2"),
    ("falcon", {"alibi": True}, "alibi is true"),
    ("falcon", {"parallel_attn": False}, "parallel_attn is false"),
    ("afmoe", {"mup_enabled": False}, "mup_enabled is false"),
    ("afmoe", {"layer_types": ["full_attention"] * 5}, "not each fourth block"),
    ("exaone-moe", {"n_group": 2}, "n_group is 2"),
    ("exaone-moe", {"mlp_layer_types": ["sparse"] * 5}, "mlp_layer_types is not 2 blocks"),
    ("glm-4.7-flash", {"rope_interleave": False}, "it rotates neighbours"),
    ("hy-v3", {"mlp_bias": True}, "mlp_bias is true"),
    ("gemma3n", {"laurel_rank": 32}, "laurel_rank is 32, and it takes 64"),
    ("gemma3n", {"altup_correct_scale": False}, "altup_correct_scale is False, and it takes True"),
    ("gemma3n", {"final_logit_softcapping": None}, "final_logit_softcapping is None"),
    ("gemma3n", {"intermediate_size": [1024] * 21}, "intermediate_size is not a list of 22"),
    ("gemma3n", {"intermediate_size": [1024] * 21 + [96]}, "intermediate_size is 96 in some"),
    ("gemma3n", {"activation_sparsity_pattern": [0.9] * 22}, "is not 0.95 in ten blocks"),
    ("gemma3n", {"num_kv_shared_layers": 1}, "share keys of two that are not one with"),
    ("gemma3n-few", {"num_kv_shared_layers": 2}, "10 blocks have keys of their own"),
    ("gemma3n", {"vocab_size_per_layer_input": 97}, "vocab_size_per_layer_input is 97, more"),
    ("mamba", {"use_bias": True}, "use_bias is true, and it adds no such biases"),
    ("mamba", {"use_conv_bias": False}, "use_conv_bias is false, and it asks for those"),
    ("mamba", {"expand": 3}, "expand is 3, and it takes 2"),
    ("mamba", {"hidden_act": "gelu"}, "the activation is 'gelu'"),
    ("mamba2", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit is \[0.0, 0.1\]"),
    ("mamba2", {"num_heads": 4}, r"num_heads times head_dim is not expand times .* \(128\)"),
    ("jamba", {"mamba_proj_bias": True}, "mamba_proj_bias is true"),
    ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset is 3, and it expects less than"),
    ("jamba", {"expert_layer_offset": None}, "expert_layer_offset is None"),
    ("jais2", {"mlp_bias": False}, "mlp_bias is false, and it asks for those biases"),
    ("mellum", {"mlp_layer_types": ["dense", *["sparse"] * 3]}, "some blocks have no experts"),
    ("mellum", {"layer_types": None}, "no block looks through a window, and it asks for some"),
    ("mellum", {"rope_parameters": _BY_KIND}, "rotate with rope_theta 2000.0 and scaling default"),
    ("mellum", {"norm_topk_prob": False}, "norm_topk_prob is false"),
    ("apertus", {"hidden_act": "silu"}, "the activation is 'silu'"),
    ("apertus", {"num_hidden_layers": 4}, "lacks model.layers.3.self_attn"),
    (
        "cohere2-moe",
        {"shared_expert_combination_strategy": "sum"},
        'strategy is "sum", and it takes',
    ),
    ("cohere2-moe", {"expert_selection_fn": "top"}, 'expert_selection_fn is "top", and it knows'),
    ("cohere2-moe", {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, and its norms subtract"),
    ("cohere2-moe", {"prefix_dense_sliding_window_pattern": 2}, "pattern is 2, and it rotates in"),
    ("cohere2-moe-softmax", {"norm_topk_prob": False}, "softmax of the chosen adds up to one"),
    ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "the activation is 'gelu'"),
    ("granite-4", {"position_embedding_type": "nope"}, "is nope, and it has rotations"),
]


def test_gpt2_as_it_was_released(tmp_path: Path) -> None:
    """Without `transformer.` before its names, and with masks that nobody needs."""
    folder = gguf_models.build("gpt2", tmp_path / "model")
    before = [t.read(0, t.rows).tobytes() for t in hf_source(Checkpoint.open(folder)).tensors]
    state = load_file(folder / "model.safetensors")
    state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    state["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    after = hf_source(Checkpoint.open(folder))
    assert before == [t.read(0, t.rows).tobytes() for t in after.tensors]
    assert after.dropped == (("h.0.attn.bias", "llama.cpp computes it itself"),)
    up = next(t for t in after.tensors if t.name == "blk.1.ffn_up.weight")
    transposed = np.ascontiguousarray(state["h.1.mlp.c_fc.weight"].T)
    assert up.read(0, up.rows).tobytes() == transposed.tobytes()


def test_another_epsilon_of_falcon_mamba_is_told(tmp_path: Path) -> None:
    folder = gguf_models.build("falcon-mamba", tmp_path / "model")
    assert not hf_source(Checkpoint.open(folder)).warnings
    gguf_models.rewrite_config(folder, lambda c: c.update(layer_norm_epsilon=1e-5))
    (said,) = hf_source(Checkpoint.open(folder)).warnings
    assert said.startswith("mixer_rms_eps is 1e-06, and llama.cpp adds layer_norm_epsilon (1e-05)")


def test_steps_of_a_sixteenth(tmp_path: Path) -> None:
    """Released checkpoints leave it to the class, or say auto; 64 wide, that is 4."""
    folder = gguf_models.build("mamba-untied", tmp_path / "model")
    said = hf_source(Checkpoint.open(folder)).metadata
    for rank in (None, "auto"):
        gguf_models.rewrite_config(folder, lambda c, rank=rank: c.update(time_step_rank=rank))
        assert hf_source(Checkpoint.open(folder)).metadata == said
    assert said["mamba.ssm.time_step_rank"].value == 4


def test_what_activations_learned_is_in_the_metadata(tmp_path: Path) -> None:
    folder = gguf_models.build("apertus", tmp_path / "model", dtype="float16")
    state = load_file(folder / "model.safetensors")
    key, name = "xielu.alpha_n", "model.layers.{}.mlp.act_fn.alpha_n"
    (said,) = [v for k, v in hf_source(Checkpoint.open(folder)).metadata.items() if k == key]
    assert said.value == [float(state[name.format(b)].astype(np.float32)[0]) for b in range(3)]
    state[name.format(1)] = np.zeros(2, state[name.format(1)].dtype)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(QtoolError, match=r"layers.1.mlp.act_fn.alpha_n is F16 \[2\], expected"):
        hf_source(Checkpoint.open(folder))
    del state[name.format(1)]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(QtoolError, match=r"layers.1.mlp.act_fn.alpha_n is nothing, expected one"):
        hf_source(Checkpoint.open(folder))


def test_another_slope_of_mpt_is_told(tmp_path: Path) -> None:
    folder = gguf_models.build("mpt", tmp_path / "model")
    gguf_models.rewrite_config(folder, lambda c: c.update(attn_config={"alibi_bias_max": 4}))
    (said,) = hf_source(Checkpoint.open(folder)).warnings
    assert said.startswith("alibi_bias_max is 4, and transformers takes 8")


@pytest.mark.parametrize(("name", "change", "said"), REFUSED)
def test_refused(name: str, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = gguf_models.build(name, tmp_path / "model")
    gguf_models.rewrite_config(folder, lambda config: config.update(change))
    with pytest.raises(QtoolError, match=said):
        hf_source(Checkpoint.open(folder))


def test_inputs_of_tokens_that_are_no_text(tmp_path: Path) -> None:
    """Six tokens of Gemma 3n have no inputs of blocks; the file has zeros for them."""
    folder = gguf_models.build("gemma3n", tmp_path / "model", dtype="bfloat16")
    tensors = {tensor.name: tensor for tensor in hf_source(Checkpoint.open(folder)).tensors}
    inputs = tensors["per_layer_token_embd.weight"]
    assert inputs.shape == (96, 22 * 256)
    whole, some = inputs.read(0, 96), inputs.read(88, 93)
    assert np.array_equal(whole[88:93], some) and not whole[90:].any() and whole[1:90].any(1).all()


def test_a_plan_refuses_to_measure_gpt_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the run would."""
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})
    source = hf_source(Checkpoint.open(gguf_models.build("gpt2", tmp_path / "model")))
    for name, refused in (("q4_k_m", False), ("q4_k_m-awq-gptq", True)):
        recipe = load(name)
        assert isinstance(recipe, GgufRecipe)
        if not refused:
            assert make_gguf_plan(recipe, source).tensors
            continue
        with pytest.raises(UnsupportedError, match=r"GPT-2 stores its matrices transposed"):
            make_gguf_plan(recipe, source)
