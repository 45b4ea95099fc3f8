"""The healthy artifacts: small models with random weights, stored by qtool's own recipes.

A group of weights that are all positive has the zero 0, which is what wraps around when a tool
counts zeros by another convention; so some rows of `down_proj` are positive.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qtool.hub import resolve
from qtool.messages.progress import Progress
from qtool.quantizing import pipeline
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import Recipe, load
from qtool.runs.gguf_request import GgufRequest
from support.gallery.raw import Raw, write

HIDDEN, INNER, HEADS, KEY_HEADS, WIDTH, VOCABULARY = 256, 384, 4, 2, 64, 96
EXPERTS, EXPERT_INNER = 4, 128
LETTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?()[]{}<>=+-*/_'\"#%\n"
)
SHARD = 300_000  # bytes: some files each

# name of the parent: source, recipe, --set
RECIPES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "awq": ("llama", "w4g128-rtn", ()),
    "awq-gemv": ("llama", "w4g128-rtn", ("awq.layout=gemv",)),
    "awq-tied": ("tied", "w4g128-rtn", ()),
    "awq-experts": ("experts", "w4g128-rtn", ()),
    "awq-mtp": ("mtp", "w4g128-rtn", ()),
    "gptq": ("llama", "w4g128-rtn", ("format=gptq", "weights.symmetric=true")),
    "gptq-v2": ("llama", "w4g128-rtn", ("format=gptq",)),
    "gptq-g64": ("llama", "w4g64-rtn", ("format=gptq", "weights.symmetric=true")),
    "gptq-w3": ("llama", "w3g128-rtn", ()),
    "ct": ("llama", "w8a16-ct", ("weights.bits=4", "weights.group_size=128")),
    "ct-skewed": (
        "llama",
        "w8a16-ct",
        (
            "weights.bits=4",
            "weights.group_size=128",
            "weights.symmetric=false",
        ),
    ),
    "ct-experts": ("experts", "w8a16-ct", ("weights.bits=4", "weights.group_size=128")),
    "int8": ("llama", "w8a8-dynamic", ()),
    "fp8": ("llama", "fp8-dynamic", ()),
    "fp8-block": ("llama", "fp8-block-hf", ()),
    "nvfp4": ("llama", "nvfp4", ()),
    "nvfp4-experts": ("experts", "nvfp4", ()),
    "mxfp4": ("llama", "mxfp4", ()),
}
GGUF = {"gguf": "q4_k_m"}  # of the model that qtool ships


def make(name: str, where: Path) -> Path:
    """A parent, in `where`; its source lies beside it and is made once."""
    if name in GGUF:
        out = where / f"{name}.gguf"
        recipe = load(GGUF[name])
        assert not isinstance(recipe, Recipe)
        run_gguf(GgufRequest("tiny", resolve("tiny"), recipe, out, 1), Progress(quiet=True))
        return out
    source, recipe_name, sets = RECIPES[name]
    recipe = load(recipe_name, sets)
    assert isinstance(recipe, Recipe)
    request = pipeline.Request(
        source, source_of(source, where), recipe, where / name, None, 1, SHARD
    )
    pipeline.run(request, Progress(quiet=True))
    return where / name


def source_of(name: str, where: Path) -> Path:
    """The model that a parent is made of."""
    folder = where / f"source-{name}"
    if not folder.exists():
        folder.mkdir()
        config, shapes = _MODELS[name]()
        write(folder / "model.safetensors", _weights(shapes))
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return folder


def _weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Raw]:
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) * 0.05
        if len(shape) == 1:
            values = 1 + values
        if name.endswith("down_proj.weight"):
            values[:16] = 10 * values[:16] ** 2
        tensors[name] = Raw("F16", shape, values.astype("<f2").tobytes())
    return tensors


def _tokenizer() -> dict[str, Any]:
    vocabulary = {"<unk>": 0} | {letter: number for number, letter in enumerate(LETTERS, start=1)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated",
            "invert": False,
        },
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip


def _config(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": WIDTH,
        "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "dtype": "float16",
    } | more  # fmt: skip


def _attention(block: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{block}.input_layernorm.weight": (HIDDEN,),
        f"{block}.self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
        f"{block}.self_attn.k_proj.weight": (KEY_HEADS * WIDTH, HIDDEN),
        f"{block}.self_attn.v_proj.weight": (KEY_HEADS * WIDTH, HIDDEN),
        f"{block}.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
        f"{block}.post_attention_layernorm.weight": (HIDDEN,),
    }


def _mlp(name: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (inner, HIDDEN),
        f"{name}.up_proj.weight": (inner, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, inner),
    }


Model = tuple[dict[str, Any], dict[str, tuple[int, ...]]]


def _llama(tied: bool = False) -> Model:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for block in ("model.layers.0", "model.layers.1"):
        shapes |= _attention(block) | _mlp(f"{block}.mlp", INNER)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return _config(tie_word_embeddings=tied), shapes


def _experts() -> Model:
    config, shapes = _llama()
    shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    for block in ("model.layers.0", "model.layers.1"):
        shapes[f"{block}.self_attn.q_norm.weight"] = (WIDTH,)
        shapes[f"{block}.self_attn.k_norm.weight"] = (WIDTH,)
        shapes[f"{block}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for number in range(EXPERTS):
            shapes |= _mlp(f"{block}.mlp.experts.{number}", EXPERT_INNER)
    return config | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_INNER,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    }, shapes  # fmt: skip


def _mtp() -> Model:
    """A third block that predicts a second token, as GLM's and DeepSeek's models have one."""
    config, shapes = _llama()
    extra = "model.layers.2"
    shapes |= _attention(extra) | _mlp(f"{extra}.mlp", INNER)
    shapes |= {
        f"{extra}.enorm.weight": (HIDDEN,), f"{extra}.hnorm.weight": (HIDDEN,),
        f"{extra}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"{extra}.shared_head.norm.weight": (HIDDEN,),
    }  # fmt: skip
    return config | {
        "architectures": ["MtpLikeForCausalLM"], "model_type": "mtp_like",
        "auto_map": {"AutoConfig": "configuration_mtp_like.MtpLikeConfig"},
        "num_nextn_predict_layers": 1,
    }, shapes  # fmt: skip


_MODELS = {
    "llama": _llama,
    "tied": lambda: _llama(tied=True),
    "experts": _experts,
    "mtp": _mtp,
}
