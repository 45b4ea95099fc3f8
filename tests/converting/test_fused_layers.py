"""Which layers `convert --to hf` fuses or turns, and what is lost in one."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qtool.checkpoints.fused_names import fused_tensors
from qtool.converting import fused
from qtool.converting.certificate import Squares
from qtool.converting.model import Tensor
from qtool.formats.safetensors_file import from_float32, to_float32
from support.converting import converting


@dataclass(frozen=True)
class Numbers:
    """A matrix that is stored as something else."""

    values: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def dequantize(self) -> NDArray[np.float32]:
        return self.values


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_dense_parts_count_in_what_is_lost(dtype: str, transposed: bool) -> None:
    """One expert of an odd size, whose gate is quantized, and whose up lies in bfloat16."""
    draw = np.random.default_rng(0)
    gate, up = (draw.normal(size=(3, 5)).astype(np.float32) for _ in range(2))
    raw = from_float32(up, "BF16", "up")
    up = to_float32(raw, "BF16", up.shape)
    parts = (
        Tensor("gate", (3, 5), "I32", "w4", read=lambda: Numbers(gate)),
        Tensor("up", (3, 5), "BF16", "BF16", raw=lambda: raw),
    )
    shape = (1, 5, 6) if transposed else (1, 6, 5)
    whole = Tensor("both", shape, "I32", "BF16 and w4", parts=(parts,), transposed=transposed)
    sums = Squares()
    found = np.concatenate([*fused.pieces(whole, dtype, sums)])
    both = np.concatenate([gate, up])[None]
    expected = both.swapaxes(1, 2) if transposed else both
    assert found.tobytes() == from_float32(expected, dtype, "both").tobytes()
    lost = np.linalg.norm(to_float32(found, dtype, expected.shape) - expected)
    assert sums.relative_error == pytest.approx(lost / np.linalg.norm(expected), rel=1e-5)
    assert sums.same == (dtype == "F32")


def test_a_square_matrix_is_not_turned() -> None:
    """transformers cannot tell it from its transpose, and takes it as it is."""
    from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}

    def tensors(inner: int) -> dict[str, tuple[tuple[int, ...], bool]]:
        text = dict(
            vocab_size=96, hidden_size=64, num_hidden_layers=1, head_dim=16, num_experts=2,
            num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=1,
            moe_intermediate_size=inner, rope_parameters=rope,
        )  # fmt: skip
        seeing = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2,
                      out_hidden_size=64, deepstack_visual_indexes=[0])  # fmt: skip
        config = Qwen3VLMoeConfig(text_config=text, vision_config=seeing)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        name = "model.language_model.layers.0.mlp.experts.0.up_proj.weight"
        found = fused_tensors(model, [name])
        assert all(one.matrix in ((inner, 64), (64, inner)) for one in found)
        return {one.name.rpartition(".")[2]: (one.shape, one.transposed) for one in found}

    transposed, square = tensors(48), tensors(32)
    assert transposed == {"gate_up_proj": ((2, 64, 96), True), "down_proj": ((2, 48, 64), True)}
    assert square == {"gate_up_proj": ((2, 64, 64), False), "down_proj": ((2, 64, 32), False)}


def test_dense_models_need_no_torch(tmp_path: Path) -> None:
    (artifact,) = converting.artifacts(tmp_path, {"awq": ()}).values()
    program = (
        "import sys; from qtool.api import convert; "
        "convert(sys.argv[1], 'hf', sys.argv[2], quiet=True); "
        "sys.exit(sorted({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    # From elsewhere than the checkout, which may have no kernels: the installed package.
    line = [sys.executable, "-c", program, artifact, tmp_path / "out"]
    done = subprocess.run(line, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
