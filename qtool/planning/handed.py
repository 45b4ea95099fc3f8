"""What goes from block to block beside hidden states, as config.json says: for memory alone.

What really goes is seen when the model is run (qtool/streaming/handed_on.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Classes whose blocks hand on the positions that they choose, whichever of them look at these.
_CHOOSING = {"glm_moe_dsa", "hy_v4", "glm5_next", "glm5_next_text", "mistral_large4_text"}
PER_LAYER = "per_layer"  # in the names of tables whose rows each block has a part of


@dataclass(frozen=True)
class Handed:
    """Numbers of a position."""

    streams: int = 1  # of hidden states
    columns: int = 0  # of values that blocks hand on
    given: int = 0  # of what each block is given for itself, all blocks together


ALONE = Handed()


def handed_on(config: Mapping[str, Any], length: int) -> Handed:
    """Of a model, for texts of this length."""
    from qtool.checkpoints.structure import text_config  # not where only the constants are wanted

    text = text_config(config)

    def number(key: str, otherwise: int = 0) -> int:
        found = text.get(key)
        return found if type(found) is int and found > 0 else otherwise

    streams = max(1, number("hc_mult"), number("hc_count"), number("altup_num_inputs"))
    columns = number("router_hidden_size")
    if text.get("model_type") in _CHOOSING or "shared" in _listed(text, "indexer_types"):
        columns += min(number("index_topk") + max(0, number("index_kpool") - 1), length)
    if number("num_kv_shared_layers"):
        heads = number("num_key_value_heads", 1)
        size = number("head_dim", 256)
        # Of full attention; Gemma 3n has one size alone.
        wide = number("global_head_dim", 512 if streams == 1 else size)
        columns += 2 * (heads * size + number("num_global_key_value_heads", heads) * wide)
    if any(source != layer for layer, source in enumerate(_listed(text, "kv_source_layers"))):
        columns += 2 * number("kv_lora_rank") + number("qk_rope_head_dim")
    given = number("num_hidden_layers") * number("hidden_size_per_layer_input")
    return Handed(streams, columns, given)


def _listed(text: Mapping[str, Any], key: str) -> list[Any]:
    found = text.get(key)
    return found if isinstance(found, list) else []
