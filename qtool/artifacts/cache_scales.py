"""Scales of keys and values: tensors of the artifact that no tensor of the source becomes.

    <attention>.k_scale, <attention>.v_scale    float32 [1], or [heads, 1, 1] with one a head

They are planned from names and config.json: the attention of a block is the module that holds the
projection of its keys. Blocks without one (linear attention, state spaces) keep no keys, and get no
scales. The names and shapes are those that compressed-tensors writes and vLLM reads.

Keys and values are measured in the one call that computes attention (torch's
scaled_dot_product_attention). Attention with sinks (gpt-oss) or with capped logits (Gemma 2) has no
such call, which headers and config.json tell; of the rest the class of the model tells it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qtool.checkpoints.roles import Role
from qtool.checkpoints.structure import text_config
from qtool.errors import UnsupportedError
from qtool.formats.safetensors_file import TensorSpec

# What makes keys, alone or together with queries and values.
_KEYS = ("k_proj", "qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn", "wqkv", "qkv",
         "att_proj")  # fmt: skip
_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj")
_SINKS = ("sinks", "attention_sink_bias")
_CAPPED = "attn_logit_softcapping"


@dataclass(frozen=True)
class Kept:
    """The attention of one block, and how many heads its keys have."""

    attention: str
    heads: int
    each: bool  # a scale for each head

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its scales, as stored."""
        return (self.heads, 1, 1) if self.each else (1,)

    def specs(self) -> list[TensorSpec]:
        """Its two tensors."""
        return [TensorSpec(f"{self.attention}.{which}_scale", "F32", self.shape) for which in "kv"]


def key_heads(config: Mapping[str, Any]) -> int | None:
    """How many heads of keys config.json says there are."""
    text = text_config(config)
    for name in ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head"):
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def attention_of(names: Iterable[str], config: Mapping[str, Any], each: bool) -> dict[str, Kept]:
    """The attention of each block, by the name of the tensor that its keys are made with.

    names: of a decoder's matrices. UnsupportedError where keys are kept in another form.
    """
    heads = key_heads(config)
    found: dict[str, Kept] = {}
    for name in names:
        module = name.removesuffix(".weight")
        attention, _, last = module.rpartition(".")
        if last in _LATENT:
            raise UnsupportedError(
                f"{name}: this model keeps latent vectors in the place of keys and values, for "
                "which no format has scales; remove kv_cache from the recipe"
            )
        if last in _KEYS and attention:
            if heads is None:
                raise UnsupportedError(
                    "config.json does not say how many heads of keys the model has "
                    "(num_key_value_heads), which scales of the KV cache need"
                )
            found[name] = Kept(attention, heads, each)
    if not found:
        raise UnsupportedError(
            "no tensor is known to make keys (such as ...self_attn.k_proj.weight), so the scales "
            "of the KV cache have no place; remove kv_cache from the recipe"
        )
    return found


def unmeasurable(attention: str) -> UnsupportedError:
    """That nothing is seen of what this attention keeps."""
    return UnsupportedError(
        f"{attention}: attention of this model is not one call, so its keys and values cannot be "
        "measured; remove kv_cache from the recipe"
    )


def planned_scales(
    roles: Mapping[str, Role], config: Mapping[str, Any], each: bool
) -> dict[str, Kept]:
    """attention_of() the tensors inside the decoder's blocks; UnsupportedError, too, where it is
    known not to be one call."""
    inside = [name for name, role in roles.items() if role.block is not None]
    found = attention_of([name for name in inside if name.endswith(".weight")], config, each)
    sinks = any(name.rpartition(".")[2] in _SINKS for name in inside)
    if sinks or text_config(config).get(_CAPPED):
        raise unmeasurable(next(iter(found.values())).attention)
    blocks: dict[int | None, str] = {}
    for name in found:
        other = blocks.setdefault(roles[name].block, name)
        if other != name:
            raise UnsupportedError(
                f"{other} and {name} both make keys in one block, whose scales cannot be told "
                "apart; remove kv_cache from the recipe"
            )
    return found
