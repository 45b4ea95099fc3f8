"""Which checkpoints can be written as GGUF: one row per architecture of transformers.

A row says what llama.cpp calls the architecture, which modules a checkpoint has and how their rows
lie (`modules`, `shapes`), which metadata keys come from which settings (`keys`), what the settings
are where config.json is silent, and what llama.cpp cannot do (`limits`). GGUF names of tensors come
from the gguf package's TensorNameMap. Nothing here reads a tensor; conversion in both directions
reads this table. Source: llama.cpp (conversion/, src/models/) and the configuration
classes of transformers.
"""

from difflib import get_close_matches

from qtool.checkpoints.hf_config import Config, text_settings
from qtool.errors import UnsupportedError
from qtool.gguf.architectures.bailing_hybrid import BAILING_HYBRID
from qtool.gguf.architectures.bamba import BAMBA
from qtool.gguf.architectures.chameleon import CHAMELEON
from qtool.gguf.architectures.cohere2_moe import COHERE2_MOE
from qtool.gguf.architectures.dbrx import DBRX
from qtool.gguf.architectures.deci import DECI
from qtool.gguf.architectures.deepseek_v4 import DEEPSEEK_V4
from qtool.gguf.architectures.dense import DENSE
from qtool.gguf.architectures.dots3_note import DOTS3_NOTE
from qtool.gguf.architectures.falcon_h1 import FALCON_H1
from qtool.gguf.architectures.gemma import GEMMA
from qtool.gguf.architectures.gemma3n import GEMMA3N
from qtool.gguf.architectures.gemma4 import GEMMA4
from qtool.gguf.architectures.glm import GLM
from qtool.gguf.architectures.glm5_next import GLM5_NEXT
from qtool.gguf.architectures.gpt_oss import GPT_OSS
from qtool.gguf.architectures.granite_4 import GRANITE_4, only_attends
from qtool.gguf.architectures.granite_windows import GRANITE_WINDOWS
from qtool.gguf.architectures.hrm_text import HRM_TEXT
from qtool.gguf.architectures.hunyuan import HUNYUAN
from qtool.gguf.architectures.hy_v4 import HY_V4
from qtool.gguf.architectures.indexed import INDEXED
from qtool.gguf.architectures.kimi_linear import KIMI_LINEAR
from qtool.gguf.architectures.laguna import LAGUNA
from qtool.gguf.architectures.latent_attention import LATENT_ATTENTION
from qtool.gguf.architectures.latent_mlp import LATENT_MLP
from qtool.gguf.architectures.layer_norms import LAYER_NORMS
from qtool.gguf.architectures.linear_attention import LINEAR_ATTENTION
from qtool.gguf.architectures.llama4 import LLAMA4
from qtool.gguf.architectures.mamba import MAMBA
from qtool.gguf.architectures.mimo_v2 import MIMO_V2
from qtool.gguf.architectures.minimax_01 import MINIMAX_01
from qtool.gguf.architectures.minimax_m3 import MINIMAX_M3
from qtool.gguf.architectures.multimodal import AROUND, INSIDE, with_decoder
from qtool.gguf.architectures.muse_glimmer import MUSE_GLIMMER
from qtool.gguf.architectures.nemotron_h import NEMOTRON_H, has_experts
from qtool.gguf.architectures.nemotron_puzzle import NEMOTRON_PUZZLE
from qtool.gguf.architectures.older import OLDER
from qtool.gguf.architectures.qwen4_exp import QWEN4_EXP
from qtool.gguf.architectures.recent import RECENT
from qtool.gguf.architectures.remote_code import REMOTE_CODE
from qtool.gguf.architectures.remote_llamas import REMOTE_LLAMAS
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.short_convolutions import SHORT_CONVOLUTIONS
from qtool.gguf.architectures.sparse import SPARSE
from qtool.gguf.architectures.step3 import STEP3
from qtool.gguf.architectures.vision import VISION

__all__ = ["TABLE", "Architecture", "architecture_of"]

