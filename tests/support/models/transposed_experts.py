"""Experts that a checkpoint keeps as [in, out]."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.models import arch_models
from support.runs import quantizing


def transposed(name: str, folder: Path) -> tuple[Path, Any]:
    """A checkpoint with experts as [experts, in, out], as it is published; and the model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    text = dict(
        vocab_size=arch_models.VOCABULARY, hidden_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    if name == "llama4":
        from transformers import Llama4TextConfig

        config: Any = Llama4TextConfig(
            **text, intermediate_size=48, intermediate_size_mlp=96, num_local_experts=4,
            num_experts_per_tok=1, interleave_moe_layer_step=1,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        from transformers import Qwen3VLMoeConfig

        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        more = dict(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, rope_parameters=rope
        )
        seeing = dict(
            depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64,
            num_position_embeddings=16, deepstack_visual_indexes=[0],
        )  # fmt: skip
        config = Qwen3VLMoeConfig(text_config={**text, **more}, vision_config=seeing)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 3:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    state = load_file(path)
    for key, tensor in state.items():
        if key.endswith("experts.gate_up_proj") and tensor.shape[1:] == (96, 64):
            down = key.replace("gate_up", "down")
            state |= {key: tensor.mT.contiguous(), down: state[down].mT.contiguous()}
    save_file(state, path, {"format": "pt"})
    return quantizing.add_tokenizer(folder), model
