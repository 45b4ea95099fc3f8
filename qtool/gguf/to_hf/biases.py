"""Which tensors of a GGUF file have biases, and what config.json calls that.

A module of transformers either has a bias in every block or in none, and a norm has one exactly
where it is a LayerNorm. Any other bias would be passed over, and one that is missing made up.
"""

from collections.abc import Collection

from qtool.checkpoints.hf_config import Config
from qtool.errors import FormatError, UnsupportedError
from qtool.gguf.architectures import Architecture
from qtool.gguf.architectures.modules import ENDS, HEADS
from qtool.gguf.from_hf.source import gguf_names
from qtool.gguf.source import GgufSource

# What config.json calls the presence of biases, by the tensors of block 0 that then have one.
_BIASES = {
    "llama": (("attention_bias", ("attn_q", "attn_k", "attn_v", "attn_output")),
              ("mlp_bias", ("ffn_gate", "ffn_up", "ffn_down"))),
    "qwen2": (("", ("attn_q", "attn_k", "attn_v")),),
    "qwen2moe": (("qkv_bias", ("attn_q", "attn_k", "attn_v")),),
    "glm4moe": (("attention_bias", ("attn_q", "attn_k", "attn_v")),),
    "stablelm": (("use_qkv_bias", ("attn_q", "attn_k", "attn_v")),),
    "qwen2vl": (("", ("attn_q", "attn_k", "attn_v")),),
    "seed_oss": (("attention_bias", ("attn_q", "attn_k", "attn_v")),),
    "glm4": (("attention_bias", ("attn_q", "attn_k", "attn_v")),),
    "chatglm": (("attention_bias", ("attn_q", "attn_k", "attn_v")),),
    "ernie4_5": (("use_bias", ("attn_q", "attn_k", "attn_v", "attn_output")),),
    "nemotron": (("attention_bias", ("attn_q", "attn_k", "attn_v", "attn_output")),
                 ("mlp_bias", ("ffn_up", "ffn_down"))),
    "jais2": (("attention_bias", ("attn_q", "attn_k", "attn_v", "attn_output")),
              ("mlp_bias", ("ffn_up", "ffn_down"))),
    "starcoder2": (("", ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")),),
    "phi2": (("", ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")),),
    "gpt2": (("", ("attn_qkv", "attn_output", "ffn_up", "ffn_down")),),
    "starcoder": (("", ("attn_qkv", "attn_output", "ffn_up", "ffn_down")),),
    "bloom": (("", ("attn_qkv", "attn_output", "ffn_up", "ffn_down")),),
    "granite_swa": (("attention_bias", ("attn_q", "attn_k", "attn_v", "attn_output")),
                    ("mlp_bias", ("ffn_gate", "ffn_up", "ffn_down"))),
    "gpt-oss": (("attention_bias", ("attn_q", "attn_k", "attn_v", "attn_output")),
                ("", ("ffn_gate_inp",))),
    **dict.fromkeys(("mpt", "mamba", "mamba2", "jamba", "falcon-h1", "dbrx", "hrm_text"), ()),
    "falcon": (),
    "gptneox": (("attention_bias", ("attn_qkv", "attn_output")),
                ("", ("ffn_up", "ffn_down"))),
}  # fmt: skip
_BARE_NORMS = ("command-r", "cohere2", "cohere2moe", "nemotron_h", "nemotron_h_moe", "mpt", "dbrx",
                "qwen4exp", "minimax-m3",
                "deepseek4")  # fmt: skip
_WITH_STATES = (
    "mamba",
    "mamba2",
    "jamba",
    "falcon-h1",
)  # whose convolutions and steps always have them
_USUAL_BIASES = (("attention_bias", ("attn_q", "attn_k", "attn_v", "attn_output")),)


def bias_settings(row: Architecture, names: Collection[str], source: GgufSource) -> dict[str, bool]:
    """The settings that say so; an error for biases that no setting tells of."""
    found = {}
    for setting, kinds in _kinds(row):
        there = [f"blk.0.{kind}.bias" in names for kind in kinds]
        if any(there) != all(there) and any(f"blk.0.{kind}.weight" in names for kind in kinds):
            raise UnsupportedError(
                f"{source.path}: of {', '.join(kinds)} only some have a bias, which no "
                f"{row.name} model of transformers can"
            )
        if setting:
            found[setting] = all(there)
        elif not all(there):
            raise FormatError(
                f"{source.path}: lacks blk.0.{kinds[0]}.bias, which every {row.name} model has"
            )
    return found


def check_biases(
    row: Architecture, config: Config, names: Collection[str], source: GgufSource
) -> None:
    """FormatError where a bias is missing, or is one that the model has no place for."""
    layer_norms = any(key.name == "attention.layer_norm_epsilon" for key in row.keys)
    modules = {module.name: module for module in row.modules}
    some = {kind for _, kinds in _kinds(row) for kind in kinds}
    for (name, _), gguf_name in gguf_names(row, config).items():
        if modules[name].ends != ENDS or f"{gguf_name}.weight" not in names:
            continue
        kind = gguf_name.rpartition(".")[2]
        if kind == "ssm_conv1d" and row.name.startswith(("nemotron_h", "granite")):
            continue  # a setting says whether it has one
        expected = kind in some and f"blk.0.{kind}.bias" in names
        if (name.endswith("norm") or "_norm" in kind) and modules[name].each is None:
            expected = layer_norms and row.name not in _BARE_NORMS
        if ".indexer." in gguf_name:
            expected = kind == "k_norm" and row.name not in _BARE_NORMS
        if kind in ("ssm_conv1d", "ssm_dt") and row.name in _WITH_STATES:
            expected = True
        if row.name == "phi2" and name in HEADS:
            expected = True
        if expected != (f"{gguf_name}.bias" in names):
            what = "lacks" if expected else "has"
            raise FormatError(
                f"{source.path}: {what} {gguf_name}.bias, unlike any {row.name} model that "
                "transformers knows"
            )


def _kinds(row: Architecture) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return _BIASES.get(row.name, _USUAL_BIASES)
