"""GLM 4 and the decoders of GLM 4V, GLM-4.5V and GLM-OCR.

llama.cpp rotates neighbouring elements of a head. Where a rotation has sections of time, height and
width, it knows halves only, so that the rows of those heads are put in another order:

    checkpoint  x0 y0 x1 y1 ... and what is not rotated
    gguf        x0 x1 ... y0 y1 ... and what is not rotated
"""

from dataclasses import replace

import numpy as np

from qtool.checkpoints.hf_config import Config, head_width, number
from qtool.errors import SettingError
from qtool.gguf.architectures import keys, limits, sparse_keys
from qtool.gguf.architectures.modules import (
    BLOCK,
    OUTER,
    TWO_NORMS,
    Module,
    attention,
    block,
    in_blocks,
    is_mtp,
)
from qtool.gguf.architectures.mtp import AHEAD
from qtool.gguf.architectures.row import Architecture
from qtool.gguf.architectures.sections import IF_SAID, has_sections
from qtool.gguf.architectures.sparse import SPARSE
from qtool.gguf.architectures.sparse_keys import blocks_with, with_own
from qtool.gguf.from_hf.row_maps import RowMap, Rows

_PLAIN_MOE = SPARSE["Glm4MoeForCausalLM"]
_NEXT = "num_nextn_predict_layers"


def _by_halves(module: Module, config: Config) -> Module:
    """Of a head's rotated rows first the even ones, then the odd ones."""
    if not has_sections(config):
        return module
    rope = config["rope_parameters"]["full_attention"]
    given = rope.get("partial_rotary_factor") is not None
    share = number(rope, "partial_rotary_factor") if given else 1.0
    half = int(share * head_width(config)) // 2
    if not 0 < 2 * half <= head_width(config):
        raise SettingError("partial_rotary_factor", f"is {share}, expected a share")

    def forward(rows: Rows, groups: int, total: int) -> Rows:
        k = rows % (total // groups)
        source: Rows = rows - k + k % half * 2 + k // half
        return np.where(k < 2 * half, source, rows)

    def inverse(rows: Rows, groups: int, total: int) -> Rows:
        k = rows % (total // groups)
        target: Rows = rows - k + k % 2 * half + k // 2
        return np.where(k < 2 * half, target, rows)

    heads = "num_attention_heads" if module.name.endswith("q_proj") else "num_key_value_heads"
    return replace(module, rows=RowMap(forward, inverse, heads, unit=2))


_AT = BLOCK + "self_attn."
_GLM4 = (
    *OUTER,
    *(Module(_AT + name, fit=_by_halves) for name in ("q_proj", "k_proj")),
    *attention()[2:],
    *block("mlp.gate_up_proj", "mlp.down_proj", *TWO_NORMS, "post_self_attn_layernorm",
           "post_mlp_layernorm"),
    *in_blocks(is_mtp, AHEAD),
)  # fmt: skip

# fmt: off
_ROW = Architecture(
    "glm4", _GLM4,
    (*with_own(keys.USUAL, blocks_with(_NEXT)), sparse_keys.NEXTN, keys.ROTATED_OF_HEAD,
     IF_SAID),
    {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
     "rms_norm_eps": 1.5625e-07, "rope_theta": 1e4, "rope_partial_rotary_factor": 0.5},
    warn=(limits.no_dynamic_rope,), mtp=_NEXT, ahead_needed=True,
)
_MOE = replace(_PLAIN_MOE, keys=(*_PLAIN_MOE.keys, IF_SAID))
_WITHOUT_NORMS = {name: one for name, one in _MOE.defaults.items() if name != "use_qk_norm"}
_OF_QWEN = {"rms_norm_eps": 1e-5, "rope_theta": 1e4}

GLM: dict[str, Architecture] = {
    "Glm4ForCausalLM": _ROW,
    "Glm4MoeForCausalLM": _MOE,
    "Glm4vForConditionalGeneration": replace(
        _ROW, defaults={**_OF_QWEN, "num_key_value_heads": 2, "max_position_embeddings": 32768},
    ),
    "GlmOcrForConditionalGeneration": replace(
        _ROW, defaults={**_OF_QWEN, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    "Glm4vMoeForConditionalGeneration": replace(
        _MOE, defaults={**_WITHOUT_NORMS, "max_position_embeddings": 65536},
    ),
}
# fmt: on
