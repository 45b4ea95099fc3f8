"""Runs where transformers can load artifacts: what it finds in them, and what it computes.

Argument: [[artifact, the same dequantized, dtype], ...] as JSON. Prints of each the tensors of both
that it missed or had no use for, and how far its logits of a short text are apart:
[[keys, the largest difference by the spread], ...].
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

TOKENS = torch.arange(5, 29)[None] % 90


def loaded(folder: str, dtype: str) -> tuple[list[str], torch.Tensor]:
    """Keys, and logits; the text has no image, of which a class with a tower needs none."""
    seeing = type(AutoConfig.from_pretrained(folder)) in AutoModelForImageTextToText._model_mapping
    family: Any = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    model, info = family.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True
    )
    keys = [
        f"{kind}: {key}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for key in sorted(map(str, info[kind]))
    ]
    with torch.no_grad():
        return keys, model.eval()(input_ids=TOKENS, use_cache=False).logits.float()


found = []
for folder, plain, dtype in json.loads(sys.argv[1]):
    keys, logits = loaded(folder, dtype)
    more, wanted = loaded(plain, dtype)
    found.append([keys + more, float((logits - wanted).abs().max() / wanted.std())])
print(json.dumps(found))
