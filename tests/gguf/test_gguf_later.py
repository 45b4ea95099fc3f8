"""The decoders that the table got last as GGUF: what is refused, and settings in other words."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.gguf.to_hf.model import hf_model
from qtool.verification.gguf.tensors import check_tensors
from support.gguf import gguf_models
from support.gguf.families import later, llamas
from support.gguf.gguf_to_hf import bytes_of, keys_of, source_of, without_tokenizers

__all__ = ["without_tokenizers"]

_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def _blocks(number: int, part: str, **settings: object) -> list[dict[str, Any]]:
    """DeciLM's, one of them with other settings."""
    found = [
        {"attention": {"n_heads_in_group": heads}, "ffn": {"ffn_mult": wide}}
        for heads, wide in ((1, 12.0), (2, 6.0), (None, None), (None, 12.0))
    ]
    found[number][part] |= settings
    return found


REFUSED: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "deepseek-v4": (
        ({"hc_mult": 2}, "hc_mult is 2, and it takes 4"),
        ({"compress_ratios": [0, 4, 64, 4, 0]}, "64 tokens are put together"),
        ({"compress_ratios": [0, 0, 128, 128, 0]}, "no block puts 4 tokens together"),
        ({"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"'),
        ({"index_head_dim": 48}, "index_head_dim is 48"),
        ({"mlp_layer_types": ["moe", *["hash_moe"] * 2, "moe", "moe"]}, "are not the first"),
        ({"o_groups": 3}, "4 heads are no multiple of o_groups"),
        ({"rope_scaling": {**_YARN, "beta_fast": 16}}, "beta_fast of the rope settings"),
        ({"rope_scaling": {**_YARN, "truncate": False}}, "truncate of the rope settings"),
        ({"partial_rotary_factor": 0.25}, "0.25 of 32 is rotated"),
        ({"mlp_bias": True}, "mlp_bias is true"),
    ),
    "ling-3": (
        ({"q_lora_rank": 8}, "q_lora_rank is 8"),
        ({"kda_safe_gate": False}, "kda_safe_gate is false"),
        ({"kda_lower_bound": 1.0}, "kda_lower_bound is 1.0"),
        ({"moe_shared_expert_intermediate_size": 32}, "shared experts are 32 wide"),
        ({"expert_swiglu_limit_list": 3}, "expert_swiglu_limit_list is no list"),
        ({"num_key_value_heads": 2}, "there are 2 heads of keys"),
    ),
    "minimax-01": (
        ({"mlp_alpha_factor": 2.0}, "streams are multiplied by 2.0 and 3.5"),
        ({"linear_attn_beta_factor": 2.0}, "what parts give is multiplied by 2.0"),
        ({"postnorm": False}, "postnorm is false"),
    ),
    "internlm2": (({"bias": True}, "bias is true"), ({"head_dim": 16}, "head_dim is 16")),
    "baichuan": (
        ({"num_hidden_layers": 31}, "there are 31 blocks, and it knows 32"),
        ({"vocab_size": 125696}, "the head's rows are scaled to length one"),
    ),
    "chatglm": (
        ({"kv_channels": 32}, "kv_channels is 32"),
        ({"post_layer_norm": False}, "post_layer_norm is false"),
        ({"add_bias_linear": True}, "add_bias_linear is true"),
    ),
    "deci": (
        ({"block_configs": _blocks(3, "ffn", ffn_mult=None)}, "the last block has no MLP"),
        ({"block_configs": _blocks(0, "ffn", ffn_mult=None)}, "block 0 has no MLP"),
        ({"block_configs": _blocks(1, "ffn", replace_with_linear=True)}, "replace_with_linear"),
        ({"block_configs": _blocks(1, "attention", window_length=64)}, "window_length of block 1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_compute_otherwise(name: str, tmp_path: Path) -> None:
    folder = gguf_models.build(name, tmp_path / "model")
    given = (folder / "config.json").read_text()
    for settings, said in REFUSED[name]:
        (folder / "config.json").write_text(json.dumps(json.loads(given) | settings))
        with pytest.raises(UnsupportedError, match=said):
            source_of(folder)


@pytest.mark.parametrize("name", [*later.MODELS, *llamas.MODELS])
def test_tensors_are_those_that_the_metadata_say(name: str, tmp_path: Path) -> None:
    source = source_of(gguf_models.build(name, tmp_path / "model"))
    assert list(check_tensors(source)) == []
    if name in ("deci", "deci-linear", "nemotron-puzzle"):
        return  # sizes of blocks are not told
    taller = [
        replace(t, shape=(t.shape[0] + 1, *t.shape[1:])) if "attn_output" in t.name else t
        for t in source.tensors
    ]
    found = list(check_tensors(replace(source, tensors=tuple(taller))))
    assert len(found) == sum(t is not s for t, s in zip(taller, source.tensors, strict=True)) > 0


def test_deepseek_v4_in_the_words_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other names of tensors and of settings, and the same file."""
    first = source_of(gguf_models.build("deepseek-v4", tmp_path / "model"))
    monkeypatch.setattr(later, "finish", lambda *_: None)
    built_anew = gguf_models.build.__wrapped__  # type: ignore[attr-defined]
    again = source_of(built_anew("deepseek-v4", tmp_path / "again"))
    one, other = keys_of(first), keys_of(again)
    ratios = one.pop("attention.compress_ratios").value  # of what predicts, too
    assert ratios == [*other.pop("attention.compress_ratios").value, 0]
    assert other == one and bytes_of(first) == bytes_of(again)


def test_minimax_01_as_transformers_saves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rates that follow from the number of heads."""
    first = source_of(gguf_models.build("minimax-01", tmp_path / "model"))
    monkeypatch.setattr(later, "finish", lambda *_: None)
    built_anew = gguf_models.build.__wrapped__  # type: ignore[attr-defined]
    again = source_of(built_anew("minimax-01", tmp_path / "again"))
    assert keys_of(again) == keys_of(first) and bytes_of(first) == bytes_of(again)
    assert {name.rpartition(".")[2] for name, _ in again.dropped} == {
        "slope_rate", "query_decay", "key_decay", "diagonal_decay"
    }  # fmt: skip


def test_ling_3_of_bounded_gates(tmp_path: Path) -> None:
    """Which are said where they are; which blocks attend, by the size of groups of blocks."""
    folder = gguf_models.build("ling-3", tmp_path / "model")
    first = keys_of(source_of(folder))

    def change(config: dict[str, Any]) -> None:
        del config["layer_types"], config["moe_shared_expert_intermediate_size"]
        config["expert_swiglu_limit_list"] = [None, 0.5, 2, 0.25]

    gguf_models.rewrite_config(folder, change)
    source = source_of(folder)
    again = keys_of(source)
    assert again.pop("swiglu_clamp_exp").value == [0.0, 0.5, 2.0, 0.25, 0.0]
    assert again == first
    with pytest.raises(UnsupportedError, match="swiglu_clamp_exp is"):
        hf_model(source)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("compress_ratios", [4, 4], "compress_ratios has 2 numbers"),
        ("compress_ratios", "x", "compress_ratios"),
        ("layer_types", ["full_attention"] * 5, 'layer_types names "full_attention"'),
        ("layer_types", ["sliding_attention"], "layer_types"),
        ("mlp_layer_types", 3, "mlp_layer_types"),
        ("num_hash_layers", "x", "num_hash_layers"),
        ("block_configs", 3, "block_configs is not a list of 4 objects"),
        ("block_configs", [1] * 4, "block_configs is not a list of 4 objects"),
        ("block_configs", _blocks(0, "ffn", ffn_mult="x"), 'ffn_mult is "x"'),
        ("block_configs", _blocks(0, "attention", n_heads_in_group=0), "n_heads_in_group is 0"),
        ("rope_ratio", "x", 'rope_ratio is "x"'),
        ("multi_query_group_num", "x", 'num_key_value_heads is "x"'),
    ],
)
def test_settings_of_other_kinds(key: str, value: object, said: str, tmp_path: Path) -> None:
    name = {"b": "deci", "r": "chatglm"}.get(key[0], "deepseek-v4")
    name = "chatglm" if key.startswith("multi") else name
    folder = gguf_models.build(name, tmp_path / "model")
    gguf_models.rewrite_config(folder, lambda config: config.update({key: value}))
    with pytest.raises(SourceError, match=said):
        source_of(folder)


def test_experts_of_a_token_are_integers(tmp_path: Path) -> None:
    folder = gguf_models.build("deepseek-v4", tmp_path / "model")
    file, name = folder / "model.safetensors", "layers.0.ffn.gate.tid2eid"
    state = load_file(file)
    source = source_of(folder)
    tensor = next(t for t in source.tensors if t.name == "blk.0.ffn_gate_tid2eid.weight")
    assert tensor.type.name == "I32"
    assert np.array_equal(tensor.read(1, 9).view(np.int32).reshape(8, -1), state[name][1:9])
    changed = replace(tensor, type=next(t.type for t in source.tensors if t.type.name == "F32"))
    others = tuple(changed if t is tensor else t for t in source.tensors)
    with pytest.raises(FormatError, match=r"tid2eid\.weight is F32"):
        hf_model(replace(source, tensors=others))
    save_file({**state, name: state[name] - 7}, file, {"format": "pt"})
    tensor = next(t for t in source_of(folder).tensors if t.name == tensor.name)
    with pytest.raises(FormatError, match="expected numbers from 0 on"):
        tensor.read(0, tensor.rows)
    save_file({**state, name: state[name].astype(np.float32)}, file, {"format": "pt"})
    with pytest.raises(FormatError, match="expected a matrix of integers"):
        source_of(folder)


def _around(folder: Path, name: str, inner: str | None, begins: str, others: list[str]) -> None:
    """The checkpoint as that of another class: inner, the setting that has the decoder's."""
    config = json.loads((folder / "config.json").read_text())
    own = {"architectures": [name], "vision_config": {"hidden_size": 4}}
    config = {**config, **own} if inner is None else {**own, inner: config}
    (folder / "config.json").write_text(json.dumps(config))
    state = load_file(folder / "model.safetensors")
    state = {begins + key: value for key, value in state.items()}
    state |= {other: np.zeros((4, 4), np.float32) for other in others}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("model", "name", "inner", "begins", "others"),
    [
        ("qwen2", "DotsOCRForCausalLM", None, "", ["vision_tower.blocks.0.attn.qkv.weight"]),
        ("youtu", "YoutuVLForConditionalGeneration", None, "",
         ["siglip2.vision_model.x.weight", "merger.mlp.0.weight"]),
        ("nemotron-h", "NemotronH_Nano_VL_V2", "llm_config", "language_model.",
         ["vision_model.radio_model.x.weight", "mlp1.1.weight"]),
        ("nemotron-h-moe", "NemotronH_Nano_VL_V2", "llm_config", "language_model.",
         ["sound_encoder.x.weight", "sound_projection.x.weight"]),
        ("exaone-moe", "ExaoneMoEForCausalLM", None, "", []),
        ("llama", "LLaMAForCausalLM", None, "", []),
    ],
)  # fmt: skip
def test_the_same_file_in_another_class(
    model: str, name: str, inner: str | None, begins: str, others: list[str], tmp_path: Path
) -> None:
    folder = gguf_models.build(model, tmp_path / "model")
    first = source_of(folder)
    told = bytes_of(first)
    _around(folder, name, inner, begins, others)
    again = source_of(folder)
    assert again.architecture == first.architecture and keys_of(again) == keys_of(first)
    assert bytes_of(again) == told
    assert {one for one, _ in again.dropped} >= {*others}
