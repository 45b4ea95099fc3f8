"""gpt-oss: experts with biases, gate and up interleaved in one tensor, and sinks for attention.

checkpoint  experts.gate_up_proj [experts, width, 2 * inner]: columns of gate and up interleaved
            or its MXFP4, ..._blocks and ..._scales, with rows interleaved
gguf        ffn_gate_exps, ffn_up_exps [experts, inner, width]
"""

from qtool.checkpoints.hf_config import Config
from qtool.gguf.architectures import limits
from qtool.gguf.architectures.keys import USUAL, Key, window_pattern
from qtool.gguf.architectures.modules import BLOCK, OUTER, TWO_NORMS, Module, attention, block
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.from_hf.cuts import Cut
from qtool.gguf.from_hf.row_maps import EVEN_ROWS, ODD_ROWS, RowMap
from qtool.messages.printable import in_json

_EXPERTS = BLOCK + "mlp.experts."
_STORED = ((".weight", ""), (".bias", "_bias"))  # parameters that are no weights of a module


def _expert(name: str, stored: str, rows: RowMap | None = None) -> Module:
    return Module(
        _EXPERTS + name, rows, within=_EXPERTS + stored, ends=_STORED, cut=Cut(transposed=True),
        packed=True,
    )  # fmt: skip


_MODULES = (
    *OUTER,
    *attention(),
    *block(*TWO_NORMS, "mlp.router"),
    Module(BLOCK + "self_attn.sinks", ends=((".weight", ""),), shape=("number of heads",)),
    _expert("gate_proj", "gate_up_proj", EVEN_ROWS),
    _expert("up_proj", "gate_up_proj", ODD_ROWS),
    _expert("down_proj", "down_proj"),
)


def _its_gate(config: Config) -> str | None:
    for name, usual in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config.get(name, usual) != usual:
            return f"{name} is {in_json(config[name])}, and it takes {in_json(usual)}"
    return None


def _biases(config: Config) -> str | None:
    if config.get("attention_bias", True):
        return None
    return "attention_bias is false, and it does not go without biases"


def _rounded_ramp(config: Config) -> str | None:
    rope = config["rope_parameters"]["full_attention"]
    if rope["rope_type"] != "yarn" or rope.get("truncate", True):
        return None
    return (
        "truncate of the rope settings is false, and llama.cpp rounds where YaRN's ramp begins "
        "and ends: some rotations are others there"
    )


GPT_OSS: dict[str, Architecture] = {
    "GptOssForCausalLM": Architecture(
        "gpt-oss",
        _MODULES,
        (
            *USUAL,
            Key("attention.sliding_window", "sliding_window"),
            window_pattern(2),
            Key("expert_feed_forward_length", "intermediate_size"),
        ),
        {"num_key_value_heads": 8, "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 4,
         "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
         "rope_theta": 1.5e5, "vocab_size": 201088,
         "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "truncate": False,
                             "original_max_position_embeddings": 4096}},
        rope=("default", "yarn"), yarn=True, needs_head=True,
        refuse=(_its_gate, _biases, limits.yarn_of_usual_ramp), warn=(_rounded_ramp,),
    ),
}  # fmt: skip
