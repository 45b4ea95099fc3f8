"""Rotations as llama.cpp has them, in place of those of classes that rotate otherwise."""

from typing import Any

# Whose class rotates otherwise than llama.cpp: Hunyuan 4 halves of heads in place of neighbours, as
# no other engine does, and the indexer of dots3-note the other way round.
ROTATED = ("hy-v4", "dots3-note")


def rotate_as_there(name: str, monkeypatch: Any) -> None:
    """As llama.cpp does."""
    import torch
    from transformers.models.dots3_note import modeling_dots3_note as dots
    from transformers.models.hy_v4 import modeling_hy_v4 as hunyuan

    usual = dots.apply_rotary_pos_emb_interleave

    def neighbours(x: Any, cos: Any, sin: Any) -> Any:
        half = x.shape[-1] // 2
        cos, sin, even, odd = cos[..., :half], sin[..., :half], x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

    def of_hunyuan(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return neighbours(q, cos, sin), neighbours(k, cos, sin)

    def of_dots(q: Any, k: Any, cos: Any, sin: Any, **axis: int) -> Any:
        if not axis:  # in attention itself
            return usual(q, k, cos, sin)
        cos, sin = (x.unsqueeze(axis["unsqueeze_dim"]) for x in (cos, sin))
        return tuple(x * cos + hunyuan.rotate_half(x) * sin for x in (q, k))

    if name == "hy-v4":
        monkeypatch.setattr(hunyuan, "apply_rotary_pos_emb", of_hunyuan)
    else:
        monkeypatch.setattr(dots, "apply_rotary_pos_emb_interleave", of_dots)
