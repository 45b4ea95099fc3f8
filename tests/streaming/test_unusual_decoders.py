"""Decoders whose code does not go the usual way: what is run is what transformers runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.roles import outside_reason, roles_of
from qtool.errors import UnsupportedError
from qtool.formats.layer_names import is_head
from qtool.formats.safetensors_header import TensorInfo
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from qtool.streaming.outer_forward import heads_of
from qtool.streaming.skeleton import Skeleton, read_parameter
from qtool.verification.against.exact import only_scaled
from qtool.verification.run import verify_artifact
from support.models import arch_models, handed_models, header_files
from support.models.unusual_decoders import CAUSAL, SMALL, TOKENS, built, check_logits
from support.runs import quantizing


@pytest.mark.parametrize("name", CAUSAL)
def test_logits(name: str, tmp_path: Path) -> None:
    check_logits(tmp_path / "model", built(name, tmp_path / "model", **CAUSAL[name]))


def test_blocks_that_are_run_again_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in models that loop over some of their blocks, whether all of them or the last ones."""
    built("llama", tmp_path / "model", **SMALL)
    every = torch.nn.ModuleList.__getitem__
    for again in (slice(0, 3), slice(1, 3), slice(2, 3)):

        def loop(modules: Any, index: Any, again: slice = again) -> Any:
            found = every(modules, index)
            return [*found, *every(modules, again)] if isinstance(index, slice) else found

        monkeypatch.setattr(torch.nn.ModuleList, "__getitem__", loop)
        skeleton = Skeleton.open(Checkpoint.open(tmp_path / "model"))
        with pytest.raises(UnsupportedError, match=r"runs blocks of .* several times"):
            skeleton.embed(TOKENS)
        monkeypatch.undo()


def test_the_head_is_not_read_before_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way from the last block to it is: that no block comes again. Of a model within another,
    too, whose own head is none."""
    model = built("llama", tmp_path / "model", **SMALL)
    read: list[str] = []

    def spy(owner: Any, attribute: str, pieces: Any, reading: Any) -> Any:
        read.extend(piece.checkpoint_name for piece in pieces)
        return read_parameter(owner, attribute, pieces, reading)

    monkeypatch.setattr("qtool.streaming.skeleton.read_parameter", spy)
    Skeleton.open(Checkpoint.open(tmp_path / "model")).embed(TOKENS)
    assert read == ["model.norm.weight"]

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = model

        def get_output_embeddings(self) -> None:
            return None

    assert heads_of(Outer()) == heads_of(model) == [model.lm_head]


def test_blocks_that_share_weights_are_said_to(tmp_path: Path) -> None:
    keys = {
        **SMALL, "num_key_value_heads": 4, "num_hidden_layers": 4, "n_mamba_heads": 2,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 32, "attention_hidden_size": 128, "mamba_dt_rank": 8,
        "use_mamba_kernels": False, "tie_word_embeddings": True,
    }  # fmt: skip
    built("zamba", tmp_path / "model", **keys)
    with pytest.raises(UnsupportedError, match="has the same weights in several blocks"):
        Skeleton.open(Checkpoint.open(tmp_path / "model"))


def test_a_buffer_without_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built("falcon_h1", tmp_path / "model", **CAUSAL["falcon_h1"])
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda *_: None)
    monkeypatch.setattr(
        "transformers.models.falcon_h1.modeling_falcon_h1.FalconH1PreTrainedModel._init_weights",
        lambda *_: None,
    )
    with pytest.raises(UnsupportedError, match=r"leaves .*, which no checkpoint holds, without"):
        Skeleton.open(Checkpoint.open(tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.embed_tokens.embed_norm.weight", "norm"),
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.word_embeddings_layernorm.weight", "norm"),
        ("head.weight", "output head"),
        ("model.head.weight", "output head"),
        ("model.visual.pooling.head.weight", "outside the decoder blocks"),
    ],
)
def test_tensors_outside_of_the_blocks(name: str, reason: str) -> None:
    assert outside_reason(name) == reason
    assert is_head(name.removesuffix(".weight")) == (reason == "output head")


def test_tables_within_blocks_are_no_layers() -> None:
    """Qwen4-Exp looks n-grams up in tables that its blocks hold in parts."""
    blocks = structure.BlockStack("model.layers", 2)
    name = "model.layers.0.ple.ple_embedding.ngram_embedding.shard_0.weight"
    info = TensorInfo(name, "BF16", (210, 64), 0, 2 * 210 * 64)
    assert roles_of({name: info}, blocks)[name].reason == "embedding"
    name = "model.layers.0.mamba.A_log"  # Zamba's has an axis of heads, and is no experts'
    info = TensorInfo(name, "BF16", (2, 64, 16), 0, 4 * 64 * 16)
    assert roles_of({name: info}, blocks)[name].reason == "3-D, not a matrix"
    layer = "model.layers.0.ple.key_proj.weight"
    info = TensorInfo(layer, "BF16", (64, 64), 0, 2 * 64 * 64)
    assert roles_of({layer: info}, blocks)[layer].reason is None


def test_what_the_source_lacks_is_not_missed(tmp_path: Path) -> None:
    """Block 0 of ModernBERT's decoder has no norm before its attention."""
    folder = tmp_path / "model"
    keys = {**SMALL, "num_hidden_layers": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1,
            "sep_token_id": 2, "tie_word_embeddings": True}  # fmt: skip
    built("modernbert-decoder", folder, **keys)
    found = verify_artifact(folder, against=folder)
    assert found.ok, found.findings
    alone = verify_artifact(folder)
    assert any("block 0 lacks" in one.message for one in alone.findings)


