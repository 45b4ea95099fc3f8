"""Falcon-H1 as GGUF: what the model multiplies by is in the matrices of the file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import QtoolError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.open import open_source
from qtool.gguf.source import GgufSource, as_floats
from qtool.gguf.to_hf.weights import gguf_weights
from qtool.messages.summary import OUTPUTS
from qtool.verification.run import verify_artifact
from support.gguf import gguf_models
from support.gguf.gguf_runs import fed_blocks, without_tokenizers, write
from support.runs import quantizing

__all__ = ["without_tokenizers"]


def values(source: GgufSource, name: str) -> NDArray[np.float32]:
    tensor = next(one for one in source.tensors if one.name == name)
    return as_floats(tensor, tensor.read(0, tensor.rows))


def test_matrices_are_multiplied_in_turn(tmp_path: Path) -> None:
    """One after another, and rounded between; a bfloat16 matrix is float32 then."""
    folder = gguf_models.build("falcon-h1", tmp_path / "model")
    source, there = hf_source(Checkpoint.open(folder)), load_file(folder / "model.safetensors")
    keys = there["model.layers.0.self_attn.k_proj.weight"]
    expected = keys * np.float32(0.31) * np.float32(0.9)
    assert np.array_equal(values(source, "blk.0.attn_k.weight"), expected)
    mixed = there["model.layers.1.mamba.in_proj.weight"] * np.float32(1.3)
    at = 0  # gates, states, inputs, outputs, steps
    for rows, factor in zip((96, 96, 16, 16, 6), (0.35, 0.26, 0.54, 0.19, 0.61), strict=True):
        mixed[at : at + rows] *= np.float32(factor)
        at += rows
    assert at == len(mixed)
    assert np.array_equal(values(source, "blk.1.ssm_in.weight"), mixed)
    one = next(t for t in source.tensors if t.name == "blk.1.ssm_in.weight")
    some = as_floats(one, one.read(90, 200))  # rows of three of them
    assert np.array_equal(some, mixed[90:200])
    assert np.array_equal(
        values(source, "blk.1.ffn_up.weight"), there["model.layers.1.feed_forward.up_proj.weight"]
    )


def test_a_swept_block_is_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later blocks are fed by matrices that the model multiplies by itself."""
    folder = quantizing.add_tokenizer(gguf_models.build("falcon-h1", tmp_path / "model"))
    text = quantizing.text_file(tmp_path / "text.txt", 6000)
    sets = [f"calibration.source={text}", "calibration.samples=8", "calibration.length=32"]
    fed = fed_blocks(monkeypatch)
    made = write(folder, tmp_path / "out.gguf", "q8_0", "method=gptq", *sets)
    swept = {layer.name for layer in made.layers if layer.of == OUTPUTS}
    growths = {t.name: t.growth for t in hf_source(Checkpoint.open(folder)).tensors}
    assert {n.partition(".weight")[0].rpartition(".")[2] for n in swept} >= {
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "ssm_in"
    }  # fmt: skip
    with gguf_weights(open_source(tmp_path / "out.gguf")) as (weights, source):
        for tensor in source.tensors:
            of_block = tensor.name in swept and tensor.name.startswith("blk.")
            for key in tensor.origin if of_block else ():
                growth = growths[tensor.name]
                times = 1.0 if growth is None else growth[:, None]
                np.testing.assert_allclose(
                    fed[key].numpy() * times, weights.float32(key), rtol=1e-6
                )
    assert verify_artifact(tmp_path / "out.gguf", against=folder).ok
    with GgufFile.open(tmp_path / "out.gguf") as file:
        assert file.tensors["blk.0.ssm_in.weight"].type.name == "Q8_0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ssm_multipliers": [1.0] * 4}, r"ssm_multipliers is .*, expected 5 numbers"),
        ({"mlp_multipliers": [1.0, None]}, "mlp_multipliers is null, expected a number"),
        ({"key_multiplier": "1"}, 'key_multiplier is "1", expected a number'),
        ({"mamba_norm_before_gate": True}, "mamba_norm_before_gate is true"),
        ({"tie_word_embeddings": True}, "the head is the embedding, multiplied by lm_head_mult"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias is false"),
        ({"projectors_bias": True}, "projectors_bias is true"),
        ({"time_step_limit": [0.0, 1.0]}, "time_step_limit is"),
    ],
)
def test_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = gguf_models.build("falcon-h1", tmp_path / "model")
    gguf_models.rewrite_config(folder, lambda config: config.update(change))
    with pytest.raises(QtoolError, match=said):
        hf_source(Checkpoint.open(folder))
