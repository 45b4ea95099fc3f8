"""How many bytes the record of scales (`qtool.scales`) will have, guessed before they are found.

    base64 of each vector once + its length, and a line for each tensor that is scaled

Which fold takes which scales is proved while the run goes on; here it is what decoders usually
allow: norms take those of attention and of the MLP; where inputs of other matrices are scaled, too,
values take those of attention's output, and the matrix before the last one those of that.
"""

from collections.abc import Sequence

from qtool.gguf.planned import PlannedTensor
from qtool.gguf_mixtures.kinds import layer_of
from qtool.recipe.gguf import GgufRecipe

_LINE_BYTES = 23  # quotes, two numbers of vectors, true or false
_LENGTH_BYTES = 6
# What reads a norm's output, by the kind of the norm: attn_q, ffn_up_exps, ...
_READERS = {
    "attn_norm": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "ffn_norm": ("ffn_gate", "ffn_up", "ffn_gate_inp"),
}
_ENDS = ("_exps", "_shexp")


def scales_bytes(recipe: GgufRecipe, tensors: Sequence[PlannedTensor]) -> int:
    """Of the record, about; 0 where nothing is scaled."""
    chain = set(recipe.scaling)
    if not chain:
        return 0
    norms = bool(chain & {"smooth", "awq"})
    others = "awq" in chain or ("smooth" in chain and recipe.smooth.sites == "all")
    narrow = {layer_of(t.name): t.source.in_features for t in tensors if ".ffn_down" in t.name}
    vectors: dict[tuple[int, str], int] = {}
    lines = 0
    for tensor in tensors:
        layer, shape = layer_of(tensor.name), tensor.source.shape
        if layer < 0 or not shape or not tensor.name.endswith(".weight"):
            continue
        kind = tensor.name.split(".")[2]
        for end in _ENDS:
            kind = kind.removesuffix(end)
        matrices = shape[0] if len(shape) == 3 else 1
        scaled = False
        for norm, readers in _READERS.items():
            if norms and kind in (norm, *readers):
                vectors[layer, norm] = shape[-1]
                scaled = True
        if others and kind in ("attn_output", "ffn_down"):
            vectors[layer, tensor.name] = matrices * shape[-1]
            scaled = True
        # Rows that take the scales of what reads them: the same vector, but where heads are read by
        # several queries, or where matrices are fused.
        rows = shape[-2] if len(shape) > 1 else 0
        several = kind == "attn_v" and rows != shape[-1]
        fused = kind == "attn_qkv" or (kind == "ffn_up" and rows != narrow.get(layer))
        if others and (several or fused):
            vectors[layer, f"{kind} rows"] = rows
        if "smooth-attention" in chain and kind in ("attn_q", "attn_k"):
            vectors[layer, kind] = shape[0]
            scaled = True
        if scaled:
            names = tensor.source.origin or (tensor.name,) * matrices
            lines += sum(len(name) + _LINE_BYTES for name in names)
    return 4 * sum(vectors.values()) // 3 + _LENGTH_BYTES * len(vectors) + lines
