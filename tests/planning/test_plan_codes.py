"""Sources that are quantized, and whose config.json does not say so."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.main import app
from qtool.errors import UnsupportedError
from qtool.formats.dtypes import DTYPE_BYTES, byte_size
from qtool.hub import tiny_folder
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from support.gallery import raw
from support.models import header_files

CODES: dict[str, tuple[str, str, tuple[int, ...], dict[str, str]]] = {
    "gptq": ("qweight", "I32", (32, 256), {"scales": "F16"}),
    "mlx": ("weight", "U32", (256, 32), {"scales": "F16"}),
    "compressed-tensors": ("weight_packed", "I32", (256, 32), {"weight_scale": "BF16"}),
    "fp8": ("weight", "F8_E4M3", (256, 256), {"weight_scale": "F32"}),
    "fp8 in blocks": ("weight", "F8_E4M3", (256, 256), {"weight_scale_inv": "F32"}),
    "fp8 as cast": ("weight", "F8_E5M2", (256, 256), {}),
    "int8": ("weight", "I8", (256, 256), {"weight_scale": "BF16"}),
    "modelopt": ("weight", "U8", (256, 128), {"weight_scale": "F8_E4M3"}),
    "bitsandbytes, 8 bits": ("weight", "I8", (256, 256), {"SCB": "F32"}),
    "bitsandbytes, 4 bits": ("weight", "U8", (32768, 1), {"weight.absmax": "U8"}),
    "hqq": ("W_q", "U8", (128, 256), {}),
    "quanto": ("weight._data", "I8", (256, 256), {}),
}


@pytest.mark.parametrize("recipe", ["w4g64-rtn", "q4_k_m"])
@pytest.mark.parametrize("kind", CODES)
def test_codes_without_a_config_are_refused(recipe: str, kind: str, tmp_path: Path) -> None:
    """From the headers: the scales may come before the codes, and nothing is read of either."""
    config = json.loads((tiny_folder() / "config.json").read_text())
    shapes = header_files.llama(vocabulary=config["vocab_size"])
    model = header_files.write(tmp_path / "m", shapes, config)
    name = "model.layers.0.self_attn.q_proj"
    last, dtype, shape, beside = CODES[kind]
    with raw.edited(model) as tensors:
        del tensors[f"{name}.weight"]
        for scales, of in beside.items():
            tensors[f"{name}.{scales}"] = raw.Raw(of, (1, 16), bytes(DTYPE_BYTES[of] * 16))
        tensors[f"{name}.{last}"] = raw.Raw(dtype, shape, bytes(byte_size(dtype, shape)))
    done = CliRunner().invoke(app, ["plan", str(model), "--recipe", recipe])
    assert isinstance(done.exception, UnsupportedError)
    text = str(done.exception)
    where = f", with scales in {name}.{next(iter(beside))}" if beside else ""
    assert f"({name}.{last}, {dtype} {list(shape)}, holds codes{where})" in text
    assert text.endswith("which needs its quantization_config")


def test_experts_in_codes_without_a_config_are_refused(tmp_path: Path) -> None:
    """Fused ones have no `weight` in their names; gpt-oss stores them as blocks."""
    for last, dtype, scales in (
        ("down_proj", "F8_E4M3", "down_proj_scale_inv"),
        ("down_proj_blocks", "U8", "down_proj_scales"),
    ):
        folder = tmp_path / last
        header_files.write(folder, header_files.llama())
        experts = "model.layers.0.mlp.experts"
        with raw.edited(folder) as tensors:
            tensors[f"{experts}.{scales}"] = raw.Raw("F32", (2, 4), bytes(32))
            tensors[f"{experts}.{last}"] = raw.Raw(dtype, (2, 64, 32), bytes(4096))
        with pytest.raises(UnsupportedError, match=rf"{last}, {dtype} .* scales in .*{scales}"):
            make_plan(load("w4g64-rtn"), Checkpoint.open(folder))


def test_what_is_no_code(tmp_path: Path) -> None:
    """Buffers of integers, and scales of a cache in eight bits, say nothing of weights."""
    folder = header_files.write(tmp_path / "m", header_files.llama())
    with raw.edited(folder) as tensors:
        for last, dtype, shape in (
            ("rotary_emb.position_ids", "I64", (1, 64)),
            ("bias", "BOOL", (1, 1, 8, 8)),
            ("k_scale", "F8_E4M3", (1, 4)),
        ):
            name = f"model.layers.0.self_attn.{last}"
            tensors[name] = raw.Raw(dtype, shape, bytes(byte_size(dtype, shape)))
    assert make_plan(load("w4g64-rtn"), Checkpoint.open(folder)).tensors
