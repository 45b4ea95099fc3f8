"""Every figure of `qtool eval` on smollm2-768, against transformers and sums in a few lines.

The artifact is read by code of this file or by the gguf package, transformers runs both models
whole in float32, and the sums are over whole logits in float64. QTOOL_TEST_MODELS names the folder
with smollm2-768; without it the model is built from the package index.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qtool.messages.progress import Progress
from qtool.native.library import default_threads
from qtool.quality.evaluate import Protocol, evaluate
from qtool.texts.source import default_text

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

WINDOWS, LENGTH, LIMIT = 3, 512, 1e-4
State = dict[str, torch.Tensor]


def of_awq(folder: Path) -> State:
    """AWQ's GEMM layout: 8 codes in a word, in the order 0 2 4 6 1 3 5 7, zeros likewise."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["version"].lower() == "gemm" and config["bits"] == 4
    stored = load_file(folder / "model.safetensors")
    found = {}

    def codes(words: np.ndarray) -> np.ndarray:
        shifts = np.array([0, 4, 1, 5, 2, 6, 3, 7]) * 4
        return ((words.view(np.uint32)[:, :, None] >> shifts) & 15).reshape(len(words), -1)

    for name, values in stored.items():
        module, _, last = name.rpartition(".")
        if last == "qweight":
            zero = codes(stored[f"{module}.qzeros"]).astype(np.float32)
            scale = stored[f"{module}.scales"].astype(np.float32)
            size = config["group_size"]
            weight = codes(values).astype(np.float32) - np.repeat(zero, size, 0)
            found[f"{module}.weight"] = torch.from_numpy((weight * np.repeat(scale, size, 0)).T)
        elif last not in ("qzeros", "scales"):
            found[name] = torch.from_numpy(values.astype(np.float32))
    return found


def of_gguf(file: Path) -> State:
    """llama.cpp's names, and its order of the rows of q and k."""
    import gguf

    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    outside = {
        "token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight",
        "output_norm.weight": "model.norm.weight",
    }  # fmt: skip
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in outside:
            found[outside[tensor.name]] = torch.from_numpy(np.array(values))
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):  # 64 rows a head, in pairs there, in halves here
            heads = values.reshape(-1, 32, 2, values.shape[-1])
            values = heads.swapaxes(1, 2).reshape(values.shape)
        found[f"model.layers.{layer}.{names[kind]}.weight"] = torch.from_numpy(np.array(values))
    return found


def log_probabilities(model: Path, state: State | None, tokens: np.ndarray) -> np.ndarray:
    """float64 [windows, length, vocabulary]."""
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if state is not None:
        missing, extra = found.load_state_dict(state, strict=False)
        assert not missing and not extra
    torch.set_num_threads(default_threads())
    with torch.no_grad():
        logits = torch.cat([found(torch.from_numpy(window[None])).logits for window in tokens])
    return torch.log_softmax(logits.double(), -1).numpy()


def figures(p: np.ndarray, q: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """Of log p, log q."""
    kld = np.stack([(np.exp(a) * (a - b)).sum(-1) for a, b in zip(p, q, strict=True)])
    apart = np.stack([np.abs(np.exp(a) - np.exp(b)).sum(-1) / 2 for a, b in zip(p, q, strict=True)])
    next_p, next_q = (
        np.take_along_axis(x[:, :-1], tokens[:, 1:, None], -1)[..., 0] for x in (p, q)
    )
    accepted = float(1 - apart.mean())
    return {
        "perplexity": math.exp(-next_q.mean()),
        "reference_perplexity": math.exp(-next_p.mean()),
        "kld.mean": float(kld.mean()),
        "kld.median": float(np.median(kld)),
        "kld.p99": float(np.quantile(kld, 0.99)),
        "kld.max": float(kld.max()),
        "top1_agreement": float((p.argmax(-1) == q.argmax(-1)).mean()),
        "rms_dp": math.sqrt(np.square(np.exp(next_q) - np.exp(next_p)).mean()),
        "acceptance": accepted,
        "tokens_per_pass.2": 1 + accepted + accepted**2,
    }


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "q4_k_m"])
def test_figures(recipe: str, models: Path, quantize: Callable[..., Path], tmp_path: Path) -> None:
    model = models / "smollm2-768"
    if recipe.startswith("q"):
        from support.gguf import gguf_from_hf

        artifact = tmp_path / "model.gguf"
        gguf_from_hf.write(model, artifact, recipe)
        state = of_gguf(artifact)
    else:
        artifact = quantize(model, recipe)
        state = of_awq(artifact)
    text = tmp_path / "text.txt"
    text.write_text(default_text()[:30_000], encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(model).encode(text.read_text(), add_special_tokens=False)
    tokens = np.array(ids[: WINDOWS * LENGTH]).reshape(WINDOWS, LENGTH)
    p, q = (log_probabilities(model, weights, tokens) for weights in (None, state))
    expected = figures(p, q, tokens)
    protocol = Protocol("plain", text, WINDOWS, LENGTH)
    (found,) = evaluate([artifact], model, protocol, default_threads(), Progress(quiet=True))
    for key, value in expected.items():
        ours = found.found
        for step in key.split("."):
            ours = ours[step]
        assert isinstance(ours, float)
        print(f"{recipe} {key}: {ours:.8g}, {value:.8g} ({ours / value - 1:+.1e})")
        assert ours == pytest.approx(value, rel=LIMIT), key
