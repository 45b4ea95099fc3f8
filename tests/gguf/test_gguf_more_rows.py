"""Rows of the table by their settings alone: how rows of matrices lie, what is refused, which
special tokens are written, and which tensors a file's metadata ask for."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import SourceError, UnsupportedError
from qtool.formats.gguf_values import u32
from qtool.gguf.architectures import TABLE
from qtool.gguf.from_hf import source as from_hf
from qtool.gguf.from_hf.source import gguf_names, hf_source
from qtool.gguf.tokenizer.keys import PREFIX, tokenizer_metadata
from qtool.verification.gguf.tensors import check_tensors
from support.gguf import gguf_models
from support.models import small_tokenizers as small
from support.models.hf_arrays import LLAMA, llama, write
from support.models.small_tokenizers import SIZE

_SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
    "intermediate_size": 96, "vocab_size": 96,
}  # fmt: skip
_YARN = {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0],
         "original_max_position_embeddings": 32}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("GlmForCausalLM", {"head_dim": 32}, "head_dim is 32, and it takes width / heads"),
    ("SolarOpenForCausalLM", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1, and it"),
    ("YoutuForCausalLM", {"rope_interleave": False}, "rope_interleave is false"),
    ("YoutuForCausalLM", {"mlp_bias": True}, "mlp_bias is true"),
    ("MiniCPM3ForCausalLM", {"scale_depth": 1.5}, "scale_depth is 1.5, and it takes 1.4"),
    ("MiniCPM3ForCausalLM", {"q_lora_rank": None}, "it takes query latents"),
    ("MiniCPM3ForCausalLM", {"rope_scaling": _YARN}, "its longrope goes from 32 tokens to 64"),
    ("GPTBigCodeForCausalLM", {"scale_attn_weights": False}, "scale_attn_weights is false"),
    ("DbrxForCausalLM", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "is 2.0, and it"),
    ("GraniteSWAForCausalLM", {"layer_rope_theta": [1e4, 0, 2e4]}, "it has one for all"),
    ("BambaForCausalLM", {"mamba_expand": 3}, "state spaces are 192 wide, and it takes 128"),
    ("HrmTextForCausalLM", {"attention_bias": True}, "attention_bias is true"),
    ("MiniCPMForCausalLM", {"rope_scaling": {**_YARN, "factor": 2.0}}, "or multiplies attention"),
    ("ExaoneForCausalLM", {"partial_rotary_factor": 0.5}, "it rotates 0.5 of a head"),
    ("BailingMoeForCausalLM", {"norm_head": True}, "norm_head is true, and it takes false"),
    ("BailingMoeForCausalLM", {"use_qkv_bias": True}, "use_qkv_bias is true"),
    ("BailingMoeV2ForCausalLM", {"moe_shared_expert_intermediate_size": 5}, "shared experts are 5"),
    ("SmallThinkerForCausalLM", {"sliding_window_layout": [0, 1, 1]}, "size is None, and it takes"),
    ("SmallThinkerForCausalLM", {"rope_layout": [0, 1, 1]}, r"rope_layout is not \[1, 1, 1\]"),
    ("SmallThinkerForCausalLM", {"moe_layer_layout": [0, 1, 1]}, "some blocks have no experts"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "own", "said"), REFUSED)
def test_refused(name: str, own: dict[str, Any], said: str) -> None:
    config = {**LLAMA, **_SMALL, "architectures": [name], **own}
    row = TABLE[name]
    whole = row.completed(config)
    problems = [text for check in row.refuse if (text := check(whole)) is not None]
    assert re.search(said, "; ".join(problems))


@pytest.mark.parametrize("name", ["PhiMoEForCausalLM", "PhimoeForCausalLM", "BitNetForCausalLM"])
def test_what_llama_cpp_computes_otherwise(name: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", {**LLAMA, "architectures": [name]}, llama())
    with pytest.raises(UnsupportedError, match="does not compute what this checkpoint asks for"):
        hf_source(checkpoint)


def test_bases_of_all_blocks() -> None:
    with pytest.raises(SourceError, match="layer_rope_theta is not a list of 3 numbers"):
        TABLE["GraniteSWAForCausalLM"].completed({**_SMALL, "layer_rope_theta": [1e4]})


@pytest.mark.parametrize(
    ("name", "rotated"), [("BambaForCausalLM", 0.5), ("BailingMoeForCausalLM", 1.0)]
)
def test_rotated_elements_become_neighbours(name: str, rotated: float) -> None:
    """And the other way; of Bamba half of a head, of Ling the queries in a matrix with others."""
    row = TABLE[name]
    config = row.completed({**_SMALL, "architectures": [name]})
    for heads, end in ((4, "q"), (2, "k")):
        module = next(m for m in row.modules if m.name.endswith((f"{end}_proj", f"value.{end}")))
        rows = module.fitted(config).rows
        assert rows is not None
        there = rows.forward(np.arange(16 * heads), heads, 16 * heads)
        assert np.array_equal(rows.inverse(there, heads, 16 * heads), np.arange(16 * heads))
        half = int(16 * rotated) // 2
        first = there[0]  # where a matrix holds others before it
        assert there[: 2 * half].tolist() == [
            first + i // 2 + i % 2 * half for i in range(2 * half)
        ]
        assert there[2 * half : 16].tolist() == [first + i for i in range(2 * half, 16)]
        assert there[16] == first + 16


def test_blocks_of_the_second_stack_come_behind() -> None:
    row = TABLE["HrmTextForCausalLM"]
    names = gguf_names(row, row.completed({**_SMALL, "H_cycles": 3, "L_cycles": 2}))
    assert names["model.L_module.layers.{b}.mlp.down_proj", 2] == "blk.2.ffn_down"
    assert names["model.H_module.layers.{b}.mlp.down_proj", 2] == "blk.5.ffn_down"
    config = row.completed({**_SMALL, "num_hidden_layers": 27, "num_layers_per_stack": 3})
    (blocks,) = [key.value(config) for key in row.keys if key.name == "block_count"]
    assert blocks == u32(3 * 2 * 4)


@pytest.mark.parametrize(
    ("name", "arch", "expected"),
    [
        ("Glm4MoeForCausalLM", "glm4moe", {"eot": 1}),
        ("SolarOpenForCausalLM", "glm4moe", {"eos": 2, "eot": 2, "unknown": 0, "bos": 3}),
        ("InternLM3ForCausalLM", "llama", {"eos": 4}),
    ],
)
def test_special_tokens_by_class(
    name: str, arch: str, expected: dict[str, int], tmp_path: Path
) -> None:
    """Of classes that share an architecture with others."""
    texts = ("<unk>", "<|user|>", "<|endoftext|>", "<|startoftext|>", "<|im_end|>")
    extra = [small.added(SIZE + number, text) for number, text in enumerate(texts)]
    ends = {str(SIZE + 4): {"content": "<|im_end|>", "special": True}}
    said = {"added_tokens_decoder": ends, **({"eos_token": "<unk>"} if arch == "llama" else {})}
    for file, content in (("tokenizer.json", small.bpe(extra=extra)),
                          ("tokenizer_config.json", said)):  # fmt: skip
        (tmp_path / file).write_text(json.dumps(content))
    keys = tokenizer_metadata(tmp_path, arch, SIZE + 5, {"architectures": [name]})
    found = {kind: keys[f"{PREFIX}{kind}_token_id"] for kind in expected}
    assert found == {kind: u32(SIZE + number) for kind, number in expected.items()}


_CHECKED = [
    name if name in ("dbrx", "minicpm3", "hrm-text") else pytest.param(name, marks=pytest.mark.slow)
    for name in gguf_models.MODELS
]


@pytest.mark.parametrize("name", _CHECKED)
def test_tensors_are_those_that_the_metadata_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `verify` looks at them, with nothing but the file."""
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_: {})
    source = hf_source(Checkpoint.open(gguf_models.build(name, tmp_path / "model")))
    assert not [*check_tensors(source)]