TABLE: dict[str, Architecture] = {
    **DENSE, **LAYER_NORMS, **GEMMA, **GEMMA3N, **GEMMA4, **VISION, **SPARSE, **LINEAR_ATTENTION,
    **LATENT_ATTENTION, **GPT_OSS, **LLAMA4, **INDEXED, **SHORT_CONVOLUTIONS, **HUNYUAN,
    **OLDER, **RECENT, **NEMOTRON_H, **GRANITE_4, **MAMBA, **FALCON_H1, **COHERE2_MOE,
    **LATENT_MLP, **DBRX, **GRANITE_WINDOWS, **BAMBA, **REMOTE_CODE, **REMOTE_LLAMAS, **DECI,
    **HRM_TEXT,
    **MIMO_V2, **QWEN4_EXP, **LAGUNA, **KIMI_LINEAR, **HY_V4, **DOTS3_NOTE, **GLM5_NEXT,
    **STEP3, **MINIMAX_M3, **DEEPSEEK_V4, **MINIMAX_01, **BAILING_HYBRID,
    **NEMOTRON_PUZZLE,
    **GLM, **MUSE_GLIMMER, **CHAMELEON, **INSIDE,
}  # fmt: skip
# What older checkpoints, or those of other tools, call the same.
TABLE |= {
    other: TABLE[name]
    for other, name in {
        "BloomModel": "BloomForCausalLM",
        "ChameleonForCausalLM": "ChameleonForConditionalGeneration",
        "Dots3NoteTextForCausalLM": "Dots3NoteForCausalLM",
        "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
        "LFM2ForCausalLM": "Lfm2ForCausalLM",
        "LLaMAForCausalLM": "LlamaForCausalLM",
    }.items()
}

# What llama.cpp has an architecture for, and computes otherwise whatever the settings.
_PHI_MOE = (
    "phimoe subtracts no mean in its norms, and gives a token's two experts weights that add up to "
    "one, where those of the model are nearly one each"
)
_OTHERWISE = {
    "PhiMoEForCausalLM": _PHI_MOE,
    "PhimoeForCausalLM": _PHI_MOE,
    "BitNetForCausalLM": "bitnet computes silu, where the model squares what is above zero",
}

# Decoders that are told from others of a class by their own settings.
_INSIDE = {"ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM"}


def variant(name: str | None, config: Config) -> str | None:
    """The table's name of a class that llama.cpp has several architectures for."""
    if name is not None and name in AROUND:
        return with_decoder(name, config)
    inside = text_settings(config).get("model_type")
    if inside in _INSIDE:
        return _INSIDE[inside]
    whole = TABLE[name].completed(config) if name in NEMOTRON_H or name in GRANITE_4 else {}
    if name == "NemotronHForCausalLM" and has_experts(whole):
        return f"{name} with experts"
    if name == "GraniteMoeHybridForCausalLM" and only_attends(whole):
        return f"{name} of attention"
    return name


def class_named(config: Config) -> str | None:
    """The table's name of the class that config.json names."""
    named = config.get("architectures")
    return variant(str(named[0]) if isinstance(named, list) and named else None, config)


def architecture_of(config: Config, where: str) -> Architecture:
    """The row for a checkpoint; UnsupportedError names the table for one that is not in it."""
    found = class_named(config)
    if found in TABLE:
        return TABLE[found]
    known = [name for name in TABLE if " " not in name]
    if found is None:
        raise UnsupportedError(
            f"{where}: config.json names no architecture; to be written as GGUF, `architectures` "
            f"should be a list with one of {len(known)} that are known, such as {known[0]} or "
            f"{known[4]}: that of the model's own config.json"
        )
    if found in _OTHERWISE:
        raise UnsupportedError(
            f"{where}: llama.cpp does not compute what this checkpoint asks for: its "
            f"{_OTHERWISE[found]}; recipes of safetensors, such as w4g128-gptq, take it"
        )
    stems = {name.partition("For")[0]: name for name in known}
    near = [stems[stem] for stem in get_close_matches(found.partition("For")[0], stems, 3)]
    like = f" (it is nearest to {', '.join(near)})" if near else ""
    raise UnsupportedError(
        f"{where}: config.json names the architecture {found}, which is not in the table of "
        f"{len(known)} that can be written as GGUF{like}; recipes of safetensors, such as "
        "w4g128-gptq or w4a16-ct, take any decoder, and a new architecture is a few lines of "
        "qtool/gguf/architectures/"
    )