FEW = ("calibration.samples=4", "calibration.length=64", "weights.group_size=32")


def test_a_gate_of_one_row_may_be_scaled_along_with_a_norm() -> None:
    """By powers of two, most of them 1; without the norm's ratio nothing can be told of one row."""
    gate = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    ratio = np.ones(64, np.float32)
    ratio[[3, 9]] = 2.0, 0.5
    found = only_scaled(gate * ratio, gate, {"norm.weight": ratio})
    assert found is not None and found.norm == "norm.weight" and found.rows is None
    assert only_scaled(gate * ratio, gate, {}) is None
    other = gate * ratio
    other[0, 20] += 1
    assert only_scaled(other, gate, {"norm.weight": ratio}) is None


@pytest.mark.parametrize("name", ["gpt_neox", "qwen2_moe"])
def test_scales_that_leave_most_of_a_tensor_are_no_damage(name: str, tmp_path: Path) -> None:
    """AWQ scales values in a bias of queries, keys and values together."""
    if name == "gpt_neox":
        folder = arch_models.build("gpt_neox", tmp_path / "model")
    else:
        folder = tmp_path / "model"
        keys = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32}  # fmt: skip
        built(name, folder, **keys)
    quantizing.add_tokenizer(folder)
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = (*FEW, f"calibration.source={text}", "indivisible=dense")
    run = quantizing.quantize(folder, "w4g128-awq", tmp_path / "out", *sets)
    found = verify_artifact(run.out, against=folder)
    assert found.ok, found.findings
    # What is damaged in the same tensors is found as before.
    part = "query_key_value.bias" if name == "gpt_neox" else "shared_expert_gate.weight"
    path = run.out / "model.safetensors"
    state = load_file(path)
    key = next(key for key in state if key.endswith(part))
    state[key].view(-1)[5] += 1
    save_file(state, path, {"format": "pt"})
    assert any(key in one.message for one in verify_artifact(run.out, against=folder).findings)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("self_attn.indexer.weights_proj", "chooses, or sums up, what attention reads"),
        ("self_attn.indexer.wq_b", "chooses, or sums up, what attention reads"),
        ("attn.compressor.wkv", "chooses, or sums up, what attention reads"),
        ("attn.indexer.compressor.wgate", "chooses, or sums up, what attention reads"),
        ("altup.prediction_coefs", "mixes streams of hidden states"),
        ("mlp_hyper_connection.input_mix_weight_up", "mixes streams of hidden states"),
        ("self_attn.q_b_proj", None),
    ],
)
def test_small_matrices_that_decide_much_stay_as_they_are(name: str, reason: str | None) -> None:
    """As vLLM builds them, which fuses an indexer's keys with the weights of its heads."""
    blocks = structure.BlockStack("model.layers", 2)
    weight = f"model.layers.0.{name}.weight"
    info = TensorInfo(weight, "BF16", (64, 128), 0, 2 * 64 * 128)
    found = roles_of({weight: info}, blocks)[weight].reason
    assert found is None if reason is None else found is not None and found.startswith(reason)


GEMMA4 = {
    **SMALL, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 16, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
}  # fmt: skip


def test_a_row_of_a_table_may_be_taken_by_its_number(tmp_path: Path) -> None:
    """Gemma 4 takes that of the padding out of the embedding's weight."""
    seeing = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    keys = {"text_config": GEMMA4, "vision_config": seeing, "audio_config": None}
    model = built("gemma4", tmp_path / "model", AutoModelForImageTextToText, **keys)
    check_logits(tmp_path / "model", model)


def test_blocks_of_other_kinds_need_not_be_alike(tmp_path: Path) -> None:
    """One block of DeepSeek V4 may be the only one with no indexer, as config.json says it is."""
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention",
             "compressed_sparse_attention", "compressed_sparse_attention"]  # fmt: skip
    name, keys = handed_models.HANDED["deepseek_v4"]
    keys = {**keys, "layer_types": kinds, "mlp_layer_types": ["moe"] * 4}
    built(name, tmp_path / "model", **keys)
    assert verify_artifact(tmp_path / "model").ok
    state = load_file(tmp_path / "model" / "model.safetensors")
    lost = "model.layers.2.attn.indexer.wq_b.weight"
    del state[lost]
    save_file(state, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    found = verify_artifact(tmp_path / "model").findings
    (finding,) = [f for f in found if (f.check, f.severity) == ("tensors", "error")]
    assert finding.name == lost and "which 2 other blocks have" in finding.message


def test_a_table_for_each_layer_is_said_to_stay_dense(tmp_path: Path) -> None:
    model = Checkpoint.open(header_files.write(tmp_path, {
        "model.embed_tokens.weight": (1000, 128),
        "model.embed_tokens_per_layer.weight": (1000, 512),
        "model.layers.0.self_attn.q_proj.weight": (128, 128),
    }))  # fmt: skip
    (said,) = [w for w in make_plan(load("w4g128-rtn"), model).warnings if "stays dense" in w]
    assert said.startswith("78% of the weights are a table of embeddings for each layer")


def test_towers_are_not_run_as_decoders() -> None:
    """A list of blocks that paints may be the largest, and is no decoder."""
    from torch import nn

    from qtool.streaming.meta_model import find_blocks

    decoder, painter = (nn.ModuleList([nn.Linear(n, n)]) for n in (4, 8))
    model = nn.ModuleDict({"vqmodel": nn.ModuleDict({"up": painter}), "layers": decoder})
    assert find_blocks(model)[0] == "layers."
    assert find_blocks(nn.ModuleDict({"vqmodel": painter}))[0] == "vqmodel."
