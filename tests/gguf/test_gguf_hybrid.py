"""Gated delta nets as GGUF: order of heads, rates, blocks that predict, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.hf_config import complete
from qtool.errors import QtoolError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value, array, u32
from qtool.gguf.architectures import TABLE, mtp
from qtool.gguf.architectures.linear_attention import is_linear
from qtool.gguf.architectures.sizes import SIZES
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.from_hf.value_maps import MINUS_EXP
from qtool.gguf.to_hf.model import hf_model
from qtool.verification.gguf.tensors import check_tensors
from support.gguf import gguf_models
from support.gguf.gguf_from_hf import without_tokenizers

__all__ = ["without_tokenizers"]

ROW, NEXT = TABLE["Qwen3_5ForCausalLM"], TABLE["Qwen3NextForCausalLM"]
SETTINGS = {
    "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}  # fmt: skip


def _module(row: Any, name: str, **more: Any) -> Any:
    found = next(m for m in row.modules if m.name.endswith("linear_attn." + name))
    return found.fitted(complete({**SETTINGS, **more}, row.defaults))


def test_values_of_a_key_are_taken_apart() -> None:
    """Six heads of values, three to each of two keys: the first of each key, the second, ..."""
    heads = _module(ROW, "A_log").rows
    every = np.arange(6)
    assert heads.forward(every, 2, 6).tolist() == [0, 3, 1, 4, 2, 5]
    mixed = _module(ROW, "in_proj_qkv").rows
    every = np.arange(16 + 24)
    there = mixed.forward(every, 2, 40)
    assert there[:24].tolist() == [*range(16), 16, 17, 18, 19, 28, 29, 30, 31]
    assert sorted(there) == every.tolist()
    assert np.array_equal(mixed.inverse(there, 2, 40), every)
    columns = _module(ROW, "out_proj").columns
    assert columns[:8].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert _module(ROW, "A_log", linear_num_value_heads=2).rows is None


def test_what_is_mixed_key_by_key_is_two_matrices() -> None:
    given = dict(linear_num_value_heads=4)
    qkv, gate = _module(NEXT, "in_proj_qkvz.qkv", **given), _module(NEXT, "in_proj_qkvz.z", **given)
    assert qkv.rows.taken == (48, 32) and gate.rows.taken == (48, 16)
    rows = [qkv.rows.forward(np.arange(32), 2, 32), gate.rows.forward(np.arange(16), 2, 16)]
    assert sorted(np.concatenate(rows)) == list(range(48))
    assert rows[0][:8].tolist() == [0, 1, 2, 3, 24, 25, 26, 27]
    assert rows[1][:8].tolist() == [*range(16, 24)]


def test_rates_and_their_logarithms() -> None:
    logarithms = np.linspace(-4, 3, 57, dtype=np.float32)
    rates = MINUS_EXP.forward(logarithms)
    assert rates.dtype == np.float32 and (rates < 0).all()
    assert np.allclose(rates, -np.exp(logarithms), rtol=1e-6)
    assert np.array_equal(MINUS_EXP.forward(MINUS_EXP.inverse(rates)), rates)


def test_which_blocks_have_linear_attention() -> None:
    def linear(**more: Any) -> list[bool]:
        return [is_linear({**SETTINGS, **more}, block) for block in range(5)]

    assert linear() == [True, True, True, False, False]
    assert linear(full_attention_interval=2) == [True, False, True, False, False]
    kinds = ["full_attention", *["linear_attention"] * 3]
    assert linear(layer_types=kinds) == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("mtp.fc.weight", "model.layers.4.eh_proj.weight"),
        ("mtp.norm.weight", "model.layers.4.shared_head.norm.weight"),
        ("mtp.layers.0.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight"),
        ("mtp.layers.1.mlp.experts.down_proj", "model.layers.5.mlp.experts.down_proj"),
    ],
)
def test_names_of_blocks_that_predict(name: str, there: str) -> None:
    assert mtp.name_in_table(name, SETTINGS) == there
    assert mtp.name_in_checkpoint(there, SETTINGS) == name
    same = "model.layers.3.mlp.up_proj.weight"
    assert mtp.name_in_table(same, SETTINGS) == same
    assert mtp.name_in_checkpoint(same, SETTINGS) == same


def test_blocks_that_predict_are_counted() -> None:
    assert mtp.mtp_blocks(["mtp.fc.weight", "model.norm.weight"]) == 0
    assert mtp.mtp_blocks(["model.mtp.layers.1.mlp.up_proj.weight"]) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"linear_value_head_dim": 8}, "linear_key_head_dim is 4 and linear_value_head_dim 8"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5, no multiple of"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({}, ""),
    ],
)
def test_what_llama_cpp_does_not_compute(change: dict[str, Any], said: str) -> None:
    config = complete({**SETTINGS, **change}, ROW.defaults)
    found = [text for check in ROW.refuse if (text := check(config)) is not None]
    assert (said in found[0] if said else not found) and len(found) == bool(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"conv_bias": True}, "conv_bias is true"),
        ({"head_dim": 32}, "head_dim is 32"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false"),
        ({"use_expert_bias": False}, "use_expert_bias is false"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5, and it takes 1.0"),
    ],
)
def test_short_convolutions_that_llama_cpp_has_not(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = gguf_models.build("lfm2-moe", tmp_path / "model")
    gguf_models.rewrite_config(folder, lambda config: config.update(change))
    with pytest.raises(UnsupportedError, match=said):
        hf_source(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("change", "width"),
    [
        ({}, 256), ({"block_ff_dim": 1200}, 1024), ({"block_auto_adjust_ff_dim": False}, 96),
        ({"block_ffn_dim_multiplier": None}, 64),
        ({"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 10}, 100),
    ],
)  # fmt: skip
def test_how_wide_lfm2_is(change: dict[str, Any], width: int) -> None:
    row = TABLE["Lfm2ForCausalLM"]
    config = complete({"intermediate_size": 96, **change}, row.defaults)
    assert SIZES["inner of LFM2"](config) == width


def test_another_epsilon_is_told() -> None:
    config = complete({**SETTINGS, "rms_norm_eps": 1e-5}, ROW.defaults)
    assert any("where the model adds 1e-6" in str(check(config)) for check in ROW.warn)


_HEADS, _INNER = "attention.head_count_kv", "feed_forward_length"


@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-h-moe", "lfm2", "jamba"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        (_HEADS, None),
        (_HEADS, u32(0)),
        (_HEADS, array(Kind.INT32, [2])),
        (_HEADS, array(Kind.INT32, [0] * 64)),
        (_HEADS, array(Kind.STRING, ["2"] * 4)),
        (_HEADS, -1),
        (_HEADS, 10**6),
        (_INNER, None),
        (_INNER, array(Kind.INT32, [])),
        (_INNER, -1),
        ("ssm.inner_size", None),
        ("ssm.time_step_rank", u32(0)),
    ],
)
def test_lists_by_block_that_lie(name: str, key: str, value: Any, tmp_path: Path) -> None:
    """An error in place of another model; a number stands in the list of what the file has."""
    source = hf_source(Checkpoint.open(gguf_models.build(name, tmp_path / name)))
    key = f"{source.architecture}.{key}"
    if key not in source.metadata:
        return  # that one has no state spaces
    if isinstance(value, int):
        said = source.metadata[key]
        each = [*said.value] if said.kind is Kind.ARRAY else [said.value]
        value = array(Kind.INT32, [*each[:-1], value])
    metadata: dict[str, Value] = {k: v for k, v in source.metadata.items() if k != key}
    changed = replace(source, metadata=metadata if value is None else {**metadata, key: value})
    with pytest.raises(QtoolError):
        hf_model(changed)
    list(check_tensors(changed))  # looks at what it can
