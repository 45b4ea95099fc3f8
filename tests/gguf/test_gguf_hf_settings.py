"""Checkpoints as sources of GGUF: settings, their defaults and spellings, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.checkpoints.hf_config import complete
from qtool.errors import FormatError, QtoolError, SourceError, UnsupportedError
from qtool.gguf.architectures import TABLE
from qtool.gguf.architectures.multimodal import AROUND, OTHERWISE, TIED
from qtool.gguf.from_hf.general import general_metadata
from qtool.gguf.from_hf.rope_tensors import llama3_divisors
from qtool.gguf.from_hf.source import hf_source
from support.gguf.gguf_from_hf import without_tokenizers
from support.models.hf_arrays import (
    LLAMA,
    Arrays,
    gemma2,
    llama,
    mixtral,
    numbers,
    write,
)

__all__ = ["without_tokenizers"]


def _without(name: str) -> Arrays:
    return {key: value for key, value in llama().items() if key != name}


def _four_routed(tensors: Arrays) -> Arrays:
    routers = [name for name in tensors if name.endswith(".gate.weight")]
    return tensors | dict.fromkeys(routers, numbers(4, 16))


def _with(**more: NDArray[Any]) -> Arrays:
    return llama() | {name.replace("__", "."): value for name, value in more.items()}


_REFUSED: list[tuple[dict[str, Any], Arrays, type[QtoolError], str]] = [
    ({"architectures": ["RwkvForCausalLM"]}, llama(), UnsupportedError,
     r"RwkvForCausalLM, which is not in the table of .*w4a16-ct.*architectures/"),
    ({"architectures": []}, llama(), UnsupportedError, "names no architecture; .*Qwen3ForCausalLM"),
    ({"architectures": None}, llama(), UnsupportedError, "names no architecture; "),
    ({"quantization_config": {"quant_method": "awq"}}, llama(), UnsupportedError, "is quantized"),
    ({"hidden_act": "relu"}, llama(), UnsupportedError, "activation is 'relu'.*computes silu"),
    ({"rope_scaling": {"type": "longrope"}}, llama(), UnsupportedError, "of the type 'longrope'"),
    ({"num_hidden_layers": 3}, llama(), FormatError, r"lacks model\.layers\.2\.self_attn\.q_proj"),
    ({"num_hidden_layers": 1}, llama(), FormatError, r"no place .*'model\.layers\.1\.self_attn"),
    ({"num_hidden_layers": 1 << 30}, llama(), SourceError, "1073741824 blocks.* only 21 tensors"),
    ({"num_hidden_layers": "two"}, llama(), SourceError, 'num_hidden_layers is "two"'),
    ({"hidden_size": None}, llama(), SourceError, "hidden_size is null"),
    ({"rms_norm_eps": "small"}, llama(), SourceError, 'rms_norm_eps is "small", expected a number'),
    ({"rope_parameters": [1]}, llama(), SourceError, r"rope_parameters is \[1\]"),
    ({"rope_theta": 1e300}, llama(), SourceError, r"rope_theta is 1e\+300, expected a number"),
    ({"rope_scaling": {"rope_type": "llama3", "high_freq_factor": 0.5}}, llama(), SourceError,
     "makes no sense"),
    ({"rope_scaling": {"rope_type": "llama3"}, "rope_theta": 0}, llama(), SourceError,
     "rope_theta 0.0 makes no sense"),
    ({"rope_scaling": {"rope_type": "llama3"}, "rope_theta": -1e4}, llama(), SourceError,
     "rope_theta -10000.0 makes no sense"),
    ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"], "head_dim": 4,
      "hidden_act": "gelu"}, gemma2("float16"), SourceError, "layer_types is not a list of 2"),
    ({"num_attention_heads": 3}, llama(), FormatError, r"q_proj.*\[16, 16\].* 3 \(num_attention"),
    ({"vocab_size": 11}, llama(), FormatError,
     r"embed_tokens\.weight has the shape \[10, 16\].*should be \[11, 16\]; one of the two is of "
     r"another model: put the model's own config\.json beside its weights, or fetch the model"),
    ({"hidden_size": 512}, llama(), FormatError, r"embed_tokens\.weight .*should be \[10, 512\]"),
    ({"intermediate_size": 999}, llama(), FormatError,
     r"0\.mlp\.gate_proj.* \[24, 16\].*\[999, 16\]"),
    ({"intermediate_size": None}, llama(), SourceError, "intermediate_size is null"),
    ({"head_dim": 6}, llama(), FormatError, r"q_proj\.weight .*\[16, 16\].*\[24, 16\]"),
    ({"num_experts": 4}, llama(), SourceError, "num_experts 4, and LlamaForCausalLM has none"),
    ({}, _with(model__layers__1__mlp__up_proj__weight=numbers(23, 16)), FormatError,
     r"1\.mlp\.up_proj\.weight .*\[23, 16\].*\[24, 16\]"),
    ({}, _with(model__layers__1__self_attn__v_proj__bias=numbers(16)), FormatError,
     r"1\.self_attn\.v_proj\.bias .*\[16\].*\[8\]"),
    ({}, _with(model__norm__weight=numbers(8)), FormatError, r"model\.norm\.weight .*\[8\]"),
    ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "intermediate_size": 32},
     mixtral(fused=False), FormatError,
     r"stack of model\.layers\.0\.block_sparse_moe\.experts\.0\.w1.*\[3, 24, 16\].*\[3, 32, 16\]"),
    ({}, _without("lm_head.weight"), FormatError, r"lacks lm_head\.weight"),
    ({}, _without("model.layers.1.input_layernorm.weight"), FormatError,
     r"lacks model\.layers\.1\.input_layernorm\.weight"),
    ({}, _with(model__layers__0__sinks=numbers(4)), FormatError, r"'model\.layers\.0\.sinks'"),
    ({}, _with(language_model__lm_head__weight=numbers(10, 16)), FormatError, "are lm_head.weight"),
    ({}, llama() | {"model.norm.weight": np.ones(16, np.uint8)}, UnsupportedError,
     r"model\.norm\.weight is U8"),
    ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}, mixtral(fused=False),
     FormatError, r"block_sparse_moe\.gate\.weight has the shape \[3, 16\].*be \[4, 16\]"),
    ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
     _four_routed(mixtral(fused=False)),
     FormatError, r"lacks model\.layers\.0\.block_sparse_moe\.experts\.3\.w1"),
    ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
     _four_routed(mixtral(fused=True)),
     FormatError, r"gate_up_proj has the shape \[3, 48, 16\].*4 \(num_experts\)"),
    ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1]}, llama(),
     UnsupportedError, "some blocks have no experts.*norm_topk_prob is false"),
    ({"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 99, "head_dim": 4,
      "hidden_act": "gelu"}, llama(), UnsupportedError, "query_pre_attn_scalar is 99"),
    ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 1]}, llama(),
     UnsupportedError, "no_rope_layers is not each fourth"),
    ({"architectures": ["Qwen2ForCausalLM"], "head_dim": 8}, llama(), UnsupportedError,
     "head_dim is 8"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "tensors", "error", "message"), _REFUSED)
def test_refused(
    change: dict[str, Any], tensors: Arrays, error: type[QtoolError], message: str, tmp_path: Path
) -> None:
    checkpoint = write(tmp_path / "model", {**LLAMA, **change}, tensors)
    with pytest.raises(error, match=message):
        hf_source(checkpoint)


def test_warnings(tmp_path: Path) -> None:
    def warnings(window: int) -> tuple[str, ...]:
        config = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": window}
        return hf_source(write(tmp_path / "model", config, llama())).warnings

    for window in (32, 63):
        assert warnings(window)[0].startswith(f"attention looks back {window} tokens")
    # No text is longer than the model's 64 tokens.
    assert warnings(64) == () == warnings(128)
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    (said,) = warnings(64)
    assert "an adapter lies beside the weights" in said


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({}, None),
        ({"sliding_window_pattern": 6}, None),
        ({"sliding_window_pattern": 2}, [True, False, True]),
        ({"sliding_window_pattern": 1}, [False] * 3),
        ({"layer_types": ["sliding_attention"] * 3}, None),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
         [True, False, False]),
    ],
)  # fmt: skip
def test_which_blocks_look_through_a_window(
    settings: dict[str, Any], windows: list[bool] | None
) -> None:
    """Said to llama.cpp where it is not all but each sixth of Gemma 3."""
    row = TABLE["Gemma3ForCausalLM"]
    config = complete({"num_hidden_layers": 3, **settings}, row.defaults)
    said = {key.name: key.value(config) for key in row.keys if "sliding_window" in key.name}
    window, pattern = said["attention.sliding_window"], said["attention.sliding_window_pattern"]
    assert (pattern.value if pattern else None) == windows
    assert (window is None) is (windows == [False] * 3)


def test_llama3_divisors() -> None:
    """1 for high frequencies, the factor for low ones, and a formula in between."""
    rope = {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    found = llama3_divisors(rope, 128)
    frequencies = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    share = np.clip((8192 * frequencies / (2 * np.pi) - 1) / 3, 0, 1)
    assert found.dtype == np.float32
    assert np.allclose(found, 1 / ((1 - share) / 8 + share), rtol=1e-5)
    assert found[:28].tolist() == [1.0] * 28
    assert found[-20:].tolist() == [8.0] * 20
    # Those of Llama 3.2 1B as torch computes them, to the bit.
    small = llama3_divisors({**rope, "factor": 32.0}, 64)
    between = [1.6513292789459229, 3.2922627925872803, 9.666730880737305]
    assert small.tolist() == [1.0] * 15 + between + [32.0] * 14


def test_spellings_of_rope_settings() -> None:
    """The same settings in the ways that transformers 4 and 5 write them."""
    now = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    then = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5}
    defaults = TABLE["Qwen3ForCausalLM"].defaults
    one = complete(now, defaults)["rope_parameters"]["full_attention"]
    two = complete(then, defaults)["rope_parameters"]["full_attention"]
    assert {k: two[k] for k in one} == one
    old = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_local_base_freq": 5e3}
    rope = complete(old, TABLE["Gemma3ForCausalLM"].defaults)["rope_parameters"]
    assert (rope["full_attention"]["rope_theta"], rope["full_attention"]["factor"]) == (1e6, 8.0)
    assert rope["sliding_attention"] == {"rope_theta": 5e3, "rope_type": "default"}


# Other names of a row are not classes of transformers.
_FIRST = {id(row): name for name, row in reversed(TABLE.items()) if not row.remote}


@pytest.mark.parametrize("name", sorted(_FIRST.values()))
def test_defaults_are_those_of_transformers(name: str) -> None:
    import transformers

    kind = name.partition(" ")[0]  # of the class, of which there may be several rows
    kind = kind.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration").rstrip("_")
    kind = kind.removesuffix("LMHeadModel")
    kind = {"Mistral3": "Mistral", "MPT": "Mpt", "Exaone4_5": "Exaone4",
            "PaddleOCRVL": "PaddleOCR", "MiniCPMV4_6": "Qwen3_5", "Qwen2_5OmniModel": "Qwen2_5Omni",
            "Qwen2_5OmniThinker": "Qwen2_5Omni", "Qwen3OmniMoeThinker": "Qwen3OmniMoe",
            "MiniMaxM3Sparse": "MiniMaxM3VL", "Step3p5": "Step3p7", "LightOnOCR": "LightOnOcr",
            }.get(kind, kind)  # fmt: skip
    if not hasattr(transformers, f"{kind}Config") or hasattr(transformers, f"{kind}TextConfig"):
        kind += "Text"
    around, _, inside = name.partition(" of ")
    if around in AROUND:
        inside = {"kimi_k2": "deepseek_v3"}.get(inside, inside) or AROUND[around][0]
        theirs = transformers.CONFIG_MAPPING[inside]().to_dict()
        if around in OTHERWISE:
            theirs = getattr(transformers, f"{kind}Config")().text_config.to_dict()
        theirs["tie_word_embeddings"] |= around in TIED
    else:
        theirs = getattr(transformers, f"{kind}Config")().to_dict()
    if name == "Mistral3ForConditionalGeneration":  # the setting outside of the text's
        theirs["tie_word_embeddings"] = transformers.Mistral3Config().tie_word_embeddings
    needed = {"hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size",
              "n_embd", "n_head", "n_layer", "d_model", "n_heads", "n_layers"}  # fmt: skip
    needed = set() if around in AROUND else needed  # which are among its defaults
    ours = complete({key: theirs[key] for key in needed & theirs.keys()}, TABLE[name].defaults)
    experts = "num_local_experts" if "num_local_experts" in theirs else "moe_num_experts"
    old = {
        "num_experts": experts, "n_shared_experts": "num_shared_experts",
        "num_experts_per_tok": "num_experts_per_token", "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize", "max_position_embeddings": "model_max_length",
    }  # fmt: skip
    if "first_k_dense_replace" not in theirs and "sparse" in theirs.get("mlp_layer_types", ()):
        theirs["first_k_dense_replace"] = theirs["mlp_layer_types"].index("sparse")
    if kind.startswith("MiniMaxM3VL"):
        theirs["num_shared_experts"] = 1  # without a setting
    for key in TABLE[name].defaults:
        derived = isinstance(TABLE[name].defaults[key], str) and key not in theirs
        if not key.startswith("rope_") and not (derived and key not in old):
            theirs_too = theirs[key] if key in theirs else theirs[old[key]]
            assert ours[key] == theirs_too, key
    if "rope.freq_base" not in {key.name for key in TABLE[name].keys}:
        return  # it rotates nothing
    rope = theirs.get("rope_parameters")
    if rope is None:
        return  # nor does the class
    if "indexed_attention" in rope:  # of which the rotated part is told by qk_rope_head_dim
        rope = {k: {**v, "partial_rotary_factor": None} for k, v in rope.items()}
        rope["full_attention"] = rope["indexed_attention"]
    if "main" in rope:  # the other of DeepSeek V4 has its base in compress_rope_theta
        assert rope["compress"]["rope_theta"] == ours["compress_rope_theta"]
        rope = {k: v for k, v in rope["main"].items() if k != "partial_rotary_factor"}
    full = ours["rope_parameters"]["full_attention"]
    for key, value in rope.get("full_attention", rope).items():
        if key in ("type", "max_position_embeddings"):  # of Ministral 3, and nobody reads them
            continue
        if kind.startswith("Step3") and key == "rope_theta":  # which config.json has for each block
            continue
        assert full.get(key) == value, key
    sliding, known = rope.get("sliding_attention"), ours["rope_parameters"].get("sliding_attention")
    if sliding is not None and "partial_rotary_factor" not in (known or {}):
        sliding = {k: v for k, v in sliding.items() if k != "partial_rotary_factor"}
    assert known == sliding


def test_general_metadata(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nlicense: mit\nlanguage:\n- en\n- no\nbase_model: them/Base-1B\ntags: {a: [1]}\n---\n"
    )
    settings = {"temperature": 0.6, "top_k": 20, "top_p": "much", "min_p": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    found = {key: value.value for key, value in general_metadata(tmp_path, {}, []).items()}
    assert found["general.license"] == "mit"
    assert found["general.languages"] == ["en", "no"]
    assert found["general.base_model.0.repo_url"] == "https://huggingface.co/them/Base-1B"
    assert (found["general.sampling.temp"], found["general.sampling.top_k"]) == (0.6, 20)
    assert not any("top_p" in key or "min_p" in key for key in found)


@pytest.mark.parametrize(
    "card", ["---\n{]\n---\n", "---\n- a\n---\n", "no front matter", "---\nlicense: [", "\xff"]
)
def test_model_cards_that_say_nothing(card: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(card, encoding="latin-1")
    (tmp_path / "generation_config.json").write_text("[]")
    assert set(general_metadata(tmp_path, {}, [])) == {
        *("general.type", "general.name", "general.size_label"),
        *({"general.basename", "general.version", "general.finetune"} & _heuristics(tmp_path)),
    }


def _heuristics(folder: Path) -> set[str]:
    (folder / "README.md").unlink()
    return set(general_metadata(folder, {}, []))


def test_name_in_a_download_cache(tmp_path: Path) -> None:
    folder = tmp_path / "models--them--Thing-1B-Instruct" / "snapshots" / ("0a" * 20)
    folder.mkdir(parents=True)
    found = general_metadata(folder, {}, [])
    assert found["general.name"].value == "Thing 1B Instruct"
    assert found["general.finetune"].value == "Instruct"
