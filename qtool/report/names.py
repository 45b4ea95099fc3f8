"""What a tensor is, told from its name, for the rows and columns of a report.

`kind` is the row of a heat map (q, k, v, o, gate, up, down, ...), `block` its column, `component`
the part of a size bar. Names of Hugging Face checkpoints and of GGUF files are both understood; an
unknown one keeps its own last word as its kind.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from qtool.formats.layer_names import is_head

EMBEDDING, ATTENTION, MLP, EXPERTS, NORMS, HEAD, OTHER = (
    "embedding", "attention", "mlp", "experts", "norms", "head", "other",
)  # fmt: skip
COMPONENTS = (EMBEDDING, ATTENTION, MLP, EXPERTS, NORMS, HEAD, OTHER)

_KINDS = {
    "q": ("q_proj", "attn_q", "wq", "query"),
    "k": ("k_proj", "attn_k", "wk", "key"),
    "v": ("v_proj", "attn_v", "wv", "value"),
    "qkv": ("qkv_proj", "attn_qkv", "query_key_value", "c_attn", "Wqkv"),
    "o": ("o_proj", "attn_output", "wo"),
    "gate": ("gate_proj", "ffn_gate", "ffn_gate_exps", "ffn_gate_shexp", "w1"),
    "up": ("up_proj", "ffn_up", "ffn_up_exps", "ffn_up_shexp", "w3", "fc1", "dense_h_to_4h"),
    "gate+up": ("gate_up_proj", "ffn_gate_up_exps"),
    "down": (
        "down_proj", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "w2", "fc2", "dense_4h_to_h",
    ),
}  # fmt: skip
_KIND_OF = {word: kind for kind, words in _KINDS.items() for word in words}
_ORDER = {kind: place for place, kind in enumerate(_KINDS)}
_INDEXED = re.compile(r"(.+?)\.(\d+)\.(.+)", re.ASCII | re.DOTALL)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_forward|fc[12]\b", re.IGNORECASE)
_LONGEST = 32
_MOST_DIGITS = 6  # of a block's number; a longer one is no number


@dataclass(frozen=True)
class Place:
    """One tensor's."""

    component: str
    kind: str  # "q", "experts down", "head", ...
    block: int | None  # None outside the decoder


def decoder_prefix(sizes: Iterable[tuple[str, int]]) -> str | None:
    """Of (name, numbers): the prefix of the numbered list that holds most, such as model.layers."""
    totals: dict[str, int] = defaultdict(int)
    for name, size in sizes:
        if found := _INDEXED.match(name):
            totals[found[1]] += size
    return max(totals, key=lambda prefix: (totals[prefix], prefix)) if totals else None


def place(name: str, prefix: str | None) -> Place:
    """`prefix` is what decoder_prefix found."""
    found = _INDEXED.match(name)
    if found is None or found[1] != prefix or len(found[2]) > _MOST_DIGITS:
        return _outside(name, found is None)
    block, inner = int(found[2]), found[3]
    parts = inner.split(".")
    module = parts[:-1] if parts[-1] in ("weight", "bias") and len(parts) > 1 else parts
    last = module[-1]
    experts = "experts" in parts or last.endswith("_exps")
    shared = "shared_expert" in inner or "shared_experts" in parts or last.endswith("_shexp")
    kind = _KIND_OF.get(last, _shortened(last))
    if last in ("out_proj", "dense", "c_proj") and _ATTENTION.search(inner):
        kind = "o"
    if shared:
        return Place(EXPERTS, f"shared {kind}", block)
    if experts:
        return Place(EXPERTS, f"experts {kind}", block)
    if "norm" in last or last.startswith("ln"):
        return Place(NORMS, kind, block)
    if _ATTENTION.search(inner):
        return Place(ATTENTION, kind, block)
    if last == "ffn_gate_inp" or ("gate" in module[-2:] and "mlp" in parts) or "router" in parts:
        return Place(OTHER, "router", block)
    return Place(MLP if _MLP.search(inner) else OTHER, kind, block)


def _outside(name: str, unnumbered: bool) -> Place:
    module = name.removesuffix(".weight").removesuffix(".bias")
    last = module.rsplit(".", 1)[-1]
    if is_head(module):
        return Place(HEAD, HEAD, None)
    if unnumbered and ("embed" in last or "embd" in last or last in ("wte", "wpe")):
        return Place(EMBEDDING, EMBEDDING, None)
    if "norm" in last or last.startswith("ln_"):
        return Place(NORMS, _shortened(last), None)
    return Place(OTHER, _shortened(last), None)


def _shortened(word: str) -> str:
    """A name that no model class has may be of any length."""
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."


def kind_order(kind: str) -> tuple[int, str]:
    """For sorting: as a block computes them, experts after the rest, unknown ones last."""
    group, _, bare = kind.rpartition(" ")
    known = _ORDER.get(bare, len(_ORDER) + (kind == HEAD))
    return known + 100 * (("", "shared", "experts").index(group) if group in (
        "", "shared", "experts") else 3), kind  # fmt: skip
